//! The base crate of Coldrise: the common types for bytes on a disk.
//!
//! It defines offsets, extents, the [`Disk`] trait that front ends serve, and the public [`Error`]
//! type with its errno. Its only I/O is for small files that a crash must leave
//! whole, and for folders and child processes that end with their process.
#![deny(unsafe_code)]

mod child_lifetime;
mod clock;
mod disk;
mod durable_file;
mod error;
mod extent;
mod held_lock;
pub mod hex;
mod holes;
mod password_file;
mod periodic_thread;
mod progress;
mod read_context;
mod scratch_folder;
mod small_file;
mod stored_ranges;
pub mod units;
mod windows_1252;

pub use child_lifetime::{end_with_this_thread, inherit_standard_streams_only};
pub use clock::now_ms;
pub use disk::{Disk, check_range};
pub use durable_file::{
    IS_FOLDER, ReplaceError, create_private, path_exists, remove_if_present, rename_over,
    replace_file, replace_file_with, sync_directory, temporary_path, write_synced,
};
pub use error::{Context, Error, ErrorKind, OPEN_FILES_ADVICE, Result, defect};
pub use extent::{Extent, ExtentKind, push_extent};
pub use held_lock::HeldLock;
pub use holes::Holes;
pub use password_file::public_password_warning;
pub use periodic_thread::PeriodicThread;
pub use progress::{NoProgress, Phase, Progress, ProgressState};
pub use read_context::{ReadContext, ReadPiece, ReadSource, Waiting, would_wait};
pub use scratch_folder::{
    ScratchFolder, ScratchKind, remove_abandoned_folders, remove_abandoned_folders_in,
};
pub use small_file::{read_at_most, read_small_file};
pub use stored_ranges::StoredRanges;

/// Bytes in one block. Writes are captured in blocks, and a block is never
/// torn.
pub const BLOCK_SIZE_BYTES: u64 = 4096;

/// Largest accepted disk, in bytes: 64 TiB, the limit of VHDX, which holds the
/// most of the served formats.
pub const MAX_DISK_SIZE_BYTES: u64 = 64 << 40;
pub use windows_1252::{from_windows_1252, is_windows_1252};
