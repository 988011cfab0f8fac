//! `coldrise copy`: restore points in another repository.

mod attempts;
mod traffic;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::Rate;
use coldrise_line::LineOptions;
use coldrise_replica::{
    copy, CopiedPoint, CopyRecords, CopyRequest, CopySummary, CopyTarget, Link, Links, MachineCopy,
};
use coldrise_session::{Openers, SharedWriter};
use coldrise_store::{MachineName, OpenOptions, PassphraseSource, PointName, Repository};
use serde::Serialize;

use self::attempts::{Attempts, Site};
use self::traffic::{savings, Savings};
use super::backup::parse_rate;
use crate::invocation::{open_for_writing, Invocation};
use crate::progress::ProgressView;
use crate::report::{table, Report};
use crate::signals::cancel_flag;
use crate::units::{parse_duration, show_count, show_duration, show_size};

/// Copy restore points to another repository, on this host or at another site.
///
/// The other repository stores them in its own way: with its passphrase, chunk size and compression. So
/// this is also how these are changed. Each point appears there when it is complete; what differs from a
/// point that both have is all that is read. A copy can be interrupted at any time and run again.
///
/// Copies are points like all others: they can be booted, restored and copied back. Protection and the
/// rules of retention are the other repository's own, and nothing is ever removed there. What was pruned
/// there is not copied again, unless --all is given. Points in quarantine are not copied.
#[derive(Debug, Args)]
pub(crate) struct CopyArguments {
    /// Copy only these machines. Default: all machines.
    #[arg(value_name = "MACHINE")]
    machines: Vec<MachineName>,

    /// The directory of the other repository, made with coldrise init; or the name of a link to another site,
    /// see coldrise link. A directory whose name is also a link's: ./NAME.
    #[arg(long, value_name = "DIR|LINK")]
    to: PathBuf,

    /// Read the other repository's passphrase from FILE. Default: the passphrase of this repository.
    #[arg(long, value_name = "FILE")]
    to_passphrase_file: Option<PathBuf>,

    /// Run this shell command and read the other repository's passphrase from its output.
    #[arg(long, value_name = "COMMAND", conflicts_with = "to_passphrase_file")]
    to_passphrase_command: Option<String>,

    /// Let the names of the machines begin with this there, such as site-b-.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    prefix: String,

    /// Give the machine this name there. Only with one MACHINE.
    #[arg(long = "as", value_name = "NAME", conflicts_with = "prefix")]
    rename: Option<MachineName>,

    /// Of the points that are missing there, copy only the newest N of each machine.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    last: Option<u32>,

    /// Copy all points that are missing there, also those that are older than the youngest one that is there.
    #[arg(long)]
    all: bool,

    /// Read at most this many bytes per second, such as 20M. Over a link: send at most so many.
    #[arg(long, value_name = "BYTES", value_parser = parse_rate)]
    rate: Option<Rate>,

    /// Over a link: when the line breaks, connect again and go on, until nothing more was sent for so long. 0s: never.
    #[arg(long, value_name = "DURATION", value_parser = parse_retry, default_value = "10m")]
    retry: Duration,
}

fn parse_retry(text: &str) -> Result<Duration> {
    match text {
        "0s" => Ok(Duration::ZERO),
        _ => parse_duration(text),
    }
}

#[derive(Serialize)]
struct Copied {
    to: String,
    machines: Vec<CopiedMachine>,
    /// The sums over all machines.
    points: u64,
    size_bytes: u64,
    read_bytes: u64,
    stored_bytes: u64,
    elapsed_ms: u64,
    /// Over a link.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<OverLine>,
}

/// What went over the line.
#[derive(Serialize)]
struct OverLine {
    #[serde(flatten)]
    savings: Savings,
    received_bytes: u64,
    congestion_control: String,
    connections: usize,
}

#[derive(Serialize)]
struct CopiedMachine {
    machine: String,
    /// Its name there.
    to_machine: String,
    points: Vec<PointCopy>,
    /// Points that were there before.
    already_there: usize,
    passed_over: Vec<String>,
    quarantined: Vec<String>,
    /// Over a link.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<Savings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Failure>,
}

