//! The base crate of Coldrise: the common types for bytes on a disk.
//!
//! It defines offsets, extents, the [`Disk`] trait that front ends serve, and
//! the public [`Error`] type with its errno and exit code. Nothing here does
//! I/O.
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

/// Bytes in one block. Writes are captured in blocks, and a block is never
/// torn.
pub const BLOCK_SIZE_BYTES: u64 = 4096;

/// Largest accepted disk, in bytes: 64 TiB, the limit of VHDX, which holds the
/// most of the served formats.
pub const MAX_DISK_SIZE_BYTES: u64 = 64 << 40;
