//! `coldrise list`: machines and their restore points.

use std::sync::Arc;

use clap::Args;
use coldrise_block::{ErrorKind, Result};
use coldrise_inventory::{IncomingDetails, ListedMachine, ListedPoint, Listing, PointPart};
use coldrise_requests::refuse;
use coldrise_session::Catalog;
use coldrise_store::{BootVerdict, MachineName, Repository};
use serde::Serialize;
use serde_json::json;

use crate::incoming;
use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::{show_moment, show_size};

/// List machines and their restore points, oldest first.
///
/// NAME is the machine's display name: see backup. BOOT is the result of the point's last check-boot:
/// ok, failed or not proven; worse if the machine's last good checks reached more. A point that is
/// still being copied from another site has the kind "coming": it is incomplete.
#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// List only this machine.
    #[arg(value_name = "MACHINE")]
    machine: Option<MachineName>,

    /// List only the parts that points have in addition to their disks and configuration: firmware variables and TPM
    /// state. Points without such parts are left out.
    #[arg(long)]
    parts: bool,
}

impl ListArguments {
    /// The only machine to list, for a list of points.
    ///
    /// # Errors
    /// `InvalidInput` with --parts.
    pub(crate) fn machine(&self) -> Result<Option<&MachineName>> {
        match self.parts {
            false => Ok(self.machine.as_ref()),
            true => Err(refuse("list --parts").advise("coldrise show shows the parts of a point")),
        }
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: &ListArguments) -> Result<Report> {
    let repository = invocation.open()?;
    if arguments.parts {
        return parts(&repository, arguments.machine.as_ref());
    }
    let incoming = IncomingDetails::all(&repository, arguments.machine.as_ref())?;
    let (listing, warnings) = match Listing::read(&repository, arguments.machine.as_ref()) {
        // No point of the machine is complete.
        Err(error) if error.kind() == ErrorKind::NotFound && !incoming.is_empty() => {
            (Listing { machines: Vec::new(), lost: Vec::new() }, Vec::new())
        }
        read => read?,
    };
    for warning in warnings {
        invocation.remark(&format!("warning: {warning}"));
    }
    for name in &listing.lost {
        invocation.remark(&repository.lost(name.clone()).message());
    }
    Ok(report(&listing, incoming))
}

/// A part of a point, in the list.
#[derive(Serialize)]
struct ListedPart {
    address: String,
    #[serde(flatten)]
    part: PointPart,
}

fn parts(repository: &Arc<Repository>, machine: Option<&MachineName>) -> Result<Report> {
    let catalog = Catalog::new(repository);
    let machines = match machine {
        Some(machine) => {
            catalog.check_machine(machine)?;
            vec![machine.clone()]
        }
        None => catalog.machines()?,
    };
    let mut listed = Vec::new();
    for machine in machines {
        for point in catalog.points(&machine)? {
            let address = format!("{machine}/{}", point.point);
            let parts = PointPart::all(&point).map_err(|error| error.context(&address))?;
            let of_point = |part| ListedPart { address: address.clone(), part };
            listed.extend(parts.into_iter().map(of_point));
        }
    }
    let row = |ListedPart { address, part }: &ListedPart| {
        let PointPart { kind, format, size_bytes, sha256 } = part.clone();
        vec![address.clone(), kind, show_size(size_bytes), format, sha256]
    };
    let rows: Vec<_> = listed.iter().map(row).collect();
    let text = match rows.is_empty() {
        true => "no point has parts in addition to its disks and configuration".to_owned(),
        false => table(&["ADDRESS", "PART", ">SIZE", "FORMAT", "SHA-256"], &rows),
    };
    Ok(Report::answer(&json!({ "parts": listed }), text))
}

/// The list, with the points that are on their way here.
#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    listing: &'a Listing,
    #[serde(rename = "coming", skip_serializing_if = "Vec::is_empty")]
    incoming: Vec<IncomingDetails>,
}

/// The list for people and for programs.
pub(crate) fn report(listing: &Listing, incoming: Vec<IncomingDetails>) -> Report {
    let named = |machine: &ListedMachine, mut row: Vec<String>| {
        row.insert(1, machine.display_name.clone().unwrap_or_default());
        row
    };
    let points = listing.machines.iter().flat_map(|m| m.points.iter().map(move |p| (m, p)));
    let points = points.map(|(machine, point)| named(machine, row(point)));
    let mut rows: Vec<_> = points.chain(incoming.iter().map(incoming::row)).collect();
    let text = match rows.len() {
        0 if listing.lost.is_empty() => {
            "no restore points yet: make one with coldrise backup".to_owned()
        }
        0 => String::new(),
        _ => table(&shown_headings(&mut rows), &rows),
    };
    Report::answer(&Listed { listing, incoming }, text)
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

const HEADINGS: [&str; 10] = [
    "ADDRESS",
    "NAME",
    "KIND",
    "STORED AT",
    "AS OF",
    "DISKS",
    ">SIZE",
    "BOOT",
    "PROTECTED",
    "QUARANTINED",
];

/// Removes the columns NAME, AS OF and QUARANTINED if no row has a text in them.
fn shown_headings(rows: &mut [Vec<String>]) -> Vec<&'static str> {
    let mut headings = HEADINGS.to_vec();
    for optional in ["QUARANTINED", "AS OF", "NAME"] {
        let Some(at) = headings.iter().position(|heading| *heading == optional) else { continue };
        if rows.iter().all(|row| row.get(at).is_none_or(String::is_empty)) {
            headings.remove(at);
            rows.iter_mut().filter(|row| at < row.len()).for_each(|row| drop(row.remove(at)));
        }
    }
    headings
}

fn row(point: &ListedPoint) -> Vec<String> {
    let disks: Vec<&str> = point.disks.0.iter().map(|disk| disk.disk.as_str()).collect();
    vec![
        point.address.clone(),
        point.kind.as_str().to_owned(),
        show_moment(point.created_at_ms),
        point.marked_at_ms.map_or_else(String::new, show_moment),
        disks.join(" "),
        show_size(point.size_bytes),
        point.boot.map_or("-", |verdict| boot_word(verdict, point.is_boot_worse)).to_owned(),
        if point.is_protected { "yes" } else { "" }.to_owned(),
        point.quarantine.map_or_else(String::new, |quarantine| quarantine.to_string()),
    ]
}
