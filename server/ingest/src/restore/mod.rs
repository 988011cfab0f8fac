//! Restores a disk of the repository to a file, a device or an NBD server.
//!
//! ```text
//!   Disk ─ extents ─▶ pieces ─▶ workers: read_at ─┬▶ Sink ─▶ device, NBD server
//!                                                 ├▶ Sink ─▶ raw file
//!                                                 ├▶ Sink, places of a layout ─▶ image file
//!                                                 └▶ compressed grains, in order ─▶ VMDK stream,
//!                                                    all disks of a machine ─▶ OVA
//! ```
//!
//! Only stored ranges are read. A new file gets its name only when it is complete and durable.
//! The crate `formats` defines the images; no other program takes part.

mod file;
mod image;
mod nbd;
mod ova;
mod part;
mod pieces;
mod run;
mod stream;
mod target;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Disk, Phase, Progress, Result};
use coldrise_formats::{Access, Format};

use file::LocalSink;
use image::Image;
use nbd::NbdSink;
pub use ova::{Ova, OvaDisk, is_ova, restore_ova};
pub use part::PartFiles;
use run::Run;
pub use target::RestoreTarget;
use target::{is_block_device, target_format};

/// Options of a restore.
#[derive(Clone, Debug, Default)]
pub struct RestoreOptions {
    /// The image's format; `None`: from the file's extension, or raw for a device or NBD.
    pub format: Option<Format>,
    /// Threads that read and write; 0: one per processor.
    pub threads: usize,
    /// Whether an existing file is replaced.
    pub force: bool,
}

/// The result of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoreSummary {
    /// The format of the target.
    pub format: Format,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Bytes of content written, as stored in the target: compressed if the format compresses.
    /// Zeroes and the format's own tables do not count.
    pub written_bytes: u64,
}

/// A target that several threads write to.
trait Sink: Sync {
    /// True if zeroes must be written because the target may hold other bytes.
    fn needs_zeroes(&self) -> bool;
    /// Offsets of writes are multiples of this; a power of two.
    fn alignment_bytes(&self) -> u64;
    /// The number of threads that can write at once.
    fn useful_writers(&self) -> usize;
    /// A writer for one thread.
    fn writer(&self) -> Result<Box<dyn SinkWriter + '_>>;
    /// Makes everything durable. All writers must be dropped.
    fn finish(&self) -> Result<()>;
}

/// One thread's writer into a sink. Errors name the target.
trait SinkWriter: Send {
    fn write_at(&mut self, bytes: &[u8], offset_bytes: u64) -> Result<()>;
    fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()>;
}

/// Restores `disk` to `target`.
///
/// A file is written in a folder beside its own name and renamed when it is durable, so it is
/// either complete or absent. If an image has two files, `target` names the one that readers
/// open; it appears last. Fails with `AlreadyExists` if the file exists, unless `force` is set.
/// An image's ids are random: it is a new disk, independent of the point's. A block device and
/// an NBD export are written in place. A set `cancel` ends the work with `Interrupted`.
pub fn restore(
    disk: &dyn Disk,
    target: &RestoreTarget,
    options: &RestoreOptions,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<RestoreSummary> {
    let name = target.to_string();
    let format = target_format(target, options.format)?;
    let size_bytes = disk.size_bytes();
    let threads = options.threads;
    let run = Run { disk, name: &name, threads, progress, cancel };
    let written_bytes = match target {
        RestoreTarget::Nbd(uri) => run.copy(&NbdSink::open_uri(uri, size_bytes, cancel)?)?,
        RestoreTarget::Path(path) if is_block_device(path)? => {
            run.copy(&LocalSink::open_device(path, size_bytes)?)?
        }
        RestoreTarget::Path(path) => restore_file(&run, path, format, options.force)?,
    };
    Ok(RestoreSummary { format, size_bytes, written_bytes })
}

/// Restores to the file `path` and its companion. Returns the bytes written.
fn restore_file(run: &Run<'_>, path: &Path, format: Format, replaces: bool) -> Result<u64> {
    let (part, written) = if format == Format::Raw {
        let part = PartFiles::create(path, None, replaces)?;
        let written = run.copy(&LocalSink::create(&part.image(), run.disk.size_bytes())?)?;
        (part, written)
    } else {
        let image = Image::new(run, path, format)?;
        let part = PartFiles::create(path, image.companion(), replaces)?;
        let written = match format.access() {
            Access::Streamed => stream::write(run, &image, &part.image())?,
            _ => image.write(run, part.folder())?,
        };
        (part, written)
    };
    run.report(Phase::Finishing, run.disk.size_bytes(), written);
    part.publish()?;
    Ok(written)
}
