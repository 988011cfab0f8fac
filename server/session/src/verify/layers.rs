//! Verify: the captured blocks of layers, and the disks that their damage affects.
//!
//! Every captured block of every layer is read and authenticated, by one thread per processor.
//! Large layers come first, one after the other, each in pieces that the threads share. Then come
//! the small ones, each read by one thread.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use coldrise_block::{BLOCK_SIZE_BYTES, Error, ErrorKind, Result};
use coldrise_store::{
    Affected, CatalogDamage, LayerId, LayerReference, Repository, VerifyOptions, VerifyProgress,
};
use parking_lot::Mutex;

use crate::disks::point_disk::sealed_layers;
use crate::layer::{Layer, LayerKeys};
use crate::live_disk::check_top;
use crate::paths::layer_path;
use crate::points::inventory::{Inventory, check_cancel, has_ended};
use crate::session_folder::addresses::{point_disk, session_disk};
use crate::session_folder::document::{SessionDisk, SessionDocument};

/// All threads together read a layer that takes more than this on the repository's disk, in bytes.
const LARGE_BYTES: u64 = 64 << 20;
/// Blocks of such a layer that one thread reads at once: 64 MiB of a disk.
const PIECE_BLOCKS: u64 = 1 << 14;

/// The result of verifying the layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerReport {
    /// Number of layers read.
    pub(crate) layers: u64,
    /// Bytes of captured blocks read.
    pub(crate) read_bytes: u64,
    /// Damaged layers, and layers with damaged blocks.
    pub damaged: Vec<CatalogDamage>,
    /// The disks that refer to damaged blocks.
    pub affected: Vec<Affected>,
    /// Layers that only the process that writes them can read: /dev/shm had no room for their block
    /// maps.
    pub(crate) unread: Vec<CatalogDamage>,
}

impl Inventory {
    /// Approximate size of the captured blocks to read, in bytes: the space of their files.
    pub fn captured_bytes(&self, repository: &Arc<Repository>) -> u64 {
        self.parts(repository).iter().map(|part| part.file_bytes).sum()
    }

    /// Reads every captured block. `options.coverage` is ignored: all captured blocks are read. The
    /// progress ends at [`Inventory::captured_bytes`].
    ///
    /// # Errors
    /// `Interrupted` if it was cancelled. Damage is not an error: it is reported.
    pub fn verify_layers(
        &self,
        repository: &Arc<Repository>,
        options: &VerifyOptions<'_>,
    ) -> Result<LayerReport> {
        let parts = self.parts(repository);
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let run = Run {
            repository,
            options,
            total_bytes: parts.iter().map(|part| part.file_bytes).sum(),
            done_bytes: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
        };
        run.tell();
        let (large, small): (Vec<_>, Vec<_>) =
            (0..parts.len()).partition(|number| parts[*number].file_bytes > LARGE_BYTES);
        let mut found = Vec::with_capacity(parts.len());
        for number in large {
            found.push((number, run.read(&parts[number], threads)?));
        }
        let read = |place: u64| {
            let number = small[place as usize];
            Ok(Some((number, run.read(&parts[number], 1)?)))
        };
        found.extend(share_out(small.len() as u64, threads, read)?);
        found.sort_by_key(|(number, _)| *number);
        let mut report =
            LayerReport { read_bytes: run.read_bytes.into_inner(), ..LayerReport::default() };
        for (number, found) in found {
            report.add(found, &parts[number]);
        }
        Ok(report)
    }

