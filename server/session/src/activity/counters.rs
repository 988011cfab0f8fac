//! The counters of one disk. Requests of all threads add to them without a lock.
//!
//! All accesses are relaxed: a sample taken during a request may hold a part of its counts. The
//! next one holds the rest.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use coldrise_block::{BLOCK_SIZE_BYTES, ReadContext, ReadSource};

use super::sample::{DiskActivity, HeatMap, OperationActivity};

/// Classes of latency; see [`OperationActivity::latency`].
pub(super) const LATENCY_CLASSES: usize = 26;
/// Maximum number of regions of a disk.
pub(super) const MAX_REGIONS: usize = 1024;
/// Maximum number of regions of a session; each takes 32 bytes of memory, and one line holds them
/// all. With more than 16 disks, each has fewer.
const MAX_SESSION_REGIONS: usize = 16 << 10;

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
    WriteZeroes,
    Trim,
    Flush,
}

/// The counters of a region. Reads are counted by their source.
#[derive(Clone, Copy)]
enum Heat {
    Backup,
    Cache,
    Captured,
    Written,
}

/// Bytes by [`Heat`].
type Region = [AtomicU64; 4];

/// The counters of a disk.
pub(crate) struct Counters {
    /// By [`Operation`].
    operations: [OperationCounters; 5],
    zero_bytes: AtomicU64,
    /// A region has 2^this bytes.
    region_shift: u32,
    regions: Box<[Region]>,
}

#[derive(Default)]
struct OperationCounters {
    failed: AtomicU64,
    /// Those of reads are the sum of their sources.
    bytes: AtomicU64,
    total_ns: AtomicU64,
    longest_ns: AtomicU64,
    /// Their sum is the number of operations.
    latency: [AtomicU64; LATENCY_CLASSES],
}

impl Counters {
    /// Zeros, for a disk of `size_bytes` of a session with `disks` disks.
    pub(super) fn new(size_bytes: u64, disks: usize) -> Counters {
        let most = (MAX_SESSION_REGIONS / disks.max(1)).clamp(1, MAX_REGIONS) as u64;
        let region_bytes = size_bytes.div_ceil(most).max(BLOCK_SIZE_BYTES).next_power_of_two();
        Counters {
            operations: Default::default(),
            zero_bytes: AtomicU64::new(0),
            region_shift: region_bytes.trailing_zeros(),
            regions: (0..size_bytes.div_ceil(region_bytes)).map(|_| Region::default()).collect(),
        }
    }

    /// Adds a completed read.
    #[inline]
    pub(super) fn add_read(&self, context: &ReadContext) {
        self.add(Operation::Read, context.waited());
        for piece in context.pieces() {
            let heat = match piece.source {
                ReadSource::Backup => Heat::Backup,
                ReadSource::Cache => Heat::Cache,
                ReadSource::Captured => Heat::Captured,
                ReadSource::Zero => {
                    self.zero_bytes.fetch_add(piece.length_bytes, Relaxed);
                    continue;
                }
            };
            self.warm(heat, piece.offset_bytes, piece.length_bytes);
        }
    }

    /// Adds a completed operation other than a read.
    #[inline]
    pub(super) fn add_change(&self, kind: Operation, offset: u64, length: u64, time: Duration) {
        self.add(kind, Some(time));
        self.operations[kind as usize].bytes.fetch_add(length, Relaxed);
        if matches!(kind, Operation::Write | Operation::WriteZeroes) {
            self.warm(Heat::Written, offset, length);
        }
    }

    /// Adds a failed operation.
    pub(super) fn add_failed(&self, kind: Operation) {
        self.operations[kind as usize].failed.fetch_add(1, Relaxed);
    }

    #[inline]
    fn add(&self, kind: Operation, time: Option<Duration>) {
        let counters = &self.operations[kind as usize];
        let Some(time) = time else {
            counters.latency[0].fetch_add(1, Relaxed);
            return;
        };
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        counters.latency[latency_class(nanoseconds)].fetch_add(1, Relaxed);
        counters.total_ns.fetch_add(nanoseconds, Relaxed);
        if nanoseconds > counters.longest_ns.load(Relaxed) {
            counters.longest_ns.fetch_max(nanoseconds, Relaxed);
        }
    }

    /// Counts bytes in the regions where they lie.
    #[inline]
    fn warm(&self, heat: Heat, offset_bytes: u64, length_bytes: u64) {
        let (mut at, end) = (offset_bytes, offset_bytes + length_bytes);
        while at < end {
            let index = at >> self.region_shift;
            let stop = ((index + 1) << self.region_shift).min(end);
            if let Some(region) = self.regions.get(index as usize) {
                region[heat as usize].fetch_add(stop - at, Relaxed);
            }
            at = stop;
        }
    }

