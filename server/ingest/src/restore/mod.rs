//! Writing a disk of the repository to a file, a device or an NBD server.
//!
//! ```text
//!   Disk ─ extents ─▶ pieces ─▶ workers: read_at ─▶ Sink ─▶ raw file, device
//!                                                      └──▶ NBD server, or qemu-nbd
//!                                                           over an empty image
//! ```
//!
//! Only what is stored is read. A new file appears under its name when it is whole
//! and durable, not before.

mod file;
mod nbd;
mod part;
mod pieces;

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use coldrise_block::{Context, Disk, Error, ErrorKind, Result};

use crate::progress::{Phase, Progress, ProgressState};
use crate::qemu;
use crate::source::{is_nbd_uri, ImageFormat};
use file::{DeviceSink, FileSink};
use nbd::NbdSink;
use part::PartFile;
use pieces::{Piece, Pieces};

/// Threads at most, whatever was asked for.
const MAX_THREADS: usize = 16;
/// A run of zeroes that is not written where the target is zero already, in bytes.
/// Smaller ones cost more in file fragments than they save.
const ZERO_RUN_BYTES: usize = 64 << 10;
/// Sector of the image formats, in bytes: their disks are multiples of it.
const SECTOR_BYTES: u64 = 512;

/// Where a disk is restored to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestoreTarget {
    /// A new image file, or an existing block device.
    Path(PathBuf),
    /// An export of an NBD server, at least as large as the disk.
    Nbd(String),
}

impl RestoreTarget {
    /// An NBD URI, or else a path.
    pub fn parse(text: &str) -> Result<RestoreTarget> {
        if text.is_empty() || text.contains('\0') {
            return Err(Error::new(ErrorKind::InvalidInput, "the target is empty or contains NUL"));
        }
        if is_nbd_uri(text) {
            return Ok(RestoreTarget::Nbd(text.to_string()));
        }
        if text.contains("://") {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("'{text}': of URIs only those of NBD can be written to"),
            ));
        }
        Ok(RestoreTarget::Path(PathBuf::from(text)))
    }
}

impl std::fmt::Display for RestoreTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RestoreTarget::Path(path) => write!(f, "{}", path.display()),
            RestoreTarget::Nbd(uri) => f.write_str(uri),
        }
    }
}

/// How a disk is restored.
#[derive(Clone, Debug, Default)]
pub struct RestoreOptions {
    /// The image's format; `None`: as the file's extension says, raw for a device or NBD.
    pub format: Option<ImageFormat>,
    /// Threads that read and write; 0: as many as there are processors.
    pub threads: usize,
    /// Whether an existing file is replaced.
    pub force: bool,
}

/// What a restore did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoreSummary {
    /// The format that was written.
    pub format: ImageFormat,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Bytes of content that were written; zeroes are not counted.
    pub written_bytes: u64,
}

/// Something that disks are written to, by several threads.
trait Sink: Sync {
    /// True where zeroes have to be written because the target may hold other bytes.
    fn needs_zeroes(&self) -> bool;
    /// Offsets of writes are multiples of this; a power of two.
    fn alignment_bytes(&self) -> u64;
    /// Threads that can write at once.
    fn useful_writers(&self) -> usize;
    /// One thread's way in.
    fn writer(&self) -> Result<Box<dyn SinkWriter + '_>>;
    /// Makes everything durable. All writers are gone.
    fn finish(&self) -> Result<()>;
}

/// One thread's way into a sink. Errors name the target.
trait SinkWriter: Send {
    fn write_at(&mut self, bytes: &[u8], offset_bytes: u64) -> Result<()>;
    fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()>;
}

