//! What clients keep in a session beside its disks: configuration, locks, logs, nvram,
//! swap, a hypervisor's own snapshots. Ordinary files and folders, as hypervisors
//! make them in a machine's folder.
//!
//! ```text
//!   names, ids          FileTree      live/HASH/files/tree       replaced whole
//!   up to 256 bytes     ClientFile    the same
//!   up to 1 MiB         ClientFile    live/HASH/files/ID         replaced whole
//!   what grew beyond    ClientFile    live/HASH/files/ID.layer   a layer over nothing
//!   seal                CarriedFiles  small files go along into the restore point
//! ```
//!
//! The process that writes the session has [`ClientFiles`], and it alone changes
//! anything; others read through [`ClientFilesReader`].
//!
//! # Order of writes
//!
//! A new file is empty, and the list says so. A content is stored before the list says where,
//! and removed after the list has forgotten it; so every name has its content at any moment. The list and each content are replaced by a synced file, a rename and a
//! sync of the folder. What a crash leaves without a name is removed when the session
//! is opened next.
//!
//! A failure before the rename changes nothing, and what was written is still in
//! memory: it can be flushed again, and is no reason to stop. When the sync of the
//! folder fails nobody knows what a crash would leave: the session stops.

mod carried;
mod file;
mod folder;
mod hexadecimal;
mod inside;
mod names;
mod reader;
mod tree;
mod writer;

pub(crate) use carried::{begin_files, carry, carry_idle, hash, Carried};
pub use carried::{CarriedFile, CarriedFiles, LeftOut};
pub use file::{ClientFile, MAX_LARGE_BYTES};
pub(crate) use folder::FilesFolder;
pub use folder::MAX_SMALL_BYTES;
pub use names::MAX_NAME_BYTES;
pub use reader::ClientFilesReader;
pub use tree::{Creation, FileEntry, FileId, FileKind, FileTree, Removal, MAX_CLIENT_FILES};
pub use writer::ClientFiles;
