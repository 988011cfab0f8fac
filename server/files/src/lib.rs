//! Files out of restore points, read by a small machine of our own.
//!
//! ```text
//! point ─▶ throwaway session ─▶ nbdkit ─▶ QEMU without a network: Debian's kernel mounts ─▶ virtio port
//!                                                                                         │
//!                              command ◀─ listing, file, tar ◀─ checks of this module ◀───┘
//! ```
//!
//! This host's kernel never sees the file systems. A file system that takes the machine over can only
//! answer wrongly, so every answer is checked: its length, the number of names, that names are names,
//! that each lies in a folder that was listed before, and that no more content comes than was announced.
#![forbid(unsafe_code)]

mod address;
mod archive;
mod attached;
mod client;
mod difference;
mod groups;
mod history;
mod names;
mod paths;
mod systems;
mod tar;
mod zip;

pub use address::{FilesAddress, HistoryAddress, point_with_disks};
pub use archive::{Archive, ArchiveFormat, LeftOut, other_archive};
pub use attached::AttachedDisks;
pub use client::{Client, Limits, Received};
pub use coldrise_files_protocol::{Entry, EntryKind, MAX_PATH_BYTES, PORT, is_encrypted};
pub use difference::{Change, ChangeKind, Snapshot};
pub use history::{History, MAX_DISKS, State, Version, together};
pub use names::{join, matches, path_hex, printable, shown};
pub use systems::{FileSystem, FileSystems, choose};
