//! The counts of a session at one moment, as documents. Byte counts are those of the clients'
//! requests.

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::counters::{LATENCY_CLASSES, MAX_REGIONS};

/// What clients did with a session since its server opened it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct SessionActivity {
    /// The program that serves the session, such as `nbdkit`.
    pub program: String,
    /// The number of its process.
    pub process: u32,
    /// When it opened the session: all counts begin here. In milliseconds since
    /// 1970-01-01T00:00:00Z.
    pub opened_at_ms: u64,
    /// The time of the counts.
    pub sampled_at_ms: u64,
    /// The disks, in the order of the session.
    pub disks: Vec<DiskActivity>,
}

/// What clients did with a disk.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct DiskActivity {
    /// The disk's name.
    pub(crate) disk: String,
    /// Reads.
    pub read: OperationActivity,
    /// Writes.
    pub write: OperationActivity,
    /// Requests to zero a range.
    pub write_zeroes: OperationActivity,
    /// Requests to discard a range.
    pub trim: OperationActivity,
    /// Flushes.
    pub flush: OperationActivity,
    /// Bytes of reads that chunks of the backup had to be read and decoded for.
    pub from_backup_bytes: u64,
    /// Bytes of reads from chunks in memory.
    pub from_cache_bytes: u64,
    /// Bytes of reads that the session, or a sealed layer below it, captured.
    pub from_captured_bytes: u64,
    /// Bytes of reads where the disk holds nothing.
    pub zero_bytes: u64,
    /// Where on the disk; only if it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) heat_map: Option<HeatMap>,
}

/// Operations of one kind.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
pub struct OperationActivity {
    /// Completed operations.
    pub operations: u64,
    /// Failed operations. They count nowhere else.
    pub failed: u64,
    /// Their bytes; 0 for flushes.
    pub bytes: u64,
    /// Sum of their times, in microseconds.
    pub(crate) total_us: u64,
    /// The longest time, in microseconds.
    pub(crate) longest_us: u64,
    /// Operations by time: the first number counts those below 1 µs, and reads that memory answers
    /// at once, which are not timed; number N those from 2^(N-1) to
    /// 2^N µs, the 26th all longer ones. Zeros at the end are left out.
    #[schema(max_items = 26)]
    pub(crate) latency: Vec<u64>,
}

/// A disk cut into regions, with the bytes that clients read and wrote in each.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub(crate) struct HeatMap {
    /// Size of a region, a power of two. The last region may be shorter.
    pub(crate) region_bytes: u64,
    /// Bytes read from the backup, by region.
    #[schema(max_items = 1024)]
    pub(crate) from_backup: Vec<u64>,
    /// Bytes read from chunks in memory.
    #[schema(max_items = 1024)]
    pub(crate) from_cache: Vec<u64>,
    /// Bytes read that were captured.
    #[schema(max_items = 1024)]
    pub(crate) from_captured: Vec<u64>,
    /// Bytes written, zeroes included, trims not.
    #[schema(max_items = 1024)]
    pub(crate) written: Vec<u64>,
}

impl SessionActivity {
    /// Checks what a process answered.
    ///
    /// # Errors
    /// `Corrupt` if the counts are not of these disks, not of now, or out of bounds. `since_ms` is
    /// the time of the question: both processes are on one host, so they have one clock.
    pub(super) fn check(&self, disks: &[&str], since_ms: u64) -> Result<()> {
        let refuse = |what: &str| {
            Err(Error::new(ErrorKind::Corrupt, format!("the counts of the server: {what}")))
        };
        if !self.disks.iter().map(|disk| disk.disk.as_str()).eq(disks.iter().copied()) {
            return refuse("they are of other disks");
        }
        if self.sampled_at_ms < since_ms {
            return refuse("they are older than the question");
        }
        if self.program.len() > 64 || !self.disks.iter().all(DiskActivity::is_bounded) {
            return refuse("they are out of bounds");
        }
        Ok(())
    }
}

impl DiskActivity {
    fn is_bounded(&self) -> bool {
        let operations = [&self.read, &self.write, &self.write_zeroes, &self.trim, &self.flush];
        operations.iter().all(|operation| operation.latency.len() <= LATENCY_CLASSES)
            && self.heat_map.as_ref().is_none_or(|map| {
                let regions = map.written.len();
                let read = [&map.from_backup, &map.from_cache, &map.from_captured];
                regions <= MAX_REGIONS && read.iter().all(|kind| kind.len() == regions)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::super::counters::Counters;
    use super::*;

    #[test]
    fn counts_of_others_and_of_before_are_refused() {
        let sample = SessionActivity {
            program: "nbdkit".into(),
            process: 1,
            opened_at_ms: 5,
            sampled_at_ms: 10,
            disks: vec![Counters::new(1 << 20, 1).sample("vda", true)],
        };
        sample.check(&["vda"], 10).unwrap();
        assert!(sample.check(&["vda"], 11).unwrap_err().to_string().contains("older"));
        assert!(sample.check(&["vdb"], 10).unwrap_err().to_string().contains("other disks"));
        assert!(sample.check(&["vda", "vdb"], 10).is_err());
        let changed = |change: &dyn Fn(&mut DiskActivity)| {
            let mut sample = sample.clone();
            change(&mut sample.disks[0]);
            sample.check(&["vda"], 10).unwrap_err()
        };
        changed(&|disk| disk.heat_map.as_mut().unwrap().from_cache.push(1));
        changed(&|disk| disk.trim.latency = vec![1; LATENCY_CLASSES + 1]);
        changed(&|disk| {
            let many = vec![0; MAX_REGIONS + 1];
            let (region_bytes, written) = (1, many.clone());
            let [from_backup, from_cache, from_captured] = [many.clone(), many.clone(), many];
            disk.heat_map =
                Some(HeatMap { region_bytes, from_backup, from_cache, from_captured, written });
        });
    }
}
