//! `coldrise rollback`: makes existing disks equal to a restore point.

use clap::Args;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_ingest::rollback::{
    Bitmap, HostDisks, Method, RollbackDisk, RollbackOptions, RollbackSummary, rollback,
};
use coldrise_ingest::{BackupRequest, RestoreTarget};
use coldrise_requests::Rollback;
use coldrise_session::Catalog;
use coldrise_store::{Address, PointDocument, PointName};
use serde::Serialize;
use serde_json::json;

use super::attach::named_host;
use super::{backup, restore};
use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::{Report, table};
use crate::units::{show_count, show_duration, show_size};
use coldrise_hosting::signals::cancel_flag;
use coldrise_hosting::tell_newer;
use coldrise_runs::process_run;

/// Roll existing disks back to a restore point; only what differs is written.
///
/// Stores the present state as a restore point of the machine first, so that the rollback can be
/// undone. The machine must be off, or the disks detached from it. Run an interrupted rollback
/// again to finish it. See docs/recovery.md.
#[derive(Debug, Args)]
pub(crate) struct RollbackArguments {
    #[command(flatten)]
    request: Rollback,
}

#[derive(Serialize)]
struct Answer {
    address: String,
    is_dry_run: bool,
    safety_point: Option<String>,
    differing_bytes: u64,
    disks: Vec<AnsweredDisk>,
    remarks: Vec<String>,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct AnsweredDisk {
    disk: String,
    target: String,
    method: &'static str,
    size_bytes: u64,
    compared_bytes: u64,
    differing_bytes: u64,
    zeroed_bytes: u64,
    range_count: u64,
    verified_bytes: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: RollbackArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open_for_disks()?;
    let arguments = arguments.request;
    let address: Address = arguments.address.parse()?;
    let of_mark = invocation.point_of_mark(&repository, &address)?;
    let address = &of_mark.address;
    let (machine, selector) = match address {
        Address::Point { machine, selector, .. } => (machine, selector),
        Address::Live { .. } | Address::Marked { .. } => {
            return Err(Error::new(ErrorKind::InvalidInput, "a session changes while it is read")
                .advise("name a time mark of it (coldrise marks), or seal it and name the point"));
        }
    };
    let catalog = Catalog::new(&repository);
    let mut point = catalog.point(machine, selector)?;
    tell_newer(invocation.caller()?, &catalog, selector, &point);
    let mut disks = disks(&arguments, address, &point)?;
    let host = named_host(&repository, arguments.on.as_deref())?;
    if host.name().is_none() {
        for disk in &disks {
            restore::refuse_inside(repository.path(), &disk.target)?;
        }
    }
    // Not `latest`, which the safety point changes.
    let rolled_to = match address.disk() {
        Some(disk) => format!("{machine}/{}/{disk}", point.point),
        None => format!("{machine}/{}", point.point),
    };
    let since = arguments.since.as_deref().map(PointName::parse).transpose()?;
    let options = RollbackOptions {
        is_dry_run: arguments.dry_run,
        takes_safety_point: !arguments.no_safety_point,
        verifies_all: arguments.verify,
        bitmap: since.map(|since| Bitmap::new(arguments.bitmap.clone(), since)).transpose()?,
    };
    let absolute = |target: &RestoreTarget| match target {
        RestoreTarget::Path(path) if host.name().is_some() => {
            Ok(format!("{}:{}", host.name().unwrap_or_default(), path.display()))
        }
        RestoreTarget::Path(path) => Ok(std::path::absolute(path)?.to_string_lossy().into_owned()),
        other => Ok(other.to_string()),
    };
    let targets: std::io::Result<Vec<_>> = disks.iter().map(|d| absolute(&d.target)).collect();
    let targets = targets.context(|| "finding the targets")?;
    let _exports = match host.name() {
        Some(_) => Some(HostDisks::export(&host, &mut disks)?),
        None => None,
    };
    let take_point = |request: &BackupRequest| -> Result<PointName> {
        let (summary, _) = backup::store(invocation, request, &cancel)?;
        for warning in &summary.warnings {
            invocation.remark(&format!("warning: {warning}"));
        }
        invocation.remark(&format!(
            "stored the present state as {machine}/{}, which is now the latest point: if the \
             rollback is interrupted, run it again with the address {rolled_to}",
            summary.point
        ));
        Ok(summary.point)
    };
    let before_writing = |request: Option<&BackupRequest>| {
        // An interrupted rollback is run again with its address.
        if !arguments.dry_run {
            of_mark.keep();
        }
        let point = request.map(take_point).transpose()?;
        // doctor names the targets of a killed command. A new phase is noted at once.
        process_run::progress(
            json!({ "phase": "comparing", "address": rolled_to, "targets": targets }),
        );
        Ok(point)
    };
    let view = ProgressView::new(invocation);
    let done = rollback(&repository, &mut point, &disks, &options, &before_writing, &view, &cancel);
    drop(view);
    let mut summary = done.map_err(|error| match host.name() {
        Some(_) => named(error, &disks, &targets),
        None => error,
    })?;
    if host.name().is_some() {
        for (done, target) in summary.disks.iter_mut().zip(&targets) {
            done.target = RestoreTarget::Path(target.into());
        }
    }
    summary.remarks.iter().for_each(|remark| invocation.remark(remark));
    Ok(report(invocation, &point, &summary, arguments.dry_run))
}

/// The disks to roll back: as listed, or the only one.
fn disks(
    arguments: &Rollback,
    address: &Address,
    point: &PointDocument,
) -> Result<Vec<RollbackDisk>> {
    match (&arguments.onto, address.disk()) {
        (Some(target), named) => {
            let names = point.disks.iter().map(|disk| &disk.name);
            let disk = restore::choose_disk(address, named, names)
                .map_err(|error| error.advise("or list all as DISK=TARGET instead of --onto"))?;
            Ok(vec![RollbackDisk { disk, target: RestoreTarget::parse(target)? }])
        }
        (None, Some(_)) => {
            let text = "the address names a disk: write --onto TARGET";
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
        (None, None) => arguments.disks.iter().map(|text| RollbackDisk::parse(text)).collect(),
    }
}

/// The error with the names that the user gave in place of those of exports.
fn named(error: Error, disks: &[RollbackDisk], targets: &[String]) -> Error {
    let pairs = disks.iter().zip(targets);
    let text = pairs.fold(error.full_message(), |text, (disk, target)| {
        text.replace(&disk.target.to_string(), target)
    });
    Error::new(error.kind(), text)
}

fn method(method: Method) -> &'static str {
    match method {
        Method::Points => "points",
        Method::Bitmap => "bitmap",
        Method::Compare => "compare",
    }
}

fn report(
    invocation: &Invocation,
    point: &PointDocument,
    summary: &RollbackSummary,
    is_dry_run: bool,
) -> Report {
    let (machine, address) = (&point.machine, format!("{}/{}", point.machine, point.point));
    let disks = summary.disks.iter().map(|done| AnsweredDisk {
        disk: done.disk.to_string(),
        target: done.target.to_string(),
        method: method(done.method),
        size_bytes: done.size_bytes,
        compared_bytes: done.differences.compared_bytes,
        differing_bytes: done.differences.differing_bytes,
        zeroed_bytes: done.differences.zeroed_bytes,
        range_count: done.differences.range_count,
        verified_bytes: done.verified_bytes,
    });
    let answer = Answer {
        address,
        is_dry_run,
        safety_point: summary.safety_point.as_ref().map(|point| format!("{machine}/{point}")),
        differing_bytes: summary.disks.iter().map(|d| d.differences.differing_bytes).sum(),
        disks: disks.collect(),
        remarks: summary.remarks.clone(),
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = text(invocation, &answer);
    if is_dry_run {
        return Report::answer(&answer, text);
    }
    Report::done(&answer, text)
}

fn text(invocation: &Invocation, answer: &Answer) -> String {
    let row = |disk: &AnsweredDisk| {
        vec![
            format!("  {}", disk.disk),
            show_size(disk.size_bytes),
            show_size(disk.compared_bytes),
            show_size(disk.differing_bytes),
            disk.range_count.to_string(),
            disk.target.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = answer.disks.iter().map(row).collect();
    let head = ["  DISK", ">SIZE", ">READ", ">DIFFERS", ">RANGES", "TARGET"];
    let ranges: u64 = answer.disks.iter().map(|disk| disk.range_count).sum();
    let (size, table) = (show_size(answer.differing_bytes), table(&head, &rows));
    if answer.is_dry_run {
        return format!("{table}would write {size} in {}", show_count(ranges, "range"));
    }
    let undo = match &answer.safety_point {
        Some(point) => format!("to undo it: coldrise rollback {point} with the same targets\n"),
        None => String::new(),
    };
    format!(
        "rolled back to {} in {}: {size} written in {}, verified\n{table}{undo}\
         the next backup of this machine must read everything: remove dirty bitmaps from before",
        answer.address,
        show_duration(invocation.elapsed()),
        show_count(ranges, "range"),
    )
}
