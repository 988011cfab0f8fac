//! Writes all disks of a machine and its hardware into one OVA.
//!
//! ```text
//!   header  acme.ovf  header  acme.mf  header  acme-disk1.vmdk  header  acme-disk2.vmdk  zeroes
//!   └────────── written last, in space that is kept ─────────┘
//! ```
//!
//! The descriptor states the disks' lengths and the manifest their digests, but both come first, and the disks are
//! compressed while they are written. The lengths of the two texts are known before: the descriptor's is that with the
//! largest numbers, and spaces fill it up.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use aws_lc_rs::digest::{Context as Digest, SHA256, digest};
use coldrise_block::{Disk, Error, ErrorKind, Phase, Progress, Result};
use coldrise_formats::{DiskShape, Identity};
use coldrise_inventory::{DescribedDisk, VirtualSystem, descriptor};

use super::file::LocalSink;
use super::image::Image;
use super::part::PartFiles;
use super::run::Run;
use super::target::{RestoreTarget, is_block_device};
use super::{RestoreOptions, Sink, stream};
use crate::appliance::manifest::line;
use crate::appliance::tar::{BLOCK_BYTES, header};

/// The empty blocks at the end of an archive.
const END_BYTES: u64 = 2 * BLOCK_BYTES;

/// A disk of an OVA.
pub struct OvaDisk<'d> {
    /// Its name, for progress and messages.
    pub name: &'d str,
    /// Its content.
    pub disk: &'d dyn Disk,
    /// The source of its image's ids.
    pub seed: [u8; 32],
}

/// A machine to write.
pub struct Ova<'a> {
    /// The name of its files in the archive, without extension: letters, digits, `.`, `_`, `-`.
    pub name: &'a str,
    /// Its hardware.
    pub system: &'a VirtualSystem,
    /// Its disks, in order; at least one.
    pub disks: Vec<OvaDisk<'a>>,
    /// The time of all members.
    pub modified_unix_seconds: u64,
}

/// Whether a restore to this target, in this format if one is given, writes an OVA.
///
/// # Errors
/// `InvalidInput` for the name of an .ovf.
pub fn is_ova(target: &RestoreTarget, format: Option<&str>) -> Result<bool> {
    let RestoreTarget::Path(path) = target else { return Ok(format == Some("ova")) };
    let has = |extension: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension));
    match format {
        Some(word) => Ok(word == "ova"),
        None if has("ovf") => Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "{target}: a whole machine is written as one .ova; tar xf unpacks the .ovf and its files from it"
            ),
        )),
        None => Ok(has("ova")),
    }
}

/// Writes the machine to `target`. The same machine always gives the same bytes. Returns the bytes of compressed
/// content.
///
/// The file is written in a folder beside its own name and renamed when it is durable.
///
/// # Errors
/// As of [`super::restore`]; `InvalidInput` for a device or an NBD export.
pub fn restore_ova(
    ova: &Ova<'_>,
    target: &RestoreTarget,
    options: &RestoreOptions,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<u64> {
    let path: &Path = match target {
        RestoreTarget::Path(path) if !is_block_device(path)? => path,
        _ => {
            let text = format!("{target}: an OVA is a file");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    };
    let images = (1..).zip(&ova.disks).map(|(number, disk)| {
        let identity =
            Identity { seed: disk.seed, created_unix_seconds: ova.modified_unix_seconds };
        let shape = DiskShape::new(disk.disk.size_bytes(), identity);
        Image::streamed(&format!("{}-disk{number}.vmdk", ova.name), shape)
    });
    let images: Vec<Image> = images.collect::<Result<_>>()?;
    let part = PartFiles::create(path, None, options.force)?;
    let archive = Archive {
        sink: LocalSink::create(&part.image(), 0)?,
        modified_unix_seconds: ova.modified_unix_seconds,
    };
    let largest = images.iter().map(|image| described(image, u64::MAX)).collect::<Vec<_>>();
    let text_bytes = descriptor(ova.system, ova.name, &largest).len();
    let (ovf, mf) = (format!("{}.ovf", ova.name), format!("{}.mf", ova.name));
    let lines = images.iter().map(|image| image.names.image()).chain([ovf.as_str()]);
    let manifest_bytes = lines.map(|name| line(name, &[0; 32]).len()).sum::<usize>();
    let manifest_at = BLOCK_BYTES + (text_bytes as u64).next_multiple_of(BLOCK_BYTES);
    let mut at = manifest_at + BLOCK_BYTES + (manifest_bytes as u64).next_multiple_of(BLOCK_BYTES);

    let mut content_bytes = 0;
    let (mut disks, mut manifest) = (Vec::with_capacity(images.len()), String::new());
    for (image, disk) in images.iter().zip(&ova.disks) {
        let run =
            Run { disk: disk.disk, name: disk.name, threads: options.threads, progress, cancel };
        let begin = at + BLOCK_BYTES;
        let written =
            stream::write_part(&run, image, &archive.sink, begin, Some(Digest::new(&SHA256)))?;
        let length_bytes = written.end_bytes - begin;
        archive.put_header(at, image.names.image(), length_bytes)?;
        let hash = written.digest.map(Digest::finish);
        let hash =
            hash.ok_or_else(|| Error::new(ErrorKind::Internal, "a stream without its digest"))?;
        manifest.push_str(&line(image.names.image(), hash.as_ref()));
        disks.push(described(image, length_bytes));
        content_bytes += written.content_bytes;
        run.report(Phase::Finishing, disk.disk.size_bytes(), written.content_bytes);
        // A stream consists of whole sectors.
        at = written.end_bytes.next_multiple_of(BLOCK_BYTES);
    }
    let mut text = descriptor(ova.system, ova.name, &disks);
    text.push_str(&" ".repeat(text_bytes.saturating_sub(text.len())));
    manifest.insert_str(0, &line(&ovf, digest(&SHA256, text.as_bytes()).as_ref()));
    archive.put(0, &ovf, text.as_bytes())?;
    archive.put(manifest_at, &mf, manifest.as_bytes())?;
    archive.sink.writer()?.write_at(&[0; END_BYTES as usize], at)?;
    archive.sink.finish()?;
    part.publish()?;
    Ok(content_bytes)
}

fn described(image: &Image, length_bytes: u64) -> DescribedDisk {
    let file = image.names.image().to_owned();
    DescribedDisk { file, length_bytes, capacity_bytes: image.shape.shown_bytes() }
}

/// The file of an OVA.
struct Archive {
    sink: LocalSink,
    modified_unix_seconds: u64,
}

impl Archive {
    fn put_header(&self, at: u64, name: &str, length_bytes: u64) -> Result<()> {
        let header = header(name, length_bytes, self.modified_unix_seconds)?;
        self.sink.writer()?.write_at(&header, at)
    }

    /// A small member; the rest of its last block is a hole.
    fn put(&self, at: u64, name: &str, content: &[u8]) -> Result<()> {
        self.put_header(at, name, content.len() as u64)?;
        self.sink.writer()?.write_at(content, at + BLOCK_BYTES)
    }
}
