//! Errors of this crate, with their messages.

use std::fmt;

use crate::{Format, SectorSize};

/// Why an image cannot be built. `Display` says what happened, why, and what to
/// do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No format has this name.
    UnknownFormat {
        /// The name that was given.
        word: String,
    },
    /// The format cannot hold a disk of this size.
    DiskTooLarge {
        /// The format.
        format: Format,
        /// The disk's size in bytes.
        size_bytes: u64,
        /// The largest disk that the format holds, in bytes.
        limit_bytes: u64,
    },
    /// The format cannot hold a disk of no bytes.
    DiskEmpty {
        /// The format.
        format: Format,
    },
    /// The format cannot store this sector size, so a guest would not find its
    /// partitions.
    SectorSize {
        /// The format.
        format: Format,
        /// The disk's sector size.
        sector_size: SectorSize,
    },
    /// The compact image would outgrow the format's 32-bit sector numbers.
    ImageTooLarge {
        /// The format.
        format: Format,
        /// The image's size in bytes.
        image_bytes: u64,
        /// The largest image, in bytes.
        limit_bytes: u64,
    },
    /// The name cannot be stored in an image that refers to it.
    FileName {
        /// The name that was given.
        name: String,
        /// The fault in the name.
        reason: &'static str,
    },
    /// The format is compressed: it can be written, but not served as a file.
    Streamed {
        /// The format.
        format: Format,
    },
    /// The disk's first bytes would make readers mistake the image for another
    /// format.
    MistakenStart {
        /// The format.
        format: Format,
    },
    /// A stored range leaves the disk or ends before it begins.
    RangeOutside {
        /// First byte of the range.
        start_bytes: u64,
        /// End of the range.
        end_bytes: u64,
        /// The disk's size in bytes.
        size_bytes: u64,
    },
    /// Grains must be appended in ascending order, within the disk.
    GrainOrder {
        /// The grain that was appended.
        grain: u64,
        /// The lowest grain that may come next.
        expected: u64,
        /// Grains in the disk.
        grains: u64,
    },
    /// A grain must be whole; only the disk's last one may be shorter.
    GrainLength {
        /// Bytes that were given.
        length_bytes: usize,
    },
}

/// The result of operations that can fail with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::UnknownFormat { word } => {
                let known: Vec<_> = Format::ALL.iter().map(|format| format.word()).collect();
                write!(f, "there is no image format {word:?}; there are {}", known.join(", "))
            }
            Error::DiskTooLarge { format, size_bytes, limit_bytes } => write!(
                f,
                "{format} holds disks of up to {} GiB ({limit_bytes} bytes), and this one has \
                 {size_bytes} bytes; use {}",
                limit_bytes >> 30,
                format.larger_alternative()
            ),
            Error::DiskEmpty { format } => {
                write!(f, "{format} cannot hold a disk of 0 bytes; use raw or qcow2")
            }
            Error::SectorSize { format, sector_size } => write!(
                f,
                "{format} cannot hold a disk with sectors of {} bytes; use vhdx, raw or qcow2",
                sector_size.bytes()
            ),
            Error::ImageTooLarge { format, image_bytes, limit_bytes } => write!(
                f,
                "the disk holds too much for {format}: the image would take {image_bytes} bytes, \
                 and the format ends at {limit_bytes}; use {}",
                format.larger_alternative()
            ),
            Error::FileName { name, reason } => {
                write!(f, "an image cannot be named {name:?}: {reason}")
            }
            Error::Streamed { format } => write!(
                f,
                "{format} is compressed and cannot be served as a file; restore to it instead"
            ),
            Error::MistakenStart { format } => write!(
                f,
                "the disk begins with \"conectix\", and QEMU would take the {} for a dynamic one and \
                 misread it; use a dynamic VHD, or another format",
                format.summary()
            ),
            Error::RangeOutside { start_bytes, end_bytes, size_bytes } => write!(
                f,
                "the stored range from {start_bytes} to {end_bytes} is not within the disk of \
                 {size_bytes} bytes"
            ),
            Error::GrainOrder { grain, expected, grains } => write!(
                f,
                "grain {grain} cannot be appended: {expected} to {} can",
                grains.saturating_sub(1)
            ),
            Error::GrainLength { length_bytes } => write!(
                f,
                "a grain of {length_bytes} bytes is neither whole nor the end of the disk"
            ),
        }
    }
}

impl std::error::Error for Error {}