    /// Every layer once.
    fn parts(&self, repository: &Arc<Repository>) -> Vec<Part<'_>> {
        // The state at a mark is read apart: its blocks may have been captured again later.
        type Key = (LayerId, Option<u64>);
        let mut sealed: BTreeMap<Key, (LayerReference, u64, Vec<String>)> = BTreeMap::new();
        let mut refer = |reference: &LayerReference, size_bytes: u64, disk: String| {
            let (longest, _, disks) = sealed
                .entry((reference.id, reference.layer_sequence.map(|_| reference.sealed_sequence)))
                .or_insert_with(|| (reference.clone(), size_bytes, Vec::new()));
            // A session that continued after its seals has the longest part of the layer.
            if reference.sealed_sequence > longest.sealed_sequence {
                *longest = reference.clone();
            }
            disks.push(disk);
        };
        for point in &self.points {
            for disk in &point.disks {
                for reference in &disk.layers {
                    refer(reference, disk.size_bytes, point_disk(point, disk.name.as_str()));
                }
            }
        }
        for session in &self.sessions {
            for disk in &session.disks {
                for reference in &disk.layers {
                    refer(reference, disk.size_bytes, session_disk(session, disk));
                }
            }
        }
        let file_bytes = |id: &LayerId| {
            let metadata = layer_path(repository, id).symlink_metadata();
            metadata.map_or(0, |metadata| metadata.blocks() * 512)
        };
        let sealed = sealed.into_values().map(|(reference, size_bytes, disks)| Part {
            file_bytes: file_bytes(&reference.id),
            which: LayerTask::Sealed(reference),
            size_bytes,
            disks,
        });
        let tops = self.sessions.iter().flat_map(|session| {
            session.disks.iter().map(move |disk| Part {
                file_bytes: file_bytes(&disk.top),
                which: LayerTask::Top(session, disk),
                size_bytes: disk.size_bytes,
                disks: vec![session_disk(session, disk)],
            })
        });
        sealed.chain(tops).collect()
    }
}

/// A layer to read, and the disks that refer to it.
struct Part<'a> {
    which: LayerTask<'a>,
    /// Space of its file on the repository's disk, in bytes.
    file_bytes: u64,
    /// Size of its disk, in bytes.
    size_bytes: u64,
    disks: Vec<String>,
}

enum LayerTask<'a> {
    Sealed(LayerReference),
    /// The layer that takes a session's writes.
    Top(&'a SessionDocument, &'a SessionDisk),
}

/// The result for one layer; `None` if it was removed with its session.
type Found = Option<std::result::Result<DamagedBlocks, Error>>;

struct Run<'a> {
    repository: &'a Arc<Repository>,
    options: &'a VerifyOptions<'a>,
    total_bytes: u64,
    done_bytes: AtomicU64,
    read_bytes: AtomicU64,
}

/// The share of one layer's file in the progress. The captured bytes differ from the file's space,
/// and a layer may be read twice: in the end exactly the file's space counts.
struct ProgressShare<'a> {
    run: &'a Run<'a>,
    left_bytes: AtomicU64,
}

impl ProgressShare<'_> {
    fn advance(&self, bytes: u64) {
        self.run.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.take(bytes);
    }

    fn take(&self, bytes: u64) {
        let less = |left: u64| Some(left.saturating_sub(bytes));
        let before = self.left_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        let taken = before.map_or(0, |left| left.min(bytes));
        self.run.done_bytes.fetch_add(taken, Ordering::Relaxed);
        self.run.tell();
    }
}

impl Drop for ProgressShare<'_> {
    fn drop(&mut self) {
        self.take(u64::MAX);
    }
}

