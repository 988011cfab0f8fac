//! The bottom of Coldrise: what every other part says about bytes on a disk.
//!
//! Offsets, extents, the [`Disk`] trait that front ends serve, and the one
//! public [`Error`] type with its errno and exit code. Nothing here does I/O.
#![forbid(unsafe_code)]

mod disk;
mod error;
mod extent;
mod holes;
mod periodic_thread;

pub use disk::{check_range, would_wait, Disk, Waiting};
pub use error::{defect, Context, Error, ErrorKind, Result};
pub use extent::{push_extent, Extent, ExtentKind, StoredRanges};
pub use holes::Holes;
pub use periodic_thread::PeriodicThread;

/// Bytes in one block: the unit in which writes are captured and never torn.
pub const BLOCK_SIZE_BYTES: u64 = 4096;

/// Largest disk that is accepted, in bytes: 64 TiB, the largest that any of the
/// served formats (VHDX) can hold.
pub const MAX_DISK_SIZE_BYTES: u64 = 64 << 40;
