//! Files that clients keep in a session beside its disks: configuration, locks, logs, nvram, swap,
//! a hypervisor's own snapshots. These are the ordinary files and folders that hypervisors create
//! in a machine's folder.
//!
//! ```text
//!   names, ids          FileTree      live/HASH/files/tree       replaced whole
//!   up to 256 bytes     ClientFile    the same
//!   up to 1 MiB         ClientFile    live/HASH/files/ID         replaced whole
//!   what grew beyond    ClientFile    live/HASH/files/ID.layer   a layer over nothing
//!   seal                CarriedFiles  small files go along into the restore point
//! ```
//!
//! The process that writes the session has [`ClientFiles`]. Only this process changes files; others
//! read through [`ClientFilesReader`].
//!
//! # Order of writes
//!
//! The list marks a new file as empty. A content is stored before the list names its place,
//! and removed after the list no longer names it. So every name has its content at any moment. The
//! list and each content are replaced by a synced file, a rename and a sync of the folder. The next
//! opening of the session removes contents that a crash left without a name.
//!
//! A failure before the rename changes nothing. The content is still in memory and can be flushed
//! again, so the session continues. If the sync of the folder fails, the state after a crash is
//! unknown: the session stops.

mod carried;
mod clamp;
mod file;
mod folder;
mod names;
mod reader;
pub(crate) mod sealed;
mod tree;
mod writer;

pub(crate) use carried::{Carried, begin_files, carry, carry_idle, hash};
pub use carried::{CarriedFile, CarriedFiles, SkippedFile};
pub use file::ClientFile;
pub(crate) use folder::FilesFolder;
pub use folder::MAX_SMALL_BYTES;
pub use reader::ClientFilesReader;
pub use tree::{Creation, FileEntry, FileId, FileKind, FileTree, Removal};
pub use writer::ClientFiles;
