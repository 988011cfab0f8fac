//! The differences of two points or sessions, as `diff` shows them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{BLOCK_SIZE_BYTES, Error, ErrorKind, Result};
use coldrise_session::{Catalog, PointOfMark, ReadLease, SessionDocument};
use coldrise_store::{Address, DiskName, PointDocument, Repository};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::compare::{Range, Side, differences};
use crate::points::find_disk;

/// The program's name in leases, for people.
const PROGRAM: &str = "diff";

/// The differences of two points or sessions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Difference {
    /// MACHINE/POINT, live/SESSION or live/SESSION@TIME.
    pub from: String,
    /// The same of the other one.
    pub to: String,
    /// They have the same disks with the same content.
    pub is_equal: bool,
    /// Sum over the disks that both have, in bytes.
    pub differing_bytes: u64,
    /// The disks that both have.
    pub disks: Vec<DiskDifference>,
    /// Disks that only the first has.
    pub only_from: Vec<String>,
    /// Disks that only the second has.
    pub only_to: Vec<String>,
}

/// The differences of two disks. Bytes beyond the end of the smaller one count as zeroes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskDifference {
    /// The disk's name, or both: `vda and vdb`.
    pub disk: String,
    /// Size of the first, in bytes.
    pub from_size_bytes: u64,
    /// Size of the second, in bytes.
    pub to_size_bytes: u64,
    /// Size and content are the same.
    pub is_equal: bool,
    /// Sum over the ranges, in bytes.
    pub differing_bytes: u64,
    /// Number of separate ranges that differ.
    pub range_count: u64,
    /// These ranges, ascending. If there are too many to list, those with small gaps are joined.
    pub ranges: Vec<DifferingRange>,
}

/// A part of a disk that holds differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DifferingRange {
    /// Where it begins.
    pub offset_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
    /// What differs of it: less than its length if ranges were joined.
    pub differing_bytes: u64,
}

impl DifferingRange {
    fn end(&self) -> u64 {
        self.offset_bytes.saturating_add(self.length_bytes)
    }
}

/// At most `most` ranges: if there are more, the gap over which neighbours are joined grows.
struct Ranges {
    found: Vec<DifferingRange>,
    most: usize,
    gap_bytes: u64,
}

impl Ranges {
    /// Adds a range behind all others.
    fn add(&mut self, range: DifferingRange) {
        self.push(range);
        if self.found.len() <= self.most {
            return;
        }
        // Down to half, so that joining is rare.
        while self.found.len() > (self.most / 2).max(1) {
            self.gap_bytes = self.gap_bytes.saturating_mul(2).max(BLOCK_SIZE_BYTES);
            std::mem::take(&mut self.found).into_iter().for_each(|range| self.push(range));
        }
    }

    fn push(&mut self, range: DifferingRange) {
        match self.found.last_mut() {
            Some(last) if range.offset_bytes.saturating_sub(last.end()) <= self.gap_bytes => {
                last.length_bytes = range.end() - last.offset_bytes;
                last.differing_bytes += range.differing_bytes;
            }
            _ => self.found.push(range),
        }
    }
}

/// The point or session of an address.
enum Subject {
    Point(PointDocument),
    Session(SessionDocument),
}

impl Subject {
    fn find(repository: &Arc<Repository>, address: &Address) -> Result<Subject> {
        match address {
            Address::Point { machine, selector, disk } => {
                let point = Catalog::new(repository).point(machine, selector)?;
                if let Some(disk) = disk {
                    find_disk(&point, disk)?;
                }
                Ok(Subject::Point(point))
            }
            Address::Marked { .. } => Err(Error::new(ErrorKind::Internal, "a time mark")),
            Address::Live { session, disk } => {
                let document = coldrise_session::session(repository, session)?.document;
                if let Some(disk) = disk {
                    document.disk(disk)?;
                }
                Ok(Subject::Session(document))
            }
        }
    }

    /// Holds it during the reading.
    fn hold(&mut self, repository: &Arc<Repository>) -> Result<ReadLease> {
        match self {
            Subject::Point(point) => ReadLease::point(repository, PROGRAM, point),
            Subject::Session(session) => ReadLease::session(repository, PROGRAM, session),
        }
    }

    fn address(&self) -> String {
        match self {
            Subject::Point(point) => format!("{}/{}", point.machine, point.point),
            Subject::Session(session) => format!("live/{}", session.name),
        }
    }

    fn disks(&self) -> Vec<DiskName> {
        match self {
            Subject::Point(point) => point.disks.iter().map(|disk| disk.name.clone()).collect(),
            Subject::Session(session) => session.disks.iter().map(|d| d.name.clone()).collect(),
        }
    }

    fn side(&self, repository: &Arc<Repository>, disk: &DiskName) -> Result<Side> {
        match self {
            Subject::Point(point) => Side::of_point(repository, point, disk),
            Subject::Session(session) => Side::of_session(repository, &session.name, disk),
        }
    }
}

/// A subject and what is shown of its address.
struct Found {
    subject: Subject,
    shown: String,
    /// A point that was made of a mark goes with it.
    _point: PointOfMark,
}

impl Found {
    fn of(repository: &Arc<Repository>, address: &Address) -> Result<Found> {
        let point = PointOfMark::of(repository, address)?;
        let subject = Subject::find(repository, &point.address)?;
        let shown = match &point.shown {
            Address::Marked { session, time, .. } => format!("live/{session}@{time}"),
            _ => subject.address(),
        };
        Ok(Found { subject, shown, _point: point })
    }

