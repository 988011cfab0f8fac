//! Sessions: a restore point published for writing.
//!
//! ```text
//!   publish ──▶ session.json + an empty layer per disk        (O(1))
//!   Session (one process, exclusive) ──▶ LayeredDisk ──▶ Layer
//!   seal    ──▶ flush, session.json names the new point and new layers (O(1))
//!   unpublish ─▶ seal, then the session goes; its point stays
//! ```
//!
//! Neither publish nor seal writes to RocksDB, so both work while a backup holds the repository for
//! writing. A sealed point is in the session's document until the next writer enters it into the
//! catalog. [`Catalog`] shows both.
//!
//! # Files
//!
//! - `live/lock` is held briefly while a document or a name is decided.
//! - `leases/` names everything that running programs read, so that it is not deleted.
//! - `writer.control` is the socket of the backup that holds the writer. That backup stores the
//!   disks of other backups, does gcs and removes points. `backups.lock` belongs to it (see
//!   `shared_writer`).
//! - `live/DIRECTORY/lock` is held by the process that writes the session. `live/DIRECTORY/control`
//!   is its socket for seals, `live/DIRECTORY/activity` the one for counts of requests.
//! - `layers/ID` are the layers, `live/DIRECTORY/side/ID` those of the session's image files.
//! - `live/DIRECTORY/files` holds the files that clients keep beside the disks.
//!   `live/DIRECTORY/sealed` holds the files that sealed points carry, until the points are in the
//!   catalog.
//! - `live/DIRECTORY/notes` says where a recovered machine runs and to where its disks were moved
//!   (see `session_notes`).
//!
//! - `traces/` holds, for each machine, what it reads first at a boot (see `boot_trace`).
//!
//! - `begun/` holds, for each point that is on its way here, what has arrived (see `coming`).
//!
//! DIRECTORY is a keyed hash of the session's name, and `session.json` is encrypted: without the
//! key the folder reveals no names.
//!
//! # Locks, in order
//!
//! The session's `lock`, the table of its side files, the session's own mutex for seals, the table
//! of clients' files, the locks of one such file (see `client_files`), the disks' stacks,
//! `live/lock`, a lease's own lock, the lock of the leases directory.
#![deny(unsafe_code)]

mod activity;
mod addresses;
mod background_lock;
mod boot_trace;
mod catalog;
mod change_points;
mod client_files;
mod coming;
mod control;
mod disk;
mod document;
mod ended_session;
mod fold;
mod folded_disks;
mod forget;
#[cfg(test)]
mod fuzz_tests;
mod gc;
mod hexadecimal;
mod in_use;
mod inventory;
mod layer;
mod lease;
mod length;
mod live;
mod local_socket;
mod lock;
#[allow(unsafe_code)]
mod mapping;
mod owned_session;
mod owner_lock;
mod paths;
mod point_change;
mod point_disk;
mod prune;
mod publish;
mod quarantine;
mod read_lease;
mod repository_access;
mod rollback_guard;
mod seal;
mod seal_report;
mod sealed_files;
mod session;
mod session_notes;
mod session_progress;
mod session_stamps;
mod shared_writer;
mod side_file;
mod top_layers;
mod unpublish;
mod usage;
mod verify;
mod writer_messages;

pub use activity::{
    served_sessions, session_activity, ActivityDetail, DiskActivity, HeatMap, OperationActivity,
    SessionActivity,
};
pub use background_lock::{write_before_background, BackgroundLock, BackgroundWork};
pub use boot_trace::{adopt_boot_trace, boot_trace};
pub use catalog::{enter_sealed_points, open_for_repair, Catalog, EnteredPoints};
pub use change_points::change_points;
pub use client_files::{
    CarriedFile, CarriedFiles, ClientFile, ClientFiles, ClientFilesReader, Creation, FileEntry,
    FileId, FileKind, FileTree, Removal, SkippedFile, MAX_CLIENT_FILES, MAX_LARGE_BYTES,
    MAX_NAME_BYTES, MAX_SMALL_BYTES,
};
pub use coming::{
    coming_sentence, BegunCopy, BegunDisk, ByteRanges, Coming, ComingPoint, Differences,
    FetchSocket, PieceSource,
};
pub use document::{SessionDisk, SessionDocument};
pub use fold::{fold, FoldReport};
pub use forget::{GivingUp, PointRemoval, Published};
pub use gc::{ask_for_gc, collect_garbage, Collected, GcAnswer};
pub use in_use::{remove_unused_layers, InUse};
pub use inventory::{damaged_sessions, Inventory};
pub use lease::{read_leases, Lease, LeaseDocument, LeaseHold, Served};
pub use length::Length;
pub use live::{open_live_disk, open_live_side_file};
pub use owned_session::{discard_abandoned_sessions, CaptureLimit, OwnedSession};
pub use point_change::PointChange;
pub use point_disk::open_point_disk;
pub use prune::{judge, PointVerdict};
pub use publish::{publish, publish_coming, publish_with_files};
pub use quarantine::{check_offered, set_quarantine, settle_quarantine, QuarantineReport};
pub use read_lease::ReadLease;
pub use repository_access::{keep_files_private, RepositoryAccess};
pub use rollback_guard::{session_damage, SessionDamage};
pub use seal::seal;
pub use seal_report::SealReport;
pub use session::{session, sessions, Session, SessionState};
pub use session_notes::{NotesLock, SessionNotes};
pub use session_stamps::{session_stamps, waiting_points, SessionStamp};
pub use shared_writer::{change_through_backup, SharedWriter};
pub use unpublish::unpublish;
pub use usage::{usage, MachineUsage, PointUsage, StoredBytes, Usage};
pub use verify::{
    joined, verify, LayerReport, ProgressSum, VerifyOutcome, VerifyPart, VerifyRequest, VerifyScope,
};
