//! Healing damaged chunks from a source that holds their content: an image of the
//! machine, a disk of another repository.

use std::sync::atomic::AtomicBool;

use coldrise_block::{ExtentKind, Result};
use coldrise_store::RepositoryWriter;

use crate::backup::Watch;
use crate::progress::{Phase, Progress, ProgressState};
use crate::source::{open_source, round_down, round_up, SourceOptions, SourceSpec};

/// Bytes that are read at once, at least.
const READ_BYTES: u64 = 1 << 20;

/// What a source has healed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealSummary {
    /// Bytes that were read from the source.
    pub read_bytes: u64,
    /// Chunks that were stored again.
    pub healed_chunks: u64,
}

/// Opens `source` and closes it again: what cannot be opened is told before any work.
///
/// # Errors
/// What the source says.
pub fn check_source(
    source: &SourceSpec,
    options: &SourceOptions,
    cancel: &AtomicBool,
) -> Result<()> {
    open_source(source, options, cancel).map(|_| ())
}

/// Reads `source` and stores again what is known to be damaged of it, chunk by chunk.
/// Ends as soon as nothing is damaged any more. Nothing else is stored.
///
/// # Errors
/// What the source says; `Interrupted` once `cancel` is set: what was healed until then
/// stays healed.
pub fn heal(
    writer: &RepositoryWriter,
    source: &SourceSpec,
    options: &SourceOptions,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<HealSummary> {
    let disk = source.disk.as_str();
    let watch = Watch { disk, progress, cancel };
    let opened = open_source(source, options, cancel)?;
    let chunk_size = u64::from(writer.repository().chunk_size_bytes());
    let unit = chunk_size.max(opened.alignment_bytes());
    let size_bytes = opened.size_bytes();
    let mut reader = opened.reader()?;
    let mut summary = HealSummary::default();
    let mut buffer = Vec::new();
    let (mut looked, mut at) = (0, 0);
    while looked < size_bytes {
        for extent in opened.extents(looked, size_bytes - looked)? {
            looked = extent.offset_bytes + extent.length_bytes;
            if extent.kind != ExtentKind::Stored {
                continue;
            }
            // In whole chunks; what was read with the extent before is not read again.
            at = at.max(round_down(extent.offset_bytes, unit));
            let stop = round_up(looked, unit).min(size_bytes);
            while at < stop {
                watch.check_cancel()?;
                if writer.damaged_chunks() == 0 {
                    return Ok(summary);
                }
                let length = (stop - at).min(round_up(READ_BYTES, unit));
                buffer.resize(length as usize, 0);
                reader.read_at(&mut buffer, at).map_err(|error| error.context(source))?;
                summary.read_bytes += length;
                // The end of the disk: the rest of its last chunk is zeroes.
                buffer.resize(round_up(length, chunk_size) as usize, 0);
                summary.healed_chunks += writer.heal(&buffer)?;
                at += length;
                progress.update(&ProgressState {
                    phase: Phase::Storing,
                    disk,
                    done_bytes: at,
                    total_bytes: size_bytes,
                    read_bytes: summary.read_bytes,
                    stored_bytes: 0,
                });
            }
        }
    }
    Ok(summary)
}