impl Run<'_> {
    fn tell(&self) {
        (self.options.progress)(VerifyProgress {
            done_bytes: self.done_bytes.load(Ordering::Relaxed),
            total_bytes: self.total_bytes,
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
        });
    }

    /// Damage is a result. Any other failure ends the work.
    fn read(&self, part: &Part<'_>, threads: usize) -> Result<Found> {
        check_cancel(self.options.cancel)?;
        let share = ProgressShare { run: self, left_bytes: AtomicU64::new(part.file_bytes) };
        let found = match &part.which {
            LayerTask::Sealed(reference) => self.read_sealed(reference, part, &share, threads),
            LayerTask::Top(session, disk) => match self.read_top(session, disk, &share, threads) {
                Err(error)
                    if error.kind() != ErrorKind::Interrupted
                        && has_ended(self.repository, session)? =>
                {
                    return Ok(None);
                }
                found => found,
            },
        };
        match found {
            Err(error) if !is_damage(&error) && error.kind() != ErrorKind::NoSpace => Err(error),
            found => Ok(Some(found)),
        }
    }

    fn read_sealed(
        &self,
        reference: &LayerReference,
        part: &Part<'_>,
        share: &ProgressShare<'_>,
        threads: usize,
    ) -> Result<DamagedBlocks> {
        let references = std::slice::from_ref(reference);
        let mut damaged = DamagedBlocks::default();
        for layer in sealed_layers(self.repository, references, part.size_bytes)? {
            damaged.append(self.look_through(&layer, &reference.id, share, threads)?);
        }
        Ok(damaged)
    }

    /// Damage may only be an unfinished change: `check_top` detects that, and examines the layer
    /// again.
    fn read_top(
        &self,
        session: &SessionDocument,
        disk: &SessionDisk,
        share: &ProgressShare<'_>,
        threads: usize,
    ) -> Result<DamagedBlocks> {
        let mut damaged = DamagedBlocks::default();
        let checked = check_top(self.repository, &session.name, &disk.name, |layer| {
            damaged = DamagedBlocks::default();
            damaged = self.look_through(layer, &disk.top, share, threads)?;
            if damaged.is_sound() {
                Ok(())
            } else {
                Err(Error::new(ErrorKind::Corrupt, "captured blocks are damaged"))
            }
        });
        match checked {
            Err(error) if damaged.is_sound() => Err(error),
            _ => Ok(damaged),
        }
    }

    fn look_through(
        &self,
        layer: &Layer,
        id: &LayerId,
        share: &ProgressShare<'_>,
        threads: usize,
    ) -> Result<DamagedBlocks> {
        let pieces = layer.blocks().div_ceil(PIECE_BLOCKS);
        let read = |piece: u64| {
            let first = piece * PIECE_BLOCKS;
            let end = (first + PIECE_BLOCKS).min(layer.blocks());
            let found = self.look_at(layer, first..end, share)?;
            Ok(found.first_reason.is_some().then_some((piece, found)))
        };
        let mut found = share_out(pieces, threads, read)?;
        found.sort_by_key(|(piece, _)| *piece);
        let mut damaged = DamagedBlocks { layers: 1, ..DamagedBlocks::default() };
        found.into_iter().for_each(|(_, of_piece)| damaged.append(of_piece));
        self.look_at_marks(layer, id, share, &mut damaged)?;
        Ok(damaged)
    }

    /// Blocks that only time marks need. (The marks of a served session are known to its process alone.)
    fn look_at_marks(
        &self,
        layer: &Layer,
        id: &LayerId,
        share: &ProgressShare<'_>,
        damaged: &mut DamagedBlocks,
    ) -> Result<()> {
        for slot in layer.slots_of_marks(LayerKeys::of(self.repository, id))? {
            check_cancel(self.options.cancel)?;
            match layer.check_slot(slot) {
                Ok(()) => share.advance(BLOCK_SIZE_BYTES),
                Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
                    let (count, _) = damaged.of_marks.get_or_insert_with(|| (0, error.message()));
                    *count += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn look_at(
        &self,
        layer: &Layer,
        blocks: Range<u64>,
        share: &ProgressShare<'_>,
    ) -> Result<DamagedBlocks> {
        let mut damaged = DamagedBlocks::default();
        let mut block = blocks.start;
        while block < blocks.end {
            check_cancel(self.options.cancel)?;
            match layer.check_captured(block, blocks.end) {
                Ok((blocks, bytes)) => {
                    if bytes > 0 {
                        share.advance(bytes);
                    }
                    block += blocks;
                }
                Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
                    damaged.push(block..block + 1);
                    damaged.first_reason.get_or_insert_with(|| error.message());
                    block += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(damaged)
    }
}

/// Calls `work` with every number below `count`, on this many threads, including this one. Returns
/// the results in no order. The first failure ends it.
fn share_out<T: Send>(
    count: u64,
    threads: usize,
    work: impl Fn(u64) -> Result<Option<T>> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicU64::new(0);
    let results = Mutex::new(Vec::new());
    let run = || -> Result<()> {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return Ok(());
            }
            // The other threads start no more work.
            let result = work(number).inspect_err(|_| next.store(count, Ordering::Relaxed))?;
            results.lock().extend(result);
        }
    };
    std::thread::scope(|scope| {
        let others = threads.min(usize::try_from(count).unwrap_or(usize::MAX)).saturating_sub(1);
        let others: Vec<_> = (0..others).map(|_| scope.spawn(run)).collect();
        let own = run();
        others.into_iter().fold(own, |first, other| {
            let panicked = || Error::new(ErrorKind::Internal, "a verifying thread panicked");
            first.and(other.join().unwrap_or_else(|_| Err(panicked())))
        })
    })?;
    Ok(results.into_inner())
}

fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound)
}

