//! Sessions: a restore point published for writing.
//!
//! ```text
//!   publish ──▶ session.json + an empty layer per disk        (O(1))
//!   Session (one process, exclusive) ──▶ LayeredDisk ──▶ Layer
//!   seal    ──▶ flush, session.json names the new point and new layers (O(1))
//!   unpublish ─▶ seal, then the session goes; its point stays
//! ```
//!
//! Neither publish nor seal writes to RocksDB, so both work while a backup
//! holds the repository for writing. A sealed point stands in the session's
//! document until the next writer enters it into the catalog; [`Catalog`] shows both.
//!
//! # Files
//!
//! `live/lock` is held for the moment in which a document or a name is settled.
//! `leases/` says what running programs read, so that nothing of it is deleted.
//! `writer.control` is the socket of the backup that holds the writer: it stores the disks of
//! other backups and does gcs. `backups.lock` belongs to it (see `shared_writer`).
//! `live/DIRECTORY/lock` is held by the process that writes the session;
//! `live/DIRECTORY/control` is its socket for seals. `layers/ID` are the layers,
//! `live/DIRECTORY/side/ID` those of its image files.
//! DIRECTORY is a keyed hash of the session's name, and `session.json` is
//! sealed: without the key the folder tells no names. `live/DIRECTORY/files` holds what
//! clients keep beside the disks, `live/DIRECTORY/sealed` what of it sealed points carry
//! until they are in the catalog.
//!
//! # Locks, in order
//!
//! the session's `lock`, the table of its side files, the session's own mutex for seals, the
//! table of clients' files, the locks of one (see `client_files`), the disks' stacks,
//! `live/lock`, a lease's own lock, the lock of the leases directory.
#![deny(unsafe_code)]

mod catalog;
mod client_files;
mod control;
mod disk;
mod document;
mod fold;
mod forget;
#[cfg(test)]
mod fuzz_tests;
mod gc;
mod held;
mod layer;
mod lease;
mod length;
mod live;
mod local_socket;
mod lock;
#[allow(unsafe_code)]
mod mapping;
mod place;
mod progress_mark;
mod prune;
mod publish;
mod quarantine;
mod recent;
mod reclaim;
mod seal;
mod sealed_files;
mod session;
mod shared_writer;
mod shares;
mod side_file;
mod turn;
mod unpublish;
mod verify;
mod verify_layers;

pub use catalog::{enter_sealed_points, Catalog, Entered};
pub use client_files::{
    CarriedFile, CarriedFiles, ClientFile, ClientFiles, ClientFilesReader, Creation, FileEntry,
    FileId, FileKind, FileTree, LeftOut, Removal, MAX_CLIENT_FILES, MAX_LARGE_BYTES,
    MAX_NAME_BYTES, MAX_SMALL_BYTES,
};
pub use document::{SessionDisk, SessionDocument};
pub use fold::{fold, Folded};
pub use forget::{PointRemoval, Published};
pub use gc::{ask_for_gc, collect_garbage, Asked, Collected};
pub use held::Held;
pub use lease::{read_leases, Lease, LeaseDocument, LeaseHold, Served};
pub use length::Length;
pub use live::{open_live_disk, open_live_side_file, open_point_disk};
pub use prune::{judge, Judged};
pub use publish::{publish, publish_with_files};
pub use quarantine::{check_offered, set_quarantine, settle_quarantine, Settled};
pub use recent::Recent;
pub use reclaim::{reclaim_layers, InUse};
pub use seal::{seal, Sealed};
pub use session::{session, sessions, Session, SessionState};
pub use shared_writer::{Openers, SharedWriter};
pub use shares::{shares, MachineShares, PointShares, Shares, StoredBytes};
pub use turn::{write_before_background, BackgroundTurn, BackgroundWork};
pub use unpublish::unpublish;
pub use verify::Inventory;
pub use verify_layers::LayerReport;
