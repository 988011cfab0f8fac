//! Writes what has changed on a source into a disk that exists.
//!
//! Blocks that are equal are not written: so a bitmap may mark too much, and without one the disk is compared completely.

use std::sync::atomic::AtomicBool;

use coldrise_block::{BLOCK_SIZE_BYTES, Disk, Error, ErrorKind, NoProgress, Result};

use crate::backup::{Plan, Sink, Watch, store_disk};
use crate::in_place::{differing_runs, parts};
use crate::source::{Location, SourceOptions, SourceSpec, open_source};

/// Extents of the disk that are asked for at once.
const EXTENTS: usize = 1024;

/// What was read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Bytes read from the source.
    pub read_bytes: u64,
    /// Bytes written into the disk, those of zeroes included.
    pub written_bytes: u64,
}

/// Makes `disk` equal to a source: where the bitmap of a live source marks changes, or without a bitmap everywhere. The
/// result is not durable before the disk's next flush.
///
/// # Errors
/// `Incomplete` if the source has another size than the disk; errors of both, after which the disk is a mixture;
/// `Interrupted` once cancelled.
pub fn write_changes(spec: &SourceSpec, disk: &dyn Disk, cancel: &AtomicBool) -> Result<Changes> {
    let bitmap = match &spec.location {
        Location::Live { bitmap: Some(bitmap), .. } => Some(bitmap.name.clone()),
        _ => None,
    };
    let end_bytes = if bitmap.is_some() { disk.size_bytes() } else { 0 };
    let options = SourceOptions { bitmap, follow_backing: false };
    let source = open_source(spec, &options, cancel)?;
    let size_bytes = source.size_bytes();
    if size_bytes != disk.size_bytes() {
        let text = format!("{spec} has {size_bytes} bytes, not {}", disk.size_bytes());
        return Err(Error::new(ErrorKind::Incomplete, text));
    }
    let unit_bytes = BLOCK_SIZE_BYTES.max(source.alignment_bytes());
    let mut plan = Plan::new(source.as_ref(), unit_bytes, end_bytes);
    let mut sink = DiskSink { disk, there: Vec::new(), buffers: Vec::new(), written_bytes: 0 };
    let watch = Watch { disk: spec.disk.as_str(), progress: &NoProgress, cancel };
    let read_bytes = store_disk(source.as_ref(), &mut plan, &mut sink, None, &watch)?;
    source.check_after_reading()?;
    Ok(Changes { read_bytes, written_bytes: sink.written_bytes })
}

/// Writes blocks that differ from the disk's.
struct DiskSink<'a> {
    disk: &'a dyn Disk,
    there: Vec<u8>,
    buffers: Vec<Vec<u8>>,
    written_bytes: u64,
}

impl Sink for DiskSink<'_> {
    fn buffer(&mut self) -> Vec<u8> {
        self.buffers.pop().unwrap_or_default()
    }

    fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()> {
        self.there.resize(bytes.len(), 0);
        self.disk.read_at(&mut self.there, offset_bytes)?;
        let unit = BLOCK_SIZE_BYTES as usize;
        for run in differing_runs(&bytes, &self.there, unit) {
            for (part, is_zero) in parts(&bytes[run.clone()], unit) {
                let (start, end) = (run.start + part.start, run.start + part.end);
                let at = offset_bytes + start as u64;
                match is_zero {
                    true => self.disk.write_zeroes(at, part.len() as u64)?,
                    false => self.disk.write_at(&bytes[start..end], at)?,
                }
                self.written_bytes += part.len() as u64;
            }
        }
        self.buffers.push(bytes);
        Ok(())
    }

    fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let (mut at, end) = (offset_bytes, offset_bytes + length_bytes);
        while at < end {
            let found = self.disk.extents(at, end - at, EXTENTS)?;
            let before = at;
            for extent in found {
                let until = extent.end_behind(at)?.min(end);
                if !extent.kind.reads_zero() {
                    self.disk.write_zeroes(at, until - at)?;
                    self.written_bytes += until - at;
                }
                at = until;
            }
            if at == before {
                return Err(Error::new(ErrorKind::Internal, "a disk reported no extents"));
            }
        }
        Ok(())
    }

    fn stored_bytes(&self) -> u64 {
        self.written_bytes
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Mutex;

    use coldrise_block::{Extent, ExtentKind, ReadContext};

    use super::*;
    use crate::source::ImageFormat;
    use coldrise_store::DiskName;

    /// A disk in memory that counts what is written.
    struct Memory(Mutex<(Vec<u8>, u64)>);

    impl Disk for Memory {
        fn size_bytes(&self) -> u64 {
            self.0.lock().unwrap().0.len() as u64
        }

        fn read(&self, buffer: &mut [u8], offset: u64, _: &mut ReadContext) -> Result<()> {
            let at = offset as usize;
            buffer.copy_from_slice(&self.0.lock().unwrap().0[at..at + buffer.len()]);
            Ok(())
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
            let (content, written) = &mut *self.0.lock().unwrap();
            content[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            *written += bytes.len() as u64;
            Ok(())
        }

        fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
            self.write_at(&vec![0; length as usize], offset)
        }

        fn extents(&self, offset: u64, length: u64, _limit: usize) -> Result<Vec<Extent>> {
            let content = &self.0.lock().unwrap().0;
            let blocks = (offset..offset + length).step_by(4096).map(|at| {
                let bytes = &content[at as usize..at as usize + 4096];
                let is_zero = bytes.iter().all(|byte| *byte == 0);
                let kind = if is_zero { ExtentKind::Zero } else { ExtentKind::Stored };
                Extent { offset_bytes: at, length_bytes: 4096, kind }
            });
            Ok(blocks.collect())
        }
    }

    #[test]
    fn only_blocks_that_differ_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let mut wanted = vec![7u8; 4 << 20];
        wanted[1 << 20..2 << 20].fill(0);
        let before = wanted.clone();
        wanted[5000] = 1;
        wanted[(3 << 20) + 17] = 2;
        std::fs::write(&path, &wanted).unwrap();
        // A hole where the disk has data.
        let file = File::options().write(true).open(&path).unwrap();
        rustix::fs::fallocate(
            &file,
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            2 << 20,
            1 << 20,
        )
        .unwrap();
        wanted[2 << 20..3 << 20].fill(0);
        let disk = Memory(Mutex::new((before, 0)));
        let location = Location::Image { path, format: ImageFormat::Raw };
        let spec = SourceSpec { disk: DiskName::parse("vda").unwrap(), location };
        let changes = write_changes(&spec, &disk, &AtomicBool::new(false)).unwrap();
        let (content, written) = &*disk.0.lock().unwrap();
        assert!(*content == wanted);
        assert_eq!(*written, (2 * 4096) + (1 << 20));
        assert_eq!(changes.written_bytes, *written);
        drop(file);
    }

    #[test]
    fn a_source_of_another_size_is_refused_before_the_first_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        std::fs::write(&path, vec![1u8; 8192]).unwrap();
        let disk = Memory(Mutex::new((vec![0; 4096], 0)));
        let location = Location::Image { path, format: ImageFormat::Raw };
        let spec = SourceSpec { disk: DiskName::parse("vda").unwrap(), location };
        let error = write_changes(&spec, &disk, &AtomicBool::new(false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Incomplete);
        assert_eq!(disk.0.lock().unwrap().1, 0);
    }
}
