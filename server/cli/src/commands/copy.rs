//! `coldrise copy`: restore points in another repository.

mod bucket_copy;
mod traffic;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::{ArgGroup, Args};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{Flow, RateLimit};
use coldrise_replica::{
    CopiedPoint, CopyRecords, CopyRequest, CopySummary, CopyTarget, FetchRequest, Link, Links,
    MachineCopy, RateWindows, copy,
};
use coldrise_requests::CopyOptions;
use coldrise_session::{Catalog, RepositoryAccess, SharedWriter};
use coldrise_store::{MachineName, OpenOptions, PassphraseSource, PointName, Repository};
use serde::Serialize;

use self::traffic::{Savings, savings};
use super::bucket;
use crate::invocation::{Invocation, READING_CACHE_BYTES};
use crate::progress::ProgressView;
use crate::report::{Report, table};
use crate::units::{parse_duration, show_count, show_duration, show_size};
use coldrise_hosting::signals::cancel_flag;
use coldrise_replica::{Attempts, Site, Way, copy_over as copy_over_line, paced};

/// Copy restore points to another repository, or from one, on this host or at another site.
///
/// The repository that gets them stores them in its own way: with its passphrase, chunk size and compression. A
/// copy is therefore also the way to change these. Each point appears there when it is complete. Only data that differs
/// from a point that both repositories have is read. A copy can be interrupted at any time and run again.
///
/// Copies are points like all others: they can be booted, restored and copied back. The receiving
/// repository has its own protection and retention rules; a copy never removes anything there. Points that were
/// pruned there are not copied again unless --all is given. Points in quarantine are not copied.
///
/// With --from, this repository is the receiving one, and "there" in the options below means this repository.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("place").required(true).args(["to", "from"])))]
pub(crate) struct CopyArguments {
    #[command(flatten)]
    options: CopyOptions,

    /// Copy into this repository from the directory of another one, a bucket, or the link of this name. The other site must
    /// allow it: coldrise link invite --may fetch.
    #[arg(long, value_name = "DIR|LINK|BUCKET")]
    from: Option<PathBuf>,

    /// Run this shell command and read the other repository's passphrase from its output.
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["to_passphrase_file", "from"], display_order = 51)]
    to_passphrase_command: Option<String>,

    /// As --to-passphrase-file, with --from.
    #[arg(long, value_name = "FILE", conflicts_with = "to", display_order = 52)]
    from_passphrase_file: Option<PathBuf>,

    /// As --to-passphrase-command, with --from.
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["from_passphrase_file", "to"], display_order = 53)]
    from_passphrase_command: Option<String>,

    /// Name of the machine there. Requires exactly one MACHINE.
    #[arg(long = "as", value_name = "NAME", conflicts_with = "prefix", display_order = 100)]
    rename: Option<MachineName>,

    /// Over a link: reconnect when the line breaks; give up after this long without progress. 0s: do not reconnect. The
    /// first connection is not retried. With a bucket: how long to retry a failed request.
    #[arg(long, value_name = "DURATION", value_parser = parse_retry, default_value = "10m", display_order = 101)]
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
    /// Of a copy from another repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
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