/// Restores `disk` to `target`.
///
/// A file is written under another name beside its own and renamed when it is
/// durable: it is whole or not there. An existing file is refused with
/// `AlreadyExists` unless `force`. A block device and an NBD export are written in
/// place. A set `cancel` ends the work with `Interrupted`.
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
            run.copy(&DeviceSink::open(path, size_bytes)?)?
        }
        RestoreTarget::Path(path) => {
            let part = PartFile::create(path, options.force)?;
            let written = match format {
                ImageFormat::Raw => run.copy(&FileSink::create(part.path(), size_bytes)?)?,
                _ => run.copy_to_image(part.path(), format)?,
            };
            run.report(Phase::Finishing, size_bytes, written);
            part.publish()?;
            written
        }
    };
    Ok(RestoreSummary { format, size_bytes, written_bytes })
}

fn is_block_device(path: &Path) -> Result<bool> {
    match std::fs::metadata(path) {
        Ok(metadata) => {
            let kind = metadata.file_type();
            if !kind.is_file() && !kind.is_block_device() {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("{} is neither a file nor a block device", path.display()),
                ));
            }
            Ok(kind.is_block_device())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::io(format!("looking at {}", path.display()), error)),
    }
}

fn target_format(target: &RestoreTarget, asked: Option<ImageFormat>) -> Result<ImageFormat> {
    let in_place = match target {
        RestoreTarget::Nbd(_) => true,
        RestoreTarget::Path(path) => is_block_device(path)?,
    };
    if in_place {
        return match asked {
            None | Some(ImageFormat::Raw) => Ok(ImageFormat::Raw),
            Some(format) => Err(Error::new(
                ErrorKind::Unsupported,
                format!("{target} is written in place, as raw: {format} needs a file as target"),
            )),
        };
    }
    let from_name = match target {
        RestoreTarget::Path(path) => ImageFormat::from_extension(path),
        RestoreTarget::Nbd(_) => None,
    };
    asked.or(from_name).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidInput,
            format!(
                "'{target}': the file's name does not tell its format: say --format raw, qcow2, \
                 vmdk, vhd or vhdx"
            ),
        )
    })
}

/// One restore.
struct Run<'a> {
    disk: &'a dyn Disk,
    name: &'a str,
    threads: usize,
    progress: &'a dyn Progress,
    cancel: &'a AtomicBool,
}

/// What the workers of one restore share.
struct Counters {
    done_bytes: AtomicU64,
    written_bytes: AtomicU64,
    /// One worker failed: the others stop.
    is_over: AtomicBool,
}

