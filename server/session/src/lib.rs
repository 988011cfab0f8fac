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
//!   `writer::shared`).
//! - `live/DIRECTORY/lock` is held by the process that writes the session. `live/DIRECTORY/control`
//!   is its socket for seals, `live/DIRECTORY/activity` the one for counts of requests.
//! - `layers/ID` are the layers, `live/DIRECTORY/side/ID` those of the session's image files.
//! - `live/DIRECTORY/files` holds the files that clients keep beside the disks.
//!   `live/DIRECTORY/sealed` holds the files that sealed points carry, until the points are in the
//!   catalog.
//! - `live/DIRECTORY/notes` says where a recovered machine runs and to where its disks were moved
//!   (see `session_folder::notes`).
//!
//! - `traces/` holds, for each machine, what it reads first at a boot (see `boot_trace`).
//!
//! - `begun/` holds, for each point that is on its way here, what has arrived (see `incoming`).
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
mod boot_trace;
mod client_files;
mod disks;
mod fold;
#[cfg(test)]
mod fuzz_tests;
mod hexadecimal;
mod incoming;
mod layer;
mod live_disk;
mod locks;
mod paths;
mod points;
mod session_folder;
mod sessions;
mod sockets;
mod verify;
mod writer;

pub use activity::{
    ActivityDetail, DiskActivity, OperationActivity, SessionActivity, served_sessions,
    session_activity,
};
pub use boot_trace::{adopt_boot_trace, boot_trace};
pub use client_files::{
    CarriedFile, CarriedFiles, ClientFile, ClientFiles, ClientFilesReader, Creation, FileEntry,
    FileId, FileKind, FileTree, MAX_SMALL_BYTES, Removal, SkippedFile,
};
pub use disks::length::Length;
pub use disks::point_disk::open_point_disk;
pub use fold::{FoldReport, Folded, fold};
pub use incoming::{
    ByteRanges, Differences, FetchSocket, IncomingContent, IncomingPoint, PartialCopy, PartialDisk,
    PieceSource, incoming_sentence,
};
pub use live_disk::{open_live_disk, open_live_side_file};
pub use locks::lease::{Lease, LeaseDocument, LeaseHold, Served, read_leases};
pub use points::catalog::{Catalog, enter_sealed_points, open_for_repair};
pub use points::forget::{IncomingRemoval, PointRemoval, Published};
pub use points::in_use::{InUse, remove_unused_layers};
pub use points::inventory::{Inventory, damaged_sessions};
pub use points::prune::{PointVerdict, judge};
pub use points::quarantine::{QuarantineReport, apply_quarantine, check_offered, set_quarantine};
pub use points::read_lease::ReadLease;
pub use points::usage::{MachineUsage, PointUsage, StoredBytes, Usage, usage};
pub use session_folder::document::{ReceivedFrom, SessionDisk, SessionDocument};
pub use session_folder::notes::{NotesLock, SessionNotes};
pub use session_folder::rollback_guard::{SessionDamage, session_damage};
pub use session_folder::stamps::{SessionStamp, session_stamps, waiting_points};
pub use sessions::changes::{BlockPlace, Change, HeldMarks, SessionChanges};
pub use sessions::follow::{FollowProgress, Follower, Round, RoundTime};
pub use sessions::listed::{SessionState, session, sessions};
pub use sessions::marks::{
    SessionMark, SessionMarks, check_mark, layers_with_marks, session_marks, set_mark_rules,
};
pub use sessions::owned::{CaptureLimit, OwnedSession, discard_abandoned_sessions};
pub use sessions::parts::update_parts;
pub use sessions::point_of_mark::PointOfMark;
pub use sessions::publish::{publish, publish_incoming, publish_with_files};
pub use sessions::received::ReceivedSession;
pub use sessions::seal::{seal, seal_at, seal_mark_of};
pub use sessions::seal_report::SealReport;
pub use sessions::session::Session;
pub use sessions::sites::SiteProgress;
pub use sessions::unpublish::unpublish;
pub use sockets::point_change::PointChange;
pub use verify::{
    ProgressSum, VerifyOutcome, VerifyPart, VerifyRequest, VerifyScope, joined, verify,
};
pub use writer::access::{RepositoryAccess, keep_files_private};
pub use writer::background_lock::{BackgroundLock, BackgroundWork};
pub use writer::gc::{Collected, GcAnswer, ask_for_gc, collect_garbage};
pub use writer::shared::{SharedWriter, change_through_backup};