/// The traffic of the line.
#[derive(Serialize)]
struct OverLine {
    #[serde(flatten)]
    savings: Savings,
    /// By the source.
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
    fn check(&self) -> Result<()> {
        if self.rename.is_some() && self.options.machines.len() != 1 {
            let text = "--as gives one machine another name: name that machine";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(())
    }

    fn machines(&self) -> Result<Vec<MachineName>> {
        self.options.machines.iter().map(|name| MachineName::parse(name)).collect()
    }

    fn prefix(&self) -> &str {
        self.options.prefix.as_deref().unwrap_or_default()
    }

    fn windows(&self) -> Result<RateWindows> {
        let windows = self.options.window.iter().map(|window| window.parse());
        let rate = self.options.rate.as_ref().map(|rate| rate.parse()).transpose()?;
        RateWindows::new(windows.collect::<Result<_>>()?, rate)
    }

    fn last(&self) -> Option<usize> {
        self.options.last.and_then(|last| usize::try_from(last).ok())
    }

    /// The request of a copy from here, or from a directory. Without a limit.
    fn request(&self) -> Result<CopyRequest> {
        Ok(CopyRequest {
            machines: self.machines()?,
            rename: self.rename.clone(),
            prefix: self.prefix().to_owned(),
            is_all: self.options.all,
            last: self.last(),
            ..CopyRequest::default()
        })
    }

    /// The request to another site.
    fn fetch_request(&self) -> Result<FetchRequest> {
        Ok(FetchRequest {
            machines: self.machines()?,
            rename: self.rename.clone(),
            is_all: self.options.all,
            last: self.last(),
            rate_bytes_per_second: None,
        })
    }

    fn passphrase(&self, invocation: &Invocation) -> Result<PassphraseSource> {
        let file = self.options.to_passphrase_file.as_ref().or(self.from_passphrase_file.as_ref());
        let command = self.to_passphrase_command.as_ref().or(self.from_passphrase_command.as_ref());
        match (file, command) {
            (Some(path), _) => Ok(PassphraseSource::File(path.clone())),
            (None, Some(command)) => Ok(PassphraseSource::Command(command.clone())),
            (None, None) => invocation.passphrase(),
        }
    }

    fn has_passphrase(&self) -> bool {
        self.options.to_passphrase_file.is_some()
            || self.from_passphrase_file.is_some()
            || self.to_passphrase_command.is_some()
            || self.from_passphrase_command.is_some()
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: CopyArguments) -> Result<Report> {
    arguments.check()?;
    let cancel = cancel_flag()?;
    let windows = arguments.windows()?;
    let here = invocation.open_for_disks()?;
    let links = Links::of(&here);
    // One of them is there.
    let place =
        arguments.options.to.iter().chain(&arguments.from).next().cloned().unwrap_or_default();
    if let Some(url) = bucket::url_of(&place) {
        let target = CopyTarget::Bucket(url.clone());
        let done = bucket_copy::run(invocation, &here, &url, &windows, &arguments, &cancel);
        return recorded(&here, &target, &arguments, done);
    }
    let (target, done) = match link_of(&links, &place)? {
        Some(link) => (
            CopyTarget::Link(link.name.clone()),
            copy_over(invocation, &here, &links, &link, &windows, &arguments, &cancel),
        ),
        None => (
            CopyTarget::directory(&place),
            copy_here(invocation, &here, &place, &windows, &arguments, &cancel),
        ),
    };
    recorded(&here, &target, &arguments, done)
}

/// Records the failure of a copy from here.
fn recorded(
    here: &Arc<Repository>,
    target: &CopyTarget,
    arguments: &CopyArguments,
    done: Result<Report>,
) -> Result<Report> {
    done.inspect_err(|error| {
        if arguments.options.to.is_some() {
            record(here, target, &arguments.machines().unwrap_or_default(), error);
        }
    })
}

/// Records why nothing was copied. Mistakes of the caller and cancelled copies are not failures of the target.
fn record(source: &Arc<Repository>, target: &CopyTarget, machines: &[MachineName], error: &Error) {
    let ignored = [ErrorKind::Interrupted, ErrorKind::InvalidInput, ErrorKind::NotFound];
    if ignored.contains(&error.kind()) {
        return;
    }
    // Not those of a mistyped name.
    let known = Catalog::new(source).machines().unwrap_or_default();
    let machines: Vec<_> = machines.iter().filter(|name| known.contains(name)).cloned().collect();
    if let Err(unwritten) = CopyRecords::of(source).failed(target, &machines, error) {
        tracing::warn!("the failure cannot be recorded: {}", unwritten.full_message());
    }
}

/// The link of that name, if there is one.
fn link_of(links: &Links, place: &Path) -> Result<Option<Link>> {
    let Some(name) = place.to_str().and_then(|name| MachineName::parse(name).ok()) else {
        return Ok(None);
    };
    match links.find(&name) {
        Err(error) if error.kind() == ErrorKind::NotFound && place.exists() => Ok(None),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let text = format!("{}, and no directory of this name", error.full_message());
            Err(Error::new(ErrorKind::NotFound, text)
                .advise("coldrise link list shows the links, and coldrise link add makes one"))
        }
        found => found.map(Some),
    }
}

fn copy_here(
    invocation: &Invocation,
    here: &Arc<Repository>,
    place: &Path,
    windows: &RateWindows,
    arguments: &CopyArguments,
    cancel: &AtomicBool,
) -> Result<Report> {
    let there = |error: Error| error.context(place.display());
    let passphrase = arguments.passphrase(invocation)?;
    let is_from = arguments.from.is_some();
    let (source, to, passphrase) = match is_from {
        true => {
            let options = OpenOptions { cache_bytes: READING_CACHE_BYTES };
            let source = Repository::open(place, &passphrase, &options).map_err(there)?;
            (source, invocation.repository_path()?, invocation.passphrase()?)
        }
        false => (Arc::clone(here), place, passphrase),
    };
    let access = RepositoryAccess::new(to, passphrase);
    let far = SharedWriter::join(&access, cancel);
    let far = if is_from { far? } else { far.map_err(there)? };
    let limit = Arc::new(RateLimit::new(Flow::Stopped));
    let target = (!is_from).then(|| (Arc::clone(here), CopyTarget::directory(place)));
    let limited = Some(Arc::clone(&limit));
    let request = CopyRequest { limit: limited, target, ..arguments.request()? };
    let view = ProgressView::new(invocation);
    let copied = paced(windows, &limit, || copy(&source, &far, &request, &view, cancel));
    drop(view);
    let summary = with_advice(copied, to)?;
    Ok(report(invocation, arguments, &summary, None))
}

fn copy_over(
    invocation: &Invocation,
    here: &Arc<Repository>,
    links: &Links,
    link: &Link,
    windows: &RateWindows,
    arguments: &CopyArguments,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    if arguments.has_passphrase() {
        let text = "the other site opens its repository itself: leave the passphrase out";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let Some(address) = &link.address else {
        let text = format!("site {} dials this one: it cannot be dialled", link.name);
        let advice = match arguments.from.is_some() {
            true => {
                "copy from there: coldrise copy --to, at that site; or add a link in the other direction, under another name"
            }
            false => "add a second link in the other direction, under another name",
        };
        return Err(Error::new(ErrorKind::InvalidInput, text).advise(advice));
    };
    let site = Site {
        address,
        identity: links.identity()?,
        peer: link.peer()?,
        patience: arguments.retry,
        windows,
    };
    let target = Some((Arc::clone(here), CopyTarget::Link(link.name.clone())));
    let request = CopyRequest { target, ..arguments.request()? };
    let wish = arguments.fetch_request()?;
    let way = match arguments.from.is_some() {
        false => Way::To { source: here, request: &request },
        true => {
            Way::From { access: invocation.access()?, request: &wish, prefix: arguments.prefix() }
        }
    };
    let view = ProgressView::new(invocation);
    let Attempts { copied, mut traffic, statistics } = copy_over_line(&site, &way, &view, cancel)?;
    drop(view);
    let mut received_bytes = statistics.received_bytes;
    if arguments.from.is_some() {
        // As the source counts.
        (traffic.sent_bytes, received_bytes) = (statistics.received_bytes, statistics.sent_bytes);
    }
    let line = OverLine {
        savings: Savings::of(&traffic),
        received_bytes,
        congestion_control: statistics.congestion_control,
        connections: statistics.connections,
    };
    let summary = with_advice(
        copied,
        arguments.options.to.as_deref().unwrap_or(invocation.repository_path()?),
    )?;
    Ok(report(invocation, arguments, &summary, Some(line)))
}

fn with_advice(copied: Result<CopySummary>, path: &Path) -> Result<CopySummary> {
    copied.map_err(|error| match error.kind() {
        ErrorKind::Interrupted => Error::new(
            ErrorKind::Interrupted,
            "cancelled: complete points stay; run it again to continue",
        ),
        ErrorKind::NoSpace => error.context(path.display()),
        _ => error,
    })
}

fn report(
    invocation: &Invocation,
    arguments: &CopyArguments,
    summary: &CopySummary,
    line: Option<OverLine>,
) -> Report {
    let machine = |copy| CopiedMachine::new(copy, line.is_some());
    let machines: Vec<_> = summary.machines.iter().map(machine).collect();
    let points = || machines.iter().flat_map(|machine| &machine.points);
    let shown = |path: &Path| path.display().to_string();
    let own = || invocation.repository_path().map(shown).unwrap_or_default();
    let copied = Copied {
        to: arguments.options.to.as_deref().map_or_else(own, shown),
        from: arguments.from.as_deref().map(shown),
        points: points().count() as u64,
        size_bytes: points().map(|point| point.size_bytes).sum(),
        read_bytes: points().map(|point| point.read_bytes).sum(),
        stored_bytes: points().map(|point| point.stored_bytes).sum(),
        elapsed_ms: invocation.elapsed_ms(),
        line,
        machines,
    };
    let mut report = Report::done(&copied, text(invocation, &copied, arguments.options.last));
    if copied.machines.iter().any(|machine| machine.error.is_some()) {
        report.exit_code = coldrise_runs::exit_code(ErrorKind::Incomplete);
    }
    report
}

fn text(invocation: &Invocation, copied: &Copied, last: Option<u32>) -> String {
    if copied.machines.is_empty() {
        let text = match copied.from {
            None => "no restore points yet: make one with coldrise backup",
            Some(_) => "no restore points there that may be copied",
        };
        return text.to_owned();
    }
    let place = match &copied.from {
        None => format!("to {}", copied.to),
        Some(from) => format!("from {from}"),
    };
    let rows: Vec<_> = copied.machines.iter().map(CopiedMachine::row).collect();
    let mut text = format!(
        "copied {} {place} in {}\n{}",
        show_count(copied.points, "restore point"),
        show_duration(invocation.elapsed()),
        table(&["MACHINE", ">COPIED", ">ALREADY THERE", ">SIZE", ">READ", ">STORED"], &rows)
    );
    if let Some(line) = &copied.line {
        text.push_str(&format!(
            "\n{} ({}, {})",
            savings(&line.savings, copied.from.is_some()),
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
        let reason = match last {
            None => {
                "missing there but older than the newest point there, so not copied: --all copies them"
            }
            Some(_) => "missing there and not copied, because of --last",
        };
        say(machine.passed_over.len(), reason);
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
