//! `coldrise runs` on another host.

use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_requests::refuse;
use coldrise_runs::{LogLine, RunId, RunRecord, State};
use serde::{Deserialize, Serialize};

use super::client::{Client, INTERVAL};
use crate::commands::runs::{
    Action, MAX_LINES, MAX_LISTED, RunsArguments, record_report, table_of,
};
use crate::report::Report;
use crate::units::show_duration;

/// Number of ended runs that the service lists at most.
const MOST: usize = 1000;

#[derive(Serialize, Deserialize)]
struct Listing {
    runs: Vec<RunRecord>,
    /// Whether there may be older ones.
    has_more: bool,
}

#[derive(Deserialize)]
struct LogPiece {
    lines: Vec<LogLine>,
    next: u64,
}

pub(super) fn run(client: &Client, arguments: &RunsArguments) -> Result<Report> {
    match &arguments.action {
        None => list(client, if arguments.all { MOST } else { MAX_LISTED }),
        Some(Action::Show { follow: true, .. }) => Err(refuse("runs show --follow")),
        Some(Action::Show { id, .. }) => {
            let record: RunRecord = client.get(&format!("runs/{id}"))?;
            Ok(record_report(&record, Some(&last_lines(client, id)?)))
        }
        Some(Action::Cancel { id, wait }) => cancel(client, id, Duration::from_secs(*wait)),
    }
}

fn list(client: &Client, count: usize) -> Result<Report> {
    let listing: Listing = client.get(&format!("runs?count={count}"))?;
    let mut text = match listing.runs.len() {
        0 => "no runs\n".to_owned(),
        _ => table_of(&listing.runs),
    };
    if listing.has_more {
        text.push_str("there are older runs: coldrise runs --all\n");
    }
    Ok(Report::answer(&listing, text))
}

/// The last lines of the log. It is read whole: at most 16 MiB.
fn last_lines(client: &Client, id: &RunId) -> Result<Vec<LogLine>> {
    let (mut lines, mut offset) = (Vec::new(), 0);
    loop {
        let piece: LogPiece = client.get(&format!("runs/{id}/log?offset={offset}"))?;
        if piece.lines.is_empty() || piece.next <= offset {
            return Ok(lines);
        }
        offset = piece.next;
        lines.extend(piece.lines);
        lines.drain(..lines.len().saturating_sub(MAX_LINES));
    }
}

fn cancel(client: &Client, id: &RunId, patience: Duration) -> Result<Report> {
    client.cancel(id)?;
    let until = Instant::now() + patience;
    loop {
        let record: RunRecord = client.get(&format!("runs/{id}"))?;
        if record.state != State::Running {
            let text = format!("run {id} has ended: {}", record.state.word());
            return Ok(Report::done(&record, text));
        }
        if Instant::now() >= until {
            let waited = show_duration(patience);
            let text = format!("run {id} is cancelled, but has not ended after {waited}");
            return Err(Error::new(ErrorKind::Incomplete, text)
                .advise(format!("wait longer: coldrise runs cancel {id}")));
        }
        std::thread::sleep(INTERVAL);
    }
}