    /// Both. Of a mark a point is made, which `latest` of the other address must not mean.
    fn both(repository: &Arc<Repository>, from: &Address, to: &Address) -> Result<(Found, Found)> {
        if matches!(from, Address::Marked { .. }) {
            let right = Found::of(repository, to)?;
            return Ok((Found::of(repository, from)?, right));
        }
        Ok((Found::of(repository, from)?, Found::of(repository, to)?))
    }
}

impl Difference {
    /// Compares two points or sessions: disks of the same name, or the two disks that both addresses
    /// name. Between backups, ranges are as coarse as the repository's chunks; captured writes are
    /// compared in blocks of 4 KiB. Lists at most `most_ranges` ranges per disk.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if only one address names a disk; `Corrupt` for damage;
    /// `Interrupted` once `cancel` is set.
    pub fn read(
        repository: &Arc<Repository>,
        from: &Address,
        to: &Address,
        most_ranges: usize,
        cancel: &AtomicBool,
    ) -> Result<Difference> {
        let (mut from_found, mut to_found) = Found::both(repository, from, to)?;
        let (left, right) = (&mut from_found.subject, &mut to_found.subject);
        let _held = (left.hold(repository)?, right.hold(repository)?);
        let pairs = Pairs::of((from, left), (to, right))?;
        let mut difference = Difference {
            from: from_found.shown.clone(),
            to: to_found.shown.clone(),
            is_equal: pairs.only_from.is_empty() && pairs.only_to.is_empty(),
            differing_bytes: 0,
            disks: Vec::new(),
            only_from: pairs.only_from,
            only_to: pairs.only_to,
        };
        for (one, other) in &pairs.both {
            let name = if one == other { one.to_string() } else { format!("{one} and {other}") };
            let sides = (left.side(repository, one)?, right.side(repository, other)?);
            let disk = DiskDifference::of(name, &sides, most_ranges, cancel)?;
            difference.is_equal &= disk.is_equal;
            difference.differing_bytes += disk.differing_bytes;
            difference.disks.push(disk);
        }
        Ok(difference)
    }
}

impl DiskDifference {
    fn of(
        disk: String,
        (from, to): &(Side, Side),
        most_ranges: usize,
        cancel: &AtomicBool,
    ) -> Result<DiskDifference> {
        let mut ranges = Ranges { found: Vec::new(), most: most_ranges, gap_bytes: 0 };
        let (mut range_count, mut differing_bytes) = (0, 0);
        differences(from, to, cancel, &mut |Range { offset_bytes, length_bytes }| {
            range_count += 1;
            differing_bytes += length_bytes;
            let differing_bytes = length_bytes;
            ranges.add(DifferingRange { offset_bytes, length_bytes, differing_bytes });
        })
        .map_err(|error| error.context(&disk))?;
        Ok(DiskDifference {
            disk,
            from_size_bytes: from.size_bytes(),
            to_size_bytes: to.size_bytes(),
            is_equal: range_count == 0 && from.size_bytes() == to.size_bytes(),
            differing_bytes,
            range_count,
            ranges: ranges.found,
        })
    }
}

/// The pairs of disks to compare.
struct Pairs {
    both: Vec<(DiskName, DiskName)>,
    only_from: Vec<String>,
    only_to: Vec<String>,
}

impl Pairs {
    fn of(from: (&Address, &Subject), to: (&Address, &Subject)) -> Result<Pairs> {
        let mut pairs = Pairs { both: Vec::new(), only_from: Vec::new(), only_to: Vec::new() };
        match (from.0.disk(), to.0.disk()) {
            (Some(left), Some(right)) => pairs.both.push((left.clone(), right.clone())),
            (None, None) => {
                let left: BTreeSet<DiskName> = from.1.disks().into_iter().collect();
                let right: BTreeSet<DiskName> = to.1.disks().into_iter().collect();
                pairs.both = left.intersection(&right).map(|d| (d.clone(), d.clone())).collect();
                pairs.only_from = left.difference(&right).map(ToString::to_string).collect();
                pairs.only_to = right.difference(&left).map(ToString::to_string).collect();
            }
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "one address names a disk and the other does not: name one in both, or in none",
                ));
            }
        }
        Ok(pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn too_many_ranges_are_joined_over_the_smallest_gaps() {
        let mut ranges = Ranges { found: Vec::new(), most: 8, gap_bytes: 0 };
        // Two dense groups, far from each other: 4 KiB of every 8 KiB.
        for group in 0..2 {
            for index in 0..6 {
                ranges.add(DifferingRange {
                    offset_bytes: group * 64 * MIB + index * 8192,
                    length_bytes: 4096,
                    differing_bytes: 4096,
                });
            }
        }
        let listed: Vec<_> = ranges
            .found
            .iter()
            .map(|range| (range.offset_bytes, range.length_bytes, range.differing_bytes))
            .collect();
        let length = 5 * 8192 + 4096;
        assert_eq!(listed, [(0, length, 6 * 4096), (64 * MIB, length, 6 * 4096)]);
    }

    #[test]
    fn a_limit_of_one_range_holds() {
        let mut ranges = Ranges { found: Vec::new(), most: 1, gap_bytes: 0 };
        for index in 0..5 {
            let offset_bytes = (u64::MAX / 8) * index;
            ranges.add(DifferingRange { offset_bytes, length_bytes: 1, differing_bytes: 1 });
        }
        assert_eq!(ranges.found.len(), 1);
        assert_eq!(ranges.found[0].differing_bytes, 5);
    }
}
