//! Heals damaged chunks from a source with their content: an image of the machine, a disk
//! of another repository.

use std::sync::atomic::AtomicBool;

use coldrise_block::{ExtentKind, Phase, Progress, ProgressState, Result};
use coldrise_store::RepositoryWriter;

use crate::backup::Watch;
use crate::source::{SourceOptions, SourceSpec, open_source, round_down, round_up};

/// Minimum length of one read, in bytes.
const READ_BYTES: u64 = 1 << 20;

/// The result of healing from one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealSummary {
    /// Bytes read from the source.
    pub read_bytes: u64,
    /// Chunks stored again.
    pub healed_chunks: u64,
}

/// Opens `source` and closes it again, so that errors of opening show before any work.
///
/// # Errors
/// Errors of the source.
pub fn check_source(
    source: &SourceSpec,
    options: &SourceOptions,
    cancel: &AtomicBool,
) -> Result<()> {
    open_source(source, options, cancel).map(|_| ())
}

/// Reads `source` and stores again its chunks that are known to be damaged. Ends as soon as
/// no damage is left. Stores nothing else.
///
/// Errors of the source; `Interrupted` once `cancel` is set: chunks healed before stay
/// healed.
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
            // In whole chunks; bytes read with the previous extent are not read again.
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
                // At the end of the disk: the rest of the last chunk is zeroes.
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
