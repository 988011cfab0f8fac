//! `coldrise list`: machines and their restore points.

use clap::Args;
use coldrise_block::Result;
use coldrise_session::Catalog;
use coldrise_store::{
    BootCheckDocument, BootVerdict, Horizon, MachineName, PointDocument, PointOrigin, Quarantine,
    Repository,
};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::{table, Report};
use crate::units::{show_moment, show_size};

/// List machines and their restore points, oldest first.
///
/// BOOT is the result of the point's last check-boot: ok, failed or not proven; worse if the
/// machine's last good checks reached more.
#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// List only this machine.
    #[arg(value_name = "MACHINE")]
    machine: Option<MachineName>,
}

#[derive(Serialize)]
struct Listing {
    machines: Vec<ListedMachine>,
    /// Addresses of lost points: their marker exists, but the point does not.
    lost: Vec<String>,
}

#[derive(Serialize)]
struct ListedMachine {
    machine: String,
    points: Vec<ListedPoint>,
}

#[derive(Serialize)]
struct ListedPoint {
    address: String,
    point: String,
    kind: &'static str,
    created_at_ms: u64,
    size_bytes: u64,
    is_protected: bool,
    /// Later than the clock.
    is_in_future: bool,
    /// `latest` skips it: it is dated in the future, and a later backup exists.
    is_passed_over: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantine: Option<Quarantine>,
    /// The result of the last boot check.
    #[serde(skip_serializing_if = "Option::is_none")]
    boot: Option<BootVerdict>,
    /// It came less far than the machine's last good checks.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_boot_worse: bool,
    disks: Vec<ListedDisk>,
}

#[derive(Serialize)]
struct ListedDisk {
    disk: String,
    size_bytes: u64,
}

impl ListedPoint {
    fn new(
        point: &PointDocument,
        horizon: &Horizon,
        boot: Option<&BootCheckDocument>,
    ) -> ListedPoint {
        let sizes = point.disks.iter().map(|disk| disk.size_bytes);
        ListedPoint {
            address: format!("{}/{}", point.machine, point.point),
            point: point.point.to_string(),
            kind: kind_word(&point.origin),
            created_at_ms: point.created_at_ms,
            size_bytes: sizes.fold(0, u64::saturating_add),
            is_protected: point.is_protected,
            is_in_future: horizon.is_in_future(&point.point),
            is_passed_over: horizon.is_passed_over(&point.point),
            quarantine: point.quarantine,
            boot: boot.map(|check| check.verdict),
            is_boot_worse: boot.is_some_and(|check| check.is_worse),
            disks: point
                .disks
                .iter()
                .map(|disk| ListedDisk { disk: disk.name.to_string(), size_bytes: disk.size_bytes })
                .collect(),
        }
    }
}

/// The origin of a point, in one word.
pub(super) fn kind_word(origin: &PointOrigin) -> &'static str {
    match origin {
        PointOrigin::Backup { .. } => "backup",
        PointOrigin::Synthetic { .. } => "synthetic",
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: &ListArguments) -> Result<Report> {
    let repository = invocation.open()?;
    let catalog = Catalog::new(&repository);
    let machines = match &arguments.machine {
        Some(machine) => {
            // An error for an unknown machine names the existing ones.
            catalog.check_machine(machine)?;
            vec![machine.clone()]
        }
        None => catalog.machines()?,
    };
    let lost = catalog.lost_points(arguments.machine.as_ref())?;
    let lost = lost.iter().map(|(machine, point)| format!("{machine}/{point}")).collect();
    let mut listing = Listing { machines: Vec::with_capacity(machines.len()), lost };
    for machine in machines {
        let points = catalog.points(&machine)?;
        let horizon = repository.horizon(&machine)?;
        if let Some(warning) = horizon.warning(&machine, points.iter().map(|point| &point.point)) {
            invocation.remark(&format!("warning: {warning}"));
        }
        listing.machines.push(ListedMachine {
            machine: machine.to_string(),
            points: points
                .iter()
                .map(|point| {
                    ListedPoint::new(point, &horizon, boot_check(&repository, point).as_ref())
                })
                .collect(),
        });
    }
    for name in &listing.lost {
        invocation.remark(&repository.lost(name.clone()).message());
    }
    let rows: Vec<Vec<String>> =
        listing.machines.iter().flat_map(|machine| &machine.points).map(row).collect();
    let text = match rows.len() {
        0 if listing.lost.is_empty() => {
            "no restore points yet: make one with coldrise backup".to_owned()
        }
        0 => String::new(),
        _ => table(shown_headings(&rows), &rows),
    };
    Ok(Report::answer(&listing, text))
}

/// A boot check that cannot be read is none; verify names it.
fn boot_check(repository: &Repository, point: &PointDocument) -> Option<BootCheckDocument> {
    let check = repository.boot_check(&point.machine, &point.point).ok().flatten();
    check.map(|(check, _)| check)
}

/// A verdict in the words of the list.
pub(super) fn boot_word(verdict: BootVerdict, is_worse: bool) -> &'static str {
    match verdict {
        BootVerdict::Ok => "ok",
        BootVerdict::Failed => "failed",
        BootVerdict::NotProven if is_worse => "not proven, worse",
        BootVerdict::NotProven => "not proven",
    }
}

const HEADINGS: [&str; 8] =
    ["ADDRESS", "KIND", "STORED AT", "DISKS", ">SIZE", "BOOT", "PROTECTED", "QUARANTINED"];

/// The last column appears only if a row has a text in it.
fn shown_headings(rows: &[Vec<String>]) -> &'static [&'static str] {
    let is_any = rows.iter().any(|row| row.last().is_some_and(|cell| !cell.is_empty()));
    &HEADINGS[..HEADINGS.len() - usize::from(!is_any)]
}

fn row(point: &ListedPoint) -> Vec<String> {
    let disks: Vec<&str> = point.disks.iter().map(|disk| disk.disk.as_str()).collect();
    vec![
        point.address.clone(),
        point.kind.to_owned(),
        show_moment(point.created_at_ms),
        disks.join(" "),
        show_size(point.size_bytes),
        point.boot.map_or("-", |verdict| boot_word(verdict, point.is_boot_worse)).to_owned(),
        if point.is_protected { "yes" } else { "" }.to_owned(),
        point.quarantine.map_or_else(String::new, |quarantine| quarantine.to_string()),
    ]
}
