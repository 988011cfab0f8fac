//! Whether a disk is the one that its dirty bitmap counts from.
//!
//! A bitmap says what was written since the base, and not on which disk: disks of a machine can be exchanged, or an image
//! be put in the place of another one, and all their bitmaps have the name of the same backup. So some units that the bitmap
//! calls unchanged are read and compared with the base. The first one nearly always tells two disks apart: it has the
//! identifiers of the partition table or of the file system.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Disk, ErrorKind, Result};
use coldrise_store::Repository;

use super::BackupStart;
use crate::source::{Location, Source, SourceOptions, SourceSpec, open_source};

/// The number of units that are compared, beside the first two and the last.
const SAMPLES: u64 = 13;
/// Spreads the samples: another backup compares others.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl BackupStart {
    /// Why the source of a running machine's disk, or of one that is off, is not the disk of the latest backup, if a sample
    /// shows it; or why the latest backup cannot be compared, because it is damaged. A copy that QEMU made holds only what the bitmap marks, and is not compared.
    ///
    /// # Errors
    /// Errors of the source.
    pub fn is_another_disk(
        &self,
        repository: &Arc<Repository>,
        spec: &SourceSpec,
        cancel: &AtomicBool,
    ) -> Result<Option<String>> {
        let Some(base) = self.latest.as_ref().and_then(|point| point.disk(&spec.disk)) else {
            return Ok(None);
        };
        let stored = repository.disk(base.root, base.size_bytes);
        let unit_bytes = u64::from(repository.chunk_size_bytes());
        let difference =
            unrecorded_difference(spec, &stored, unit_bytes, self.point.unix_seconds(), cancel);
        match difference {
            // What is read completely replaces it; a failed backup would not.
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let why = error.full_message();
                Ok(Some(format!("the latest backup is damaged ({why})")))
            }
            difference => Ok(difference?.map(|at| {
                format!(
                    "this is not the disk of the latest backup: it differs at byte {at}, and no write there is \
                     recorded"
                )
            })),
        }
    }
}

/// Where a sample of the source differs from `base` although its bitmap marks no change; `None` if it does not, or if the
/// source offers only what the bitmap marks. `seed` chooses the sample.
///
/// # Errors
/// Errors of the source and of `base`.
pub fn unrecorded_difference(
    spec: &SourceSpec,
    base: &dyn Disk,
    unit_bytes: u64,
    seed: u64,
    cancel: &AtomicBool,
) -> Result<Option<u64>> {
    let Location::Live { bitmap: Some(bitmap), .. } = &spec.location else { return Ok(None) };
    if !bitmap.is_whole_disk {
        return Ok(None);
    }
    let options = SourceOptions { bitmap: Some(bitmap.name.clone()), follow_backing: false };
    let source = open_source(spec, &options, cancel)?;
    let unit_bytes = unit_bytes.max(source.alignment_bytes());
    let end = base.size_bytes().min(source.size_bytes());
    let mut reader = source.reader()?;
    for number in samples(end.div_ceil(unit_bytes), seed) {
        let offset_bytes = number * unit_bytes;
        let length_bytes = unit_bytes.min(end - offset_bytes);
        // A disk that has grown: its last unit is partly new.
        let is_whole = length_bytes == unit_bytes || base.size_bytes() == source.size_bytes();
        if !is_whole || is_dirty(source.as_ref(), offset_bytes, length_bytes)? {
            continue;
        }
        let mut now = vec![0; usize::try_from(length_bytes).unwrap_or(0)];
        let mut before = now.clone();
        reader.read_at(&mut now, offset_bytes)?;
        base.read_at(&mut before, offset_bytes)?;
        if now != before {
            return Ok(Some(offset_bytes));
        }
    }
    Ok(None)
}

/// The numbers of the units to compare.
fn samples(units: u64, seed: u64) -> Vec<u64> {
    let Some(last) = units.checked_sub(1) else { return Vec::new() };
    let spread = (1..=SAMPLES).map(|number| seed.wrapping_add(number).wrapping_mul(STEP) % units);
    let mut numbers: Vec<u64> = [0, 1.min(last), last].into_iter().chain(spread).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

fn is_dirty(source: &dyn Source, offset_bytes: u64, length_bytes: u64) -> Result<bool> {
    let (mut at, end) = (offset_bytes, offset_bytes + length_bytes);
    while at < end {
        for run in source.dirty_runs(at, end - at)? {
            if run.is_dirty {
                return Ok(true);
            }
            at = at.max(run.offset_bytes + run.length_bytes);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::samples;

    #[test]
    fn samples_are_units_of_the_disk() {
        assert!(samples(0, 7).is_empty());
        assert_eq!(samples(1, 7), [0]);
        for seed in [0, 1, u64::MAX] {
            let found = samples(1000, seed);
            assert!(found.len() > 10 && found.starts_with(&[0, 1]) && found.ends_with(&[999]));
        }
        assert_ne!(samples(1000, 1), samples(1000, 2));
    }
}
