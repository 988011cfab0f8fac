//! Presents disks as image files, without conversion.
//!
//! A *layout* maps each byte of an image file to a byte of the disk, to
//! metadata (computed on read) or to zero. With a layout and the disk, a caller
//! can serve or write the file. This crate does no I/O. Its only structure that
//! grows with the disk is one bit per block of a compact image.
//!
//! ```text
//!  vda.vhdx   ┌────────┬─────┬────────┬───────┬─────────────────────────┬──┐
//!             │ header │ log │ tables │ zero… │ disk, from its byte 0   │ 0│
//!             └────────┴─────┴────────┴───────┴─────────────────────────┴──┘
//!                Kept    Kept  Refused    Kept   ToDisk              Kept
//! ```
//!
//! [`Presentation::new`] turns a [`Format`], a [`DiskShape`] and [`Names`] into
//! the files of an image: one file, or a small file that names the file with
//! the data. There are three kinds of format:
//!
//! - *Writable*: the disk lies in the file in one piece and every block is
//!   allocated. Client writes go to the disk, so all these presentations show
//!   the same disk; see [`Writes`] for the other bytes.
//! - *Read-only*: compact; empty blocks are omitted.
//! - *Streamed*: compressed, so there is no layout: [`StreamVmdk`] writes the
//!   file sequentially.
//!
//! docs/formats.md says which formats are served or refused, and why.
#![forbid(unsafe_code)]

mod disk;
mod error;
mod fields;
mod format;
mod identity;
mod layout;
mod names;
mod presentation;
mod qcow2;
mod raw;
mod vhd;
mod vhdx;
mod vmdk;

pub use disk::{Adapter, DiskShape, SectorSize};
pub use error::{Error, Result};
pub use format::{Access, Format};
pub use identity::Identity;
pub use layout::{Layout, Place, Segment, Segments, Source, Writes};
pub use names::Names;
pub use presentation::{File, Presentation};
pub use vmdk::{CompressedGrain, GRAIN_SIZE_BYTES, GrainCompressor, StreamVmdk};

/// Largest disk that any format holds, in bytes: 64 TiB, the limit of VHDX
/// (MS-VHDX 2.6.2.3). Under it, all sums of offsets stay far below 2^63.
pub const MAX_DISK_SIZE_BYTES: u64 = 64 << 40;
