//! The sources of a disk's content.
//!
//! ```text
//!   raw file, block device ── pread, SEEK_HOLE ──────────────┐
//!   qcow2 vmdk vhd vhdx ── confined qemu-nbd ── its socket ──┤─▶ Source
//!   NBD URI ── libnbd ───────────────────────────────────────┘
//! ```
//!
//! A [`Source`] answers queries (size, extents, dirty runs) from one thread and
//! hands out one [`Reader`] for each thread that reads.

mod image;
mod inspect;
mod kept_out;
mod machine_image;
mod nbd;
mod qcow2;
mod raw;
mod raw_signs;
mod spec;
mod vhd;
mod vhdx;
mod vmdk;

use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Extent, MAX_DISK_SIZE_BYTES, Result};

use crate::libnbd::Endpoint;
use crate::qemu::FileRange;

pub use spec::{ImageFormat, LiveBitmap, Location, SourceSpec};

pub(crate) use image::ImageSource;
pub use kept_out::keep_out;
pub(crate) use kept_out::open_named;
pub use machine_image::MachineImage;
use nbd::Status;
pub(crate) use nbd::{NbdReader, NbdSource};
pub(crate) use raw::RawSource;
pub(crate) use spec::{is_appliance, is_nbd_uri};

/// Longest name of a dirty bitmap, in bytes: QEMU's own limit.
const MAX_BITMAP_NAME_BYTES: usize = 1023;

/// Options for opening a source.
#[derive(Clone, Debug, Default)]
pub struct SourceOptions {
    /// The dirty bitmap with the changes since the previous point.
    pub bitmap: Option<String>,
    /// Whether an image's backing files belong to it and may be opened.
    pub follow_backing: bool,
}

/// A run of a dirty bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyRun {
    /// First byte of the run.
    pub offset_bytes: u64,
    /// Length of the run; never 0.
    pub length_bytes: u64,
    /// True if the run was written, according to the bitmap.
    pub is_dirty: bool,
}

/// A disk's content, to be read once.
pub trait Source: Send + Sync {
    /// Size in bytes.
    fn size_bytes(&self) -> u64;

    /// Offsets and lengths of reads must be multiples of this many bytes (the last
    /// read may end at the disk's end); a power of two.
    fn alignment_bytes(&self) -> u64;

    /// The useful number of parallel readers; at least 1.
    fn useful_readers(&self) -> usize;

    /// The useful length of one read, in bytes.
    fn useful_read_bytes(&self) -> u64;

    /// A reader for one thread.
    fn reader(&self) -> Result<Box<dyn Reader + '_>>;

    /// The content of the range, in order and without gaps, from `offset_bytes` on.
    /// The answer may end before the range does, but is never empty. Unknown ranges
    /// are `Stored`.
    fn extents(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<Extent>>;

    /// The dirty bitmap of the range; the same rules as for `extents`. Fails if the
    /// source was opened without a bitmap.
    fn dirty_runs(&self, offset_bytes: u64, length_bytes: u64) -> Result<Vec<DirtyRun>>;

    /// A remark for the user about a source that is readable but suspicious.
    fn remark(&self) -> Option<String> {
        None
    }

    /// Call this after the last read. Fails if the bytes may not be one consistent
    /// disk; otherwise returns a warning, if there is one.
    fn check_after_reading(&self) -> Result<Option<String>>;
}

/// One thread's reader of a source.
pub trait Reader: Send {
    /// Fills `buffer` from `offset_bytes` on.
    fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()>;
}

/// Opens a source. A set `cancel` ends every wait of the source with `Interrupted`.
///
/// Errors name the disk and the location and suggest a remedy.
pub fn open_source<'c>(
    spec: &SourceSpec,
    options: &SourceOptions,
    cancel: &'c AtomicBool,
) -> Result<Box<dyn Source + 'c>> {
    open_location(&spec.location, options, cancel).map_err(|error| error.context(spec))
}

fn open_location<'c>(
    location: &Location,
    options: &SourceOptions,
    cancel: &'c AtomicBool,
) -> Result<Box<dyn Source + 'c>> {
    if let Some(bitmap) = &options.bitmap {
        check_bitmap_name(bitmap)?;
    }
    let bitmap = options.bitmap.as_deref();
    let source: Box<dyn Source + 'c> = match location {
        Location::Nbd { uri } => Box::new(NbdSource::open_uri(uri, bitmap, cancel)?),
        Location::Live { uri, name, has_late_status, .. } => {
            let endpoint = Endpoint::Uri(uri.clone());
            let status = if *has_late_status { Status::Late } else { Status::Believed };
            Box::new(NbdSource::open(endpoint, name.clone(), bitmap, status, cancel)?)
        }
        Location::Image { path, format: ImageFormat::Raw } => {
            if bitmap.is_some() {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "a raw image keeps no dirty bitmap: name the NBD export of the running VM \
                     instead, or leave out --bitmap",
                ));
            }
            Box::new(RawSource::open_disk(path)?)
        }
        Location::Member { archive, name, offset_bytes, length_bytes } => {
            let range = FileRange { offset_bytes: *offset_bytes, length_bytes: *length_bytes };
            Box::new(ImageSource::open_member(archive, name, range, options, cancel)?)
        }
        Location::Image { path, format } => {
            Box::new(ImageSource::open(path, *format, options, cancel)?)
        }
    };
    let size_bytes = source.size_bytes();
    if size_bytes == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "the source is empty (0 bytes)"));
    }
    if size_bytes > MAX_DISK_SIZE_BYTES {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("the disk has {size_bytes} bytes; the maximum is {MAX_DISK_SIZE_BYTES}"),
        ));
    }
    Ok(source)
}

pub(crate) fn check_bitmap_name(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > MAX_BITMAP_NAME_BYTES || name.contains('\0') {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("a bitmap's name has 1 to {MAX_BITMAP_NAME_BYTES} bytes and no NUL"),
        ));
    }
    Ok(())
}

/// The offset of the first multiple of `unit` at or after `offset`.
pub(crate) fn round_up(offset: u64, unit: u64) -> u64 {
    offset.next_multiple_of(unit)
}

/// The last multiple of `unit` at or before `offset`.
pub(crate) fn round_down(offset: u64, unit: u64) -> u64 {
    offset - offset % unit
}

#[cfg(test)]
mod header_tests;
