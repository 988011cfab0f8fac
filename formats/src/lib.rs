//! Disks as image files, without converting anything.
//!
//! A *layout* says of every byte of an image file whether it belongs to the
//! disk (and to which of its bytes), is metadata (computed when it is asked
//! for) or is zero. Whoever has the disk can so serve or write the file; this
//! crate itself does no I/O, and holds nothing whose size follows the disk's
//! but one bit per block of a compact image.
//!
//! ```text
//!  vda.vhdx   ┌────────┬─────┬────────┬───────┬─────────────────────────┬──┐
//!             │ header │ log │ tables │ zero… │ disk, from its byte 0   │ 0│
//!             └────────┴─────┴────────┴───────┴─────────────────────────┴──┘
//!                Kept    Kept  Refused    Kept   ToDisk              Kept
//! ```
//!
//! [`Presentation::new`] turns a [`Format`], a [`DiskShape`] and [`Names`] into
//! the files of an image: one, or a small one that names the one with the data.
//! Three kinds of format:
//!
//! - *Writable*: the disk lies in the file in one piece and everything is
//!   allocated. What a client writes goes to the disk, so all these
//!   presentations show one and the same disk; see [`Writes`] for the rest.
//! - *Read-only*: compact; blocks that hold nothing are left out.
//! - *Streamed*: compressed, so there is no layout: [`StreamVmdk`] writes it
//!   from front to back.
//!
//! docs/formats.md tells what is served, what is refused, and why.
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
pub use vmdk::{CompressedGrain, GrainCompressor, StreamVmdk, GRAIN_SIZE_BYTES};

/// Largest disk that any format here holds, in bytes: 64 TiB, the limit of VHDX
/// (MS-VHDX 2.6.2.3). All sums of offsets stay far below 2^63 under it.
pub const MAX_DISK_SIZE_BYTES: u64 = 64 << 40;