impl Run<'_> {
    fn report(&self, phase: Phase, done_bytes: u64, written_bytes: u64) {
        self.progress.update(&ProgressState {
            phase,
            disk: self.name,
            done_bytes,
            total_bytes: self.disk.size_bytes(),
            read_bytes: written_bytes,
            stored_bytes: written_bytes,
        });
    }

    /// Copies the disk into an empty image at `path` that a qemu-nbd child writes.
    fn copy_to_image(&self, path: &Path, format: ImageFormat) -> Result<u64> {
        let what = format!("writing {} as {format}", self.name);
        let size_bytes = self.disk.size_bytes().next_multiple_of(SECTOR_BYTES);
        let driver = format.qemu_driver();
        // Without it QEMU rounds a VHD to whole cylinders of an ancient geometry.
        let creation: &[&str] = match format {
            ImageFormat::Vhd => &["subformat=dynamic,force_size=on"],
            _ => &[],
        };
        qemu::create_image(driver, creation, path, size_bytes, self.cancel)?;
        let mut image = qemu::image_options(driver, path, None)?;
        if format == ImageFormat::Vhd {
            image["force_size_calc"] = "current_size".into();
        }
        let serve = qemu::ServeOptions { writable: true, bitmap: None, max_clients: 8 };
        let server = qemu::ImageServer::start(&image, &serve)?;
        let sink = NbdSink::open_empty(server.endpoint(), self.name, size_bytes, self.cancel);
        let copied = sink.and_then(|sink| self.copy(&sink));
        let written = match copied {
            Ok(written) => written,
            Err(error) => return Err(server.explain(&what, error)),
        };
        server.finish(&what)?;
        let facts = qemu::image_facts(&image, &what, self.cancel)?;
        if facts["virtual-size"].as_u64() != Some(size_bytes) {
            return Err(Error::new(
                ErrorKind::ToolFailed,
                format!("{what}: the disk came out as {} bytes", facts["virtual-size"]),
            ));
        }
        Ok(written)
    }

    /// Copies the disk into `sink` and makes it durable; the bytes written.
    fn copy(&self, sink: &dyn Sink) -> Result<u64> {
        let counters = Counters {
            done_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        };
        let pieces = Pieces::new(self.disk, sink.alignment_bytes(), sink.needs_zeroes());
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        let wanted = if self.threads == 0 { processors.max(2) } else { self.threads };
        let threads = wanted.min(sink.useful_writers()).clamp(1, MAX_THREADS);
        let outcome = std::thread::scope(|scope| {
            let work = || {
                let result = self.work(sink, &pieces, &counters);
                if result.is_err() {
                    counters.is_over.store(true, Ordering::Relaxed);
                }
                result
            };
            let workers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut outcomes = vec![work()];
            outcomes.extend(workers.into_iter().map(|worker| {
                worker.join().unwrap_or_else(|_| {
                    Err(Error::new(ErrorKind::Internal, "a thread of the restore panicked"))
                })
            }));
            outcomes.into_iter().collect::<Result<()>>()
        });
        outcome?;
        let written = counters.written_bytes.load(Ordering::Relaxed);
        self.report(Phase::Finishing, self.disk.size_bytes(), written);
        sink.finish()?;
        Ok(written)
    }

    /// One worker: takes pieces until none is left.
    fn work(&self, sink: &dyn Sink, pieces: &Pieces<'_>, counters: &Counters) -> Result<()> {
        let mut writer = sink.writer()?;
        let mut buffer = Vec::new();
        while !counters.is_over.load(Ordering::Relaxed) {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            let Some(piece) = pieces.next()? else { break };
            let written = match piece {
                Piece::Stored { offset_bytes, length_bytes } => {
                    buffer.resize(length_bytes, 0);
                    self.disk
                        .read_at(&mut buffer, offset_bytes)
                        .context(|| format!("reading the disk at offset {offset_bytes}"))?;
                    if sink.needs_zeroes() {
                        writer.write_at(&buffer, offset_bytes)?;
                        length_bytes as u64
                    } else {
                        write_sparsely(writer.as_mut(), &buffer, offset_bytes)?
                    }
                }
                Piece::Zeroes { offset_bytes, length_bytes } => {
                    writer.write_zeroes(offset_bytes, length_bytes)?;
                    0
                }
                Piece::Skipped { .. } => 0,
            };
            let written = counters.written_bytes.fetch_add(written, Ordering::Relaxed) + written;
            let length = piece.length_bytes();
            let done = counters.done_bytes.fetch_add(length, Ordering::Relaxed) + length;
            self.report(Phase::Restoring, done, written);
        }
        Ok(())
    }
}

/// Writes what is not zero; the bytes written.
fn write_sparsely(writer: &mut dyn SinkWriter, bytes: &[u8], offset_bytes: u64) -> Result<u64> {
    let mut written = 0;
    let mut start = 0;
    while start < bytes.len() {
        let end = (start + ZERO_RUN_BYTES).min(bytes.len());
        if is_zero(&bytes[start..end]) {
            start = end;
            continue;
        }
        // Runs that touch go out as one write.
        let mut stop = end;
        while stop < bytes.len() {
            let next = (stop + ZERO_RUN_BYTES).min(bytes.len());
            if is_zero(&bytes[stop..next]) {
                break;
            }
            stop = next;
        }
        writer.write_at(&bytes[start..stop], offset_bytes + start as u64)?;
        written += (stop - start) as u64;
        start = stop;
    }
    Ok(written)
}

/// True when all bytes are zero; looks at the whole only where the start is.
fn is_zero(bytes: &[u8]) -> bool {
    let (head, rest) = bytes.split_at(bytes.len().min(16));
    // Comparing a slice with itself, shifted, runs at the speed of memcmp.
    head.iter().all(|&byte| byte == 0)
        && (rest.is_empty() || (head.len() == 16 && bytes[..rest.len()] == *rest))
}