#[derive(Serialize)]
struct PointCopy {
    point: String,
    base: Option<String>,
    size_bytes: u64,
    read_bytes: u64,
    stored_bytes: u64,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct Failure {
    kind: &'static str,
    message: String,
}

impl CopiedMachine {
    fn new(copy: &MachineCopy, is_over_line: bool) -> CopiedMachine {
        let names = |points: &[PointName]| points.iter().map(ToString::to_string).collect();
        let failure =
            |error: &Error| Failure { kind: error.kind().word(), message: error.full_message() };
        CopiedMachine {
            machine: copy.machine.to_string(),
            to_machine: copy.far_machine.to_string(),
            points: copy.copied.iter().map(PointCopy::new).collect(),
            already_there: copy.there,
            passed_over: names(&copy.passed_over),
            quarantined: names(&copy.quarantined),
            line: is_over_line.then(|| Savings::of(&copy.traffic)),
            error: copy.error.as_ref().map(failure),
        }
    }

    fn row(&self) -> Vec<String> {
        let sum = |of: fn(&PointCopy) -> u64| show_size(self.points.iter().map(of).sum());
        let name = match self.machine == self.to_machine {
            true => self.machine.clone(),
            false => format!("{} as {}", self.machine, self.to_machine),
        };
        vec![
            name,
            self.points.len().to_string(),
            self.already_there.to_string(),
            sum(|point| point.size_bytes),
            sum(|point| point.read_bytes),
            sum(|point| point.stored_bytes),
        ]
    }
}

impl PointCopy {
    fn new(copied: &CopiedPoint) -> PointCopy {
        PointCopy {
            point: copied.point.to_string(),
            base: copied.base.as_ref().map(ToString::to_string),
            size_bytes: copied.size_bytes,
            read_bytes: copied.read_bytes,
            stored_bytes: copied.stored_bytes,
            elapsed_ms: copied.elapsed_ms,
        }
    }
}

impl CopyArguments {
    fn request(self) -> Result<CopyRequest> {
        if self.rename.is_some() && self.machines.len() != 1 {
            let text = "--as gives one machine another name: name that machine";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(CopyRequest {
            machines: self.machines,
            rename: self.rename,
            prefix: self.prefix,
            is_all: self.all,
            last: self.last.and_then(|last| usize::try_from(last).ok()),
            rate: self.rate,
            target: None,
        })
    }

    fn passphrase(&self, invocation: &Invocation) -> Result<PassphraseSource> {
        if let Some(path) = &self.to_passphrase_file {
            return Ok(PassphraseSource::File(path.clone()));
        }
        match &self.to_passphrase_command {
            Some(command) => Ok(PassphraseSource::Command(command.clone())),
            None => invocation.passphrase(),
        }
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: CopyArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let source = invocation.open_for_disks()?;
    let links = Links::of(&source);
    let path = arguments.to.clone();
    let (target, done) = match link_of(&links, &path)? {
        Some(link) => (
            CopyTarget::Link(link.name.clone()),
            copy_over(invocation, &source, &links, &link, arguments, &cancel),
        ),
        None => (
            CopyTarget::directory(&path),
            copy_here(invocation, &source, &path, arguments, &cancel),
        ),
    };
    done.inspect_err(|error| record(&source, &target, error))
}

/// Records why nothing was copied. Mistakes of the caller and cancelled copies are no failures of the target.
fn record(source: &Arc<Repository>, target: &CopyTarget, error: &Error) {
    let ignored = [ErrorKind::Interrupted, ErrorKind::InvalidInput, ErrorKind::NotFound];
    if ignored.contains(&error.kind()) {
        return;
    }
    if let Err(unwritten) = CopyRecords::of(source).failed(target, error) {
        tracing::warn!("the failure cannot be recorded: {}", unwritten.full_message());
    }
}

/// The link of that name, if there is one.
fn link_of(links: &Links, to: &Path) -> Result<Option<Link>> {
    let Some(name) = to.to_str().and_then(|name| MachineName::parse(name).ok()) else {
        return Ok(None);
    };
    Ok(links.all()?.into_iter().find(|link| link.name == name))
}

fn copy_here(
    invocation: &Invocation,
    source: &Arc<Repository>,
    path: &Path,
    arguments: CopyArguments,
    cancel: &AtomicBool,
) -> Result<Report> {
    let passphrase = arguments.passphrase(invocation)?;
    let target = Some(CopyTarget::directory(path));
    let request = CopyRequest { target, ..arguments.request()? };
    let there = |error: Error| error.context(path.display());
    let reader = || Repository::open(path, &passphrase, &OpenOptions { cache_bytes: 0 });
    let openers = Openers { writer: &|| open_for_writing(path, &passphrase), reader: &reader };
    let far = SharedWriter::join(path, openers, cancel).map_err(there)?;
    let view = ProgressView::new(invocation);
    let copied = copy(source, &far, &request, &view, cancel);
    drop(view);
    let summary = told(copied, path)?;
    Ok(report(invocation, path, &summary, None))
}

fn copy_over(
    invocation: &Invocation,
    source: &Arc<Repository>,
    links: &Links,
    link: &Link,
    arguments: CopyArguments,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    if arguments.to_passphrase_file.is_some() || arguments.to_passphrase_command.is_some() {
        let text = "the other site opens its repository itself: leave the passphrase out";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let Some(address) = &link.address else {
        let text = format!("site {} copies to this one: nothing can be sent there", link.name);
        return Err(Error::new(ErrorKind::InvalidInput, text)
            .advise("pair the other way round, too, under another name"));
    };
    let (path, patience) = (arguments.to.clone(), arguments.retry);
    let target = Some(CopyTarget::Link(link.name.clone()));
    let mut request = CopyRequest { target, ..arguments.request()? };
    let rate = request.rate.take().map(|rate| rate.bytes_per_second());
    let options = LineOptions { rate_bytes_per_second: rate, ..LineOptions::default() };
    let site = Site { address, identity: links.identity()?, peer: link.peer()?, options, patience };
    let view = ProgressView::new(invocation);
    let Attempts { copied, traffic, statistics } =
        attempts::copy_to(&site, source, &request, &view, cancel)?;
    drop(view);
    let line = OverLine {
        savings: Savings::of(&traffic),
        received_bytes: statistics.received_bytes,
        congestion_control: statistics.congestion_control,
        connections: statistics.connections,
    };
    let summary = told(copied, &path)?;
    Ok(report(invocation, &path, &summary, Some(line)))
}

fn told(copied: Result<CopySummary>, path: &Path) -> Result<CopySummary> {
    copied.map_err(|error| match error.kind() {
        ErrorKind::Interrupted => Error::new(
            ErrorKind::Interrupted,
            "cancelled: the points that are complete stay; run it again to continue",
        ),
        ErrorKind::NoSpace => error.context(path.display()),
        _ => error,
    })
}

fn report(
    invocation: &Invocation,
    path: &Path,
    summary: &CopySummary,
    line: Option<OverLine>,
) -> Report {
    let machine = |copy| CopiedMachine::new(copy, line.is_some());
    let machines: Vec<_> = summary.machines.iter().map(machine).collect();
    let points = || machines.iter().flat_map(|machine| &machine.points);
    let copied = Copied {
        to: path.display().to_string(),
        points: points().count() as u64,
        size_bytes: points().map(|point| point.size_bytes).sum(),
        read_bytes: points().map(|point| point.read_bytes).sum(),
        stored_bytes: points().map(|point| point.stored_bytes).sum(),
        elapsed_ms: invocation.elapsed_ms(),
        line,
        machines,
    };
    let mut report = Report::done(&copied, text(invocation, &copied));
    if copied.machines.iter().any(|machine| machine.error.is_some()) {
        report.exit_code = ErrorKind::Incomplete.exit_code();
    }
    report
}

fn text(invocation: &Invocation, copied: &Copied) -> String {
    if copied.machines.is_empty() {
        return "no restore points yet: make one with coldrise backup".to_owned();
    }
    let rows: Vec<_> = copied.machines.iter().map(CopiedMachine::row).collect();
    let mut text = format!(
        "copied {} to {} in {}\n{}",
        show_count(copied.points, "restore point"),
        copied.to,
        show_duration(invocation.elapsed()),
        table(&["MACHINE", ">COPIED", ">ALREADY THERE", ">SIZE", ">READ", ">STORED"], &rows)
    );
    if let Some(line) = &copied.line {
        text.push_str(&format!(
            "\n{} ({}, {})",
            savings(&line.savings),
            line.congestion_control,
            show_count(line.connections as u64, "connection")
        ));
    }
    for machine in &copied.machines {
        let mut say = |count: usize, what: &str| {
            if count > 0 {
                let points = show_count(count as u64, "point");
                text.push_str(&format!("\n{}: {points} {what}", machine.machine));
            }
        };
        say(
            machine.passed_over.len(),
            "not there and not copied, because younger ones are there: --all copies them",
        );
        say(machine.quarantined.len(), "in quarantine not copied");
        if let Some(error) = &machine.error {
            text.push_str(&format!(
                "\n{}: not copied completely: {}",
                machine.machine, error.message
            ));
        }
    }
    text
}
