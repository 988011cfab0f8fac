//! The threads that compare two disks, and write where they differ.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use coldrise_block::{Context, Disk, Error, ErrorKind, Phase, Progress, ProgressState, Result};

use super::pieces::{Piece, Pieces};
use super::{Differences, Port, Purpose, Target, check, united};

/// The shortest run of zeroes, in bytes, that is sent as a zero request; shorter ones are written. More
/// and smaller holes would cost more than they save.
const ZERO_RUN_BYTES: usize = 64 << 10;

/// One comparison.
pub(super) struct Comparison<'a> {
    pub(super) wanted: &'a dyn Disk,
    pub(super) target: &'a dyn Target,
    /// The target's name.
    pub(super) name: &'a str,
    /// Bytes that are compared and written together.
    pub(super) unit_bytes: u64,
    pub(super) purpose: Purpose,
}

/// A piece with differences.
struct Touched {
    piece: Range<u64>,
    /// Number of runs of units that differ.
    runs: u64,
    /// Its first and its last unit differ.
    starts: bool,
    ends: bool,
}

/// State that the threads share.
struct Shared<'a> {
    pieces: Pieces<'a>,
    found: Mutex<(Differences, Vec<Touched>)>,
    total_bytes: u64,
    done_bytes: AtomicU64,
    written_bytes: AtomicU64,
    /// One thread failed, so the others stop.
    is_over: AtomicBool,
    progress: &'a dyn Progress,
    cancel: &'a AtomicBool,
}

impl Comparison<'_> {
    /// Compares all `ranges`, in whole units.
    pub(super) fn run(
        &self,
        ranges: &[Range<u64>],
        progress: &dyn Progress,
        cancel: &AtomicBool,
    ) -> Result<Differences> {
        let shared = Shared {
            pieces: Pieces::new(self.wanted, self.target, ranges, self.unit_bytes),
            found: Mutex::default(),
            total_bytes: ranges.iter().map(|range| range.end - range.start).sum(),
            done_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            progress,
            cancel,
        };
        let work = || {
            let result = self.compare_pieces(&shared);
            if result.is_err() {
                shared.is_over.store(true, Ordering::Relaxed);
            }
            result
        };
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = self.target.source().useful_readers().min(processors.max(2));
        std::thread::scope(|scope| {
            let workers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut outcomes = vec![work()];
            outcomes.extend(workers.into_iter().map(|worker| {
                worker.join().unwrap_or_else(|_| {
                    Err(Error::new(ErrorKind::Internal, "a thread of the comparison panicked"))
                })
            }));
            outcomes.into_iter().collect::<Result<()>>()
        })?;
        let (differences, touched) =
            shared.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(counted(differences, touched))
    }

    /// One thread: takes pieces until none is left.
    fn compare_pieces(&self, shared: &Shared<'_>) -> Result<()> {
        let mut port = self.target.port()?;
        let (mut wanted, mut there) = (Vec::new(), Vec::new());
        loop {
            check(shared.cancel)?;
            if shared.is_over.load(Ordering::Relaxed) {
                return Ok(());
            }
            let Some(piece) = shared.pieces.next()? else { return Ok(()) };
            let range = match piece {
                Piece::Equal(range) => {
                    self.advance(shared, range.end - range.start, 0);
                    continue;
                }
                Piece::Compared(range) => range,
            };
            let length = (range.end - range.start) as usize;
            wanted.resize(length, 0);
            there.resize(length, 0);
            let what = || format!("reading the disk at offset {}", range.start);
            self.wanted.read_at(&mut wanted, range.start).context(what)?;
            port.read_at(&mut there, range.start)?;
            let runs = match wanted == there {
                true => Vec::new(),
                false => differing_runs(&wanted, &there, self.unit_bytes as usize),
            };
            let zeroed = match self.purpose {
                Purpose::Write => self.write(port.as_mut(), &wanted, &runs, range.start)?,
                Purpose::Count | Purpose::Verify => 0,
            };
            let differing: u64 = runs.iter().map(|run| run.len() as u64).sum();
            self.advance(shared, length as u64, differing);
            let mut found = shared.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.0.compared_bytes += length as u64;
            found.0.differing_bytes += differing;
            found.0.zeroed_bytes += zeroed;
            if let (Some(first), Some(last)) = (runs.first(), runs.last()) {
                let (starts, ends) = (first.start == 0, last.end == length);
                found.1.push(Touched { piece: range, runs: runs.len() as u64, starts, ends });
            }
        }
    }

    /// Writes the runs of a piece at `offset_bytes`. Returns how much was zeroed instead.
    fn write(
        &self,
        port: &mut dyn Port,
        wanted: &[u8],
        runs: &[Range<usize>],
        offset_bytes: u64,
    ) -> Result<u64> {
        let mut zeroed = 0;
        for run in runs {
            for (part, is_zero) in parts(&wanted[run.clone()], self.unit_bytes as usize) {
                let (start, end) = (run.start + part.start, run.start + part.end);
                let at = offset_bytes + start as u64;
                if is_zero {
                    port.write_zeroes(at, part.len() as u64)?;
                    zeroed += part.len() as u64;
                } else {
                    port.write_at(&wanted[start..end], at)?;
                }
            }
        }
        Ok(zeroed)
    }

    fn advance(&self, shared: &Shared<'_>, done_bytes: u64, written_bytes: u64) {
        let done = shared.done_bytes.fetch_add(done_bytes, Ordering::Relaxed) + done_bytes;
        let written = shared.written_bytes.fetch_add(written_bytes, Ordering::Relaxed);
        shared.progress.update(&ProgressState {
            phase: match self.purpose {
                Purpose::Verify => Phase::Verifying,
                Purpose::Count | Purpose::Write => Phase::Restoring,
            },
            disk: self.name,
            done_bytes: done,
            total_bytes: shared.total_bytes,
            read_bytes: done,
            stored_bytes: written + written_bytes,
        });
    }
}