    /// The counts now.
    pub(super) fn sample(&self, disk: &str, with_heat_map: bool) -> DiskActivity {
        let operation = |kind: Operation| self.operations[kind as usize].sample();
        let heat_map = self.heat_map();
        let from_backup_bytes = heat_map.from_backup.iter().sum();
        let from_cache_bytes = heat_map.from_cache.iter().sum();
        let from_captured_bytes = heat_map.from_captured.iter().sum();
        let zero_bytes = self.zero_bytes.load(Relaxed);
        let read_bytes = from_backup_bytes + from_cache_bytes + from_captured_bytes + zero_bytes;
        DiskActivity {
            disk: disk.to_owned(),
            read: OperationActivity { bytes: read_bytes, ..operation(Operation::Read) },
            write: operation(Operation::Write),
            write_zeroes: operation(Operation::WriteZeroes),
            trim: operation(Operation::Trim),
            flush: operation(Operation::Flush),
            from_backup_bytes,
            from_cache_bytes,
            from_captured_bytes,
            zero_bytes,
            heat_map: with_heat_map.then_some(heat_map),
        }
    }

    fn heat_map(&self) -> HeatMap {
        let counts = |heat: Heat| {
            self.regions.iter().map(|region| region[heat as usize].load(Relaxed)).collect()
        };
        HeatMap {
            region_bytes: 1 << self.region_shift,
            from_backup: counts(Heat::Backup),
            from_cache: counts(Heat::Cache),
            from_captured: counts(Heat::Captured),
            written: counts(Heat::Written),
        }
    }
}

impl OperationCounters {
    fn sample(&self) -> OperationActivity {
        let mut latency: Vec<u64> = self.latency.iter().map(|class| class.load(Relaxed)).collect();
        let used = latency.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        latency.truncate(used);
        OperationActivity {
            operations: latency.iter().sum(),
            failed: self.failed.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            total_us: self.total_ns.load(Relaxed) / 1000,
            longest_us: self.longest_ns.load(Relaxed) / 1000,
            latency,
        }
    }
}

/// The class of a time: the number of binary digits of its microseconds.
#[inline]
fn latency_class(nanoseconds: u64) -> usize {
    let digits = u64::BITS - (nanoseconds / 1000).leading_zeros();
    (digits as usize).min(LATENCY_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_classes_double() {
        let us = |us: u64| latency_class(us * 1000);
        assert_eq!((latency_class(999), us(1), us(2), us(3), us(4)), (0, 1, 2, 2, 3));
        assert_eq!((us(1 << 24), us(1 << 40)), (25, 25));
    }

    #[test]
    fn heat_map_regions_are_bounded_and_count_written_bytes() {
        for (size, disks, region, count) in [
            (0, 1, 4096, 0),
            (1, 1, 4096, 1),
            (4 << 20, 1, 4096, 1024),
            ((4 << 20) + 1, 1, 8192, 513),
            (64 << 40, 1, 64 << 30, 1024),
            (64 << 40, 256, 1 << 40, 64),
        ] {
            let map = Counters::new(size, disks).heat_map();
            assert_eq!((map.region_bytes, map.written.len()), (region, count), "{size}");
        }
        let counters = Counters::new(3 * 4096, 1);
        counters.add_change(Operation::Write, 4000, 5000, Duration::ZERO);
        counters.add_change(Operation::WriteZeroes, 3 * 4096 - 1, 1, Duration::ZERO);
        counters.add_change(Operation::Trim, 0, 3 * 4096, Duration::ZERO);
        assert_eq!(counters.heat_map().written, [96, 4096, 808 + 1]);
    }

    #[test]
    fn a_sample_has_times_and_failures() {
        let counters = Counters::new(4096, 1);
        for us in [1, 3, 100] {
            counters.add_change(Operation::Flush, 0, 0, Duration::from_micros(us));
        }
        counters.add_failed(Operation::Write);
        let sample = counters.sample("vda", false);
        assert_eq!(sample.flush.latency, [0, 1, 1, 0, 0, 0, 0, 1]);
        let flush = &sample.flush;
        assert_eq!((flush.operations, flush.total_us, flush.longest_us), (3, 104, 100));
        assert_eq!((sample.write.operations, sample.write.failed), (0, 1));
        assert_eq!((sample.read, sample.heat_map), (OperationActivity::default(), None));
    }
}
