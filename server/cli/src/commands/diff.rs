//! `coldrise diff`: the differences between two points or sessions.

use std::collections::BTreeSet;
use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::find_disk;
use coldrise_session::{Catalog, ReadLease, SessionDocument};
use coldrise_store::{Address, DiskName, PointDocument, Repository};
use serde::Serialize;

use crate::compare::{differences, Range, Side};
use crate::invocation::Invocation;
use crate::report::{table, Report};
use crate::signals::cancel_flag;
use crate::units::show_size;

/// Maximum number of listed ranges per disk; more are only counted.
const MAX_RANGES: usize = 1_000_000;

/// Show the differences between two restore points or sessions.
///
/// Disks are paired by name; two addresses with disks pair those two. Between backups, ranges
/// are as coarse as the repository's chunks; captured writes are compared in blocks of 4 KiB.
#[derive(Debug, Args)]
pub(crate) struct DiffArguments {
    /// MACHINE/POINT[/DISK] or live/SESSION[/DISK].
    #[arg(value_name = "ADDRESS")]
    from: Address,

    /// The address to compare with.
    #[arg(value_name = "ADDRESS")]
    to: Address,
}

#[derive(Serialize)]
struct Difference {
    from: String,
    to: String,
    is_equal: bool,
    differing_bytes: u64,
    disks: Vec<DiskDifference>,
    /// Disks that only the first has.
    only_from: Vec<String>,
    /// Disks that only the second has.
    only_to: Vec<String>,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct DiskDifference {
    disk: String,
    from_size_bytes: u64,
    to_size_bytes: u64,
    is_equal: bool,
    differing_bytes: u64,
    range_count: u64,
    ranges: Vec<Range>,
    /// False if only the first ranges are listed.
    ranges_complete: bool,
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
            Subject::Point(point) => ReadLease::point(repository, "diff", point),
            Subject::Session(session) => ReadLease::session(repository, "diff", session),
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

pub(crate) fn run(invocation: &Invocation, arguments: &DiffArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open_for_disks()?;
    let mut from = Subject::find(&repository, &arguments.from)?;
    let mut to = Subject::find(&repository, &arguments.to)?;
    let _held = (from.hold(&repository)?, to.hold(&repository)?);
    let pairs = pair_disks(arguments, &from, &to)?;
    let mut difference = Difference {
        from: from.address(),
        to: to.address(),
        is_equal: pairs.only_from.is_empty() && pairs.only_to.is_empty(),
        differing_bytes: 0,
        disks: Vec::new(),
        only_from: pairs.only_from,
        only_to: pairs.only_to,
        elapsed_ms: 0,
    };
    for (from_disk, to_disk) in &pairs.both {
        let left = from.side(&repository, from_disk)?;
        let right = to.side(&repository, to_disk)?;
        let mut disk = DiskDifference {
            disk: if from_disk == to_disk {
                from_disk.to_string()
            } else {
                format!("{from_disk} and {to_disk}")
            },
            from_size_bytes: left.size_bytes(),
            to_size_bytes: right.size_bytes(),
            is_equal: false,
            differing_bytes: 0,
            range_count: 0,
            ranges: Vec::new(),
            ranges_complete: true,
        };
        differences(&left, &right, &cancel, &mut |range| {
            disk.range_count += 1;
            disk.differing_bytes += range.length_bytes;
            if disk.ranges.len() < MAX_RANGES {
                disk.ranges.push(range);
            } else {
                disk.ranges_complete = false;
            }
        })
        .map_err(|error| error.context(&disk.disk))?;
        disk.is_equal = disk.range_count == 0 && disk.from_size_bytes == disk.to_size_bytes;
        difference.is_equal &= disk.is_equal;
        difference.differing_bytes += disk.differing_bytes;
        difference.disks.push(disk);
    }
    difference.elapsed_ms = invocation.elapsed_ms();
    let text = text(&difference);
    Ok(Report::answer(&difference, text))
}

/// The pairs of disks to compare.
struct Pairs {
    both: Vec<(DiskName, DiskName)>,
    only_from: Vec<String>,
    only_to: Vec<String>,
}

fn pair_disks(arguments: &DiffArguments, from: &Subject, to: &Subject) -> Result<Pairs> {
    let mut pairs = Pairs { both: Vec::new(), only_from: Vec::new(), only_to: Vec::new() };
    match (arguments.from.disk(), arguments.to.disk()) {
        (Some(left), Some(right)) => pairs.both.push((left.clone(), right.clone())),
        (None, None) => {
            let left: BTreeSet<DiskName> = from.disks().into_iter().collect();
            let right: BTreeSet<DiskName> = to.disks().into_iter().collect();
            pairs.both = left.intersection(&right).map(|d| (d.clone(), d.clone())).collect();
            pairs.only_from = left.difference(&right).map(ToString::to_string).collect();
            pairs.only_to = right.difference(&left).map(ToString::to_string).collect();
        }
        _ => {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "one address names a disk and the other does not: name one in both, or in none",
            ))
        }
    }
    Ok(pairs)
}

fn text(difference: &Difference) -> String {
    let mut text = format!("from {}\nto   {}\n\n", difference.from, difference.to);
    let rows: Vec<Vec<String>> = difference
        .disks
        .iter()
        .map(|disk| {
            let size = if disk.from_size_bytes == disk.to_size_bytes {
                show_size(disk.to_size_bytes)
            } else {
                format!("{} -> {}", show_size(disk.from_size_bytes), show_size(disk.to_size_bytes))
            };
            let differs = show_size(disk.differing_bytes);
            vec![disk.disk.clone(), size, differs, disk.range_count.to_string()]
        })
        .collect();
    text.push_str(&table(&["DISK", ">SIZE", ">DIFFERS", ">RANGES"], &rows));
    for (names, which) in [(&difference.only_from, "first"), (&difference.only_to, "second")] {
        if !names.is_empty() {
            text.push_str(&format!("only in the {which}: {}\n", names.join(", ")));
        }
    }
    if difference.is_equal {
        text.push_str("equal\n")
    } else {
        let total = show_size(difference.differing_bytes);
        text.push_str(&format!("{total} differ (--json lists the ranges)\n"));
    }
    text
}
