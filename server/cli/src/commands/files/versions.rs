//! `coldrise files versions`: the versions of a file over the points of a machine.

use std::sync::Arc;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_files::{History, HistoryAddress, State, Version, path_hex, shown};
use coldrise_session::Catalog;
use coldrise_store::{PointDocument, Repository};
use serde::Serialize;

use super::KeyOptions;
use super::entries::moment;
use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::since::Since;
use coldrise_hosting::files_machine::read_points;
use coldrise_hosting::signals::ChildSignals;

/// Find the versions of a file over the points of a machine.
///
/// Looks at every point, the newest first, and prints each version with the points that have it. A version
/// is a length and a time of the last change; a file that has changed back shows twice. Of a folder the
/// time changes when files are added or removed.
#[derive(Debug, Args)]
pub(crate) struct VersionsArguments {
    /// MACHINE:[FILE-SYSTEM]/PATH.
    #[arg(value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(history_address))]
    address: HistoryAddress,

    /// Only points from this time on: 20261120T100000Z (UTC), or an age such as 7d.
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,

    /// Only this many of the newest points.
    #[arg(long, value_name = "NUMBER", default_value_t = 1000)]
    points: usize,

    #[command(flatten)]
    key: KeyOptions,
}

fn history_address(text: std::ffi::OsString) -> std::result::Result<HistoryAddress, Error> {
    HistoryAddress::parse(&text)
}

#[derive(Serialize)]
struct Found {
    machine: String,
    path: String,
    path_hex: Option<String>,
    versions: Vec<FoundVersion>,
    points: u64,
    /// Points that could not be read.
    unread: u64,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct FoundVersion {
    /// `present`, `absent` or `unread`.
    state: &'static str,
    kind: Option<&'static str>,
    size_bytes: Option<u64>,
    modified: Option<String>,
    /// Why the points could not be read.
    reason: Option<String>,
    first_point: String,
    last_point: String,
    points: u64,
}

impl FoundVersion {
    fn new(version: &Version) -> FoundVersion {
        let mut found = FoundVersion {
            state: "absent",
            kind: None,
            size_bytes: None,
            modified: None,
            reason: None,
            first_point: version.first.to_string(),
            last_point: version.last.to_string(),
            points: version.points,
        };
        match &version.state {
            State::Absent => {}
            State::Unread(reason) => {
                found.state = "unread";
                found.reason = Some(reason.clone());
            }
            State::Present { kind, size_bytes, modified } => {
                found.state = "present";
                found.kind = Some(kind.word());
                found.size_bytes = Some(*size_bytes);
                found.modified = Some(moment(modified.0));
            }
        }
        found
    }

    fn line(&self) -> String {
        let points = match self.points {
            1 => self.last_point.clone(),
            count => format!("{} .. {} ({count} points)", self.first_point, self.last_point),
        };
        let size = self.size_bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let state = match (&self.modified, &self.reason) {
            (Some(modified), _) => modified,
            (None, Some(reason)) => return format!("{points}: not read: {reason}"),
            (None, None) => "is not there",
        };
        format!("{size:>14}  {state:<20}  {points}")
    }
}

/// Prints versions as they are found.
struct Output<'a> {
    invocation: &'a Invocation,
    history: History,
    versions: Vec<FoundVersion>,
    points: u64,
    unread: u64,
}

impl Output<'_> {
    fn add(&mut self, point: &PointDocument, state: State) {
        self.points += 1;
        self.unread += u64::from(matches!(state, State::Unread(_)));
        let complete = self.history.add(&point.point, state);
        self.push(complete);
    }

    fn push(&mut self, version: Option<Version>) {
        let Some(version) = version else { return };
        let found = FoundVersion::new(&version);
        if !self.invocation.is_json() {
            if self.versions.is_empty() {
                print_line(&format!("{:>14}  {:<20}  POINTS", "BYTES", "MODIFIED"));
            }
            print_line(&found.line());
        }
        self.versions.push(found);
    }
}

pub(super) fn run(invocation: &Invocation, arguments: &VersionsArguments) -> Result<Report> {
    let mut signals = ChildSignals::catch()?;
    let repository = &invocation.open()?;
    let address = &arguments.address.inside;
    let key = arguments.key.read()?;
    let points = points(repository, arguments)?;
    let history = History::default();
    let mut output = Output { invocation, history, versions: Vec::new(), points: 0, unread: 0 };
    let caller = invocation.caller()?;
    read_points(caller, repository, points, (address, &key), &mut signals, &mut |point, state| {
        output.add(point, state);
    })?;
    let last = std::mem::take(&mut output.history).finish();
    output.push(last);
    let path = address.path.as_deref().unwrap_or_default();
    let found = Found {
        machine: arguments.address.machine.to_string(),
        path: shown(path),
        path_hex: path_hex(path),
        points: output.points,
        unread: output.unread,
        versions: output.versions,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let mut report = match invocation.is_json() {
        true => Report::answer(&found, ""),
        false => Report::silent(),
    };
    report.exit_code = u8::from(found.unread > 0);
    Ok(report)
}

/// The points to look at, the newest first.
fn points(
    repository: &Arc<Repository>,
    arguments: &VersionsArguments,
) -> Result<Vec<PointDocument>> {
    let machine = &arguments.address.machine;
    let since = arguments.since.as_ref().map(|since| since.unix_ms(jiff::Timestamp::now()));
    let mut points = Catalog::new(repository).points(machine)?;
    if points.is_empty() {
        let text = format!("there is no machine {machine}, or it has no points");
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    points.retain(|point| {
        let at_ms = point.point.unix_seconds().saturating_mul(1000);
        since.is_none_or(|since| at_ms >= since)
    });
    points.reverse();
    points.truncate(arguments.points);
    match points.is_empty() {
        true => Err(Error::new(ErrorKind::NotFound, format!("{machine} has no points since then"))),
        false => Ok(points),
    }
}