impl LayerReport {
    fn add(&mut self, found: Found, part: &Part<'_>) {
        let layer = format!("a layer of {}", part.disks.join(", "));
        match found {
            None => {}
            Some(Err(error)) if error.kind() == ErrorKind::NoSpace => {
                self.unread.push(CatalogDamage::new(layer, error.full_message()));
            }
            Some(Err(error)) => {
                self.damaged.push(CatalogDamage::new(layer, error.message()));
                let whole = 0..part.size_bytes.div_ceil(BLOCK_SIZE_BYTES);
                self.affect(&[whole], part);
            }
            Some(Ok(found)) => {
                self.layers += found.layers;
                if let Some((blocks, reason)) = found.of_marks {
                    let plural = if blocks == 1 { "" } else { "s" };
                    let what = format!("{blocks} block{plural} of time marks in {layer}");
                    self.damaged.push(CatalogDamage::new(what, reason));
                }
                let Some(reason) = found.first_reason else { return };
                let blocks: u64 = found.ranges.iter().map(|range| range.end - range.start).sum();
                let plural = if blocks == 1 { "" } else { "s" };
                let what = format!("{blocks} captured block{plural} in {layer}");
                self.damaged.push(CatalogDamage::new(what, reason));
                self.affect(&found.ranges, part);
            }
        }
    }

    fn affect(&mut self, blocks: &[Range<u64>], part: &Part<'_>) {
        let size_bytes = part.size_bytes;
        let in_bytes = |blocks: &Range<u64>| {
            blocks.start * BLOCK_SIZE_BYTES..(blocks.end * BLOCK_SIZE_BYTES).min(size_bytes)
        };
        let ranges: Vec<_> = blocks.iter().map(in_bytes).collect();
        for disk in &part.disks {
            self.affected.push(Affected { disk: disk.clone(), ranges: ranges.clone() });
        }
    }
}

/// The captured blocks of a layer that cannot be read or do not authenticate.
#[derive(Default)]
struct DamagedBlocks {
    /// Number of layers examined.
    layers: u64,
    ranges: Vec<Range<u64>>,
    /// The damage of the first of these blocks, and the file that has it.
    first_reason: Option<String>,
    /// The number of damaged blocks that only time marks need, and the damage of the first.
    of_marks: Option<(u64, String)>,
}

impl DamagedBlocks {
    fn is_sound(&self) -> bool {
        self.ranges.is_empty() && self.of_marks.is_none()
    }

    /// Adds blocks that come after all others.
    fn push(&mut self, blocks: Range<u64>) {
        match self.ranges.last_mut() {
            Some(last) if last.end == blocks.start => last.end = blocks.end,
            _ => self.ranges.push(blocks),
        }
    }

    /// Adds the damage of blocks that come after all others.
    fn append(&mut self, others: DamagedBlocks) {
        self.layers += others.layers;
        others.ranges.into_iter().for_each(|blocks| self.push(blocks));
        self.first_reason = self.first_reason.take().or(others.first_reason);
        self.of_marks = self.of_marks.take().or(others.of_marks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_processed_once_and_the_first_failure_ends_the_work() {
        for threads in [1, 4] {
            let odd = |number: u64| Ok((number % 2 == 1).then_some(number));
            let mut found = share_out(101, threads, odd).unwrap();
            found.sort_unstable();
            assert_eq!(found, (0..101).filter(|number| number % 2 == 1).collect::<Vec<_>>());
            let started = AtomicU64::new(0);
            let failing = |_number: u64| -> Result<Option<()>> {
                started.fetch_add(1, Ordering::Relaxed);
                Err(Error::new(ErrorKind::Interrupted, "cancelled"))
            };
            let error = share_out(1000, threads, failing).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Interrupted);
            assert!(started.into_inner() <= threads as u64);
        }
    }

    #[test]
    fn damage_at_a_border_of_pieces_is_one_range() {
        let found = |blocks: Range<u64>, why: &str| DamagedBlocks {
            layers: 0,
            ranges: vec![blocks],
            first_reason: Some(why.to_owned()),
            of_marks: None,
        };
        let mut damaged = DamagedBlocks::default();
        damaged.append(found(PIECE_BLOCKS - 1..PIECE_BLOCKS, "first"));
        damaged.append(found(PIECE_BLOCKS..PIECE_BLOCKS + 2, "second"));
        let [range] = &damaged.ranges[..] else { panic!("{:?}", damaged.ranges) };
        assert_eq!(*range, PIECE_BLOCKS - 1..PIECE_BLOCKS + 2);
        assert_eq!(damaged.first_reason.as_deref(), Some("first"));
    }
}