/// The runs of units that differ, as ranges of the buffers.
pub(crate) fn differing_runs(wanted: &[u8], there: &[u8], unit: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, (a, b)) in wanted.chunks(unit).zip(there.chunks(unit)).enumerate() {
        if a == b {
            continue;
        }
        let start = index * unit;
        match runs.last_mut() {
            Some(last) if last.end == start => last.end += a.len(),
            _ => runs.push(start..start + a.len()),
        }
    }
    runs
}

/// Cuts a run into parts to zero and parts to write.
pub(crate) fn parts(run: &[u8], unit: usize) -> Vec<(Range<usize>, bool)> {
    let mut parts: Vec<(Range<usize>, bool)> = Vec::new();
    for (index, bytes) in run.chunks(unit).enumerate() {
        let (start, is_zero) = (index * unit, bytes.iter().all(|byte| *byte == 0));
        match parts.last_mut() {
            Some((last, kind)) if *kind == is_zero => last.end += bytes.len(),
            _ => parts.push((start..start + bytes.len(), is_zero)),
        }
    }
    let whole = parts.len() == 1;
    let mut joined: Vec<(Range<usize>, bool)> = Vec::new();
    for (part, is_zero) in parts {
        let is_zero = is_zero && (whole || part.len() >= ZERO_RUN_BYTES);
        match joined.last_mut() {
            Some((last, false)) if !is_zero => last.end = part.end,
            _ => joined.push((part, is_zero)),
        }
    }
    joined
}

/// Counts the ranges over the borders of pieces, and joins the pieces.
fn counted(mut differences: Differences, mut touched: Vec<Touched>) -> Differences {
    touched.sort_unstable_by_key(|touched| touched.piece.start);
    let runs: u64 = touched.iter().map(|touched| touched.runs).sum();
    let continues = |pair: &&[Touched]| {
        pair[0].ends && pair[1].starts && pair[0].piece.end == pair[1].piece.start
    };
    differences.range_count = runs - touched.windows(2).filter(continues).count() as u64;
    differences.touched = united(touched.into_iter().map(|touched| touched.piece).collect());
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_whole_units_and_joined() {
        let mut there = vec![1u8; 100];
        let wanted = there.clone();
        for at in [0, 15, 40, 99] {
            there[at] = 2;
        }
        assert_eq!(differing_runs(&wanted, &there, 10), [0..20, 40..50, 90..100]);
        assert_eq!(differing_runs(&wanted, &wanted, 10), []);
    }

    #[test]
    fn long_zeroes_are_zeroed_and_short_ones_written() {
        let mut run = vec![0u8; 2 * ZERO_RUN_BYTES + 16384];
        run[0] = 1;
        run[2 * ZERO_RUN_BYTES] = 1;
        let found = parts(&run, 4096);
        let long = 2 * ZERO_RUN_BYTES;
        let expected = [(0..4096, false), (4096..long, true), (long..run.len(), false)];
        assert_eq!(found, expected, "the last zeroes are too short");
        assert_eq!(parts(&[0; 8192], 4096), [(0..8192, true)]);
    }

    #[test]
    fn a_range_over_two_pieces_counts_once() {
        let touched = |piece: Range<u64>, runs, starts, ends| Touched { piece, runs, starts, ends };
        let found = vec![
            touched(20..30, 1, false, false),
            touched(10..20, 2, true, true),
            touched(0..10, 1, false, true),
        ];
        let counted = counted(Differences::default(), found);
        assert_eq!(
            (counted.range_count, counted.touched.as_slice()),
            (3, std::slice::from_ref(&(0..30)))
        );
    }
}
