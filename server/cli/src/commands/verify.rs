//! `coldrise verify`: reads and authenticates stored data, and names the disks that damage
//! affects.

use std::ops::Range;

use clap::Args;
use coldrise_block::{ErrorKind, Result};
use coldrise_requests::Verify;
use coldrise_session::{VerifyOutcome, VerifyRequest, VerifyScope};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::Report;
use crate::since::Since;
use crate::units::{show_count, show_duration, show_size};
use coldrise_hosting::signals::cancel_flag;

/// Maximum number of ranges per disk, and of damaged values, listed for people; --json
/// lists all.
const MAX_LISTED: usize = 10;

/// The advice about damage.
const ADVICE: &str = "\
what to do: all other data is intact; restore from a point that is not affected. \
coldrise repair rebuilds a damaged database, heals damaged chunks from an image or a repository that still \
has them (--from, --from-repo), and lets the next backup that reads their content heal them. Without a repair, backups \
reuse damaged chunks unchecked and heal nothing. With --quarantine it sets aside the points that stay damaged.";

/// Read and authenticate stored data, and name the disks that damage affects.
///
/// Reads chunks in storage order, each page of every chunk map once, all documents and all
/// captured blocks. Unless the options select a part, it also compares every database file with
/// its checksums. It changes nothing, and works during backups and while machines run. The exit
/// code is 1 if anything is damaged, and 3 if a running session could not be read.
#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    #[command(flatten)]
    request: Verify,

    /// Verify only recent data: stored since a time such as 20261120T100000Z, or within 36h,
    /// 7d, 2w, 3m (months) or 1y.
    ///
    /// Reads every chunk stored after the last backups before that time, the maps and captured
    /// blocks of points stored or sealed since, all sessions and all documents. It skips older
    /// chunks that new points share; earlier verifies have read those. The time a point was
    /// stored counts, as coldrise list shows it, not the time in its name.
    #[arg(long, value_name = "TIME", conflicts_with_all = ["address", "sample"])]
    #[arg(value_parser = parse_since)]
    since: Option<Since>,
}

fn parse_since(text: &str) -> std::result::Result<Since, String> {
    let since = text.parse::<Since>().map_err(|error| error.to_string())?;
    let now = jiff::Timestamp::now();
    if u128::from(since.unix_ms(now)) > u128::try_from(now.as_millisecond()).unwrap_or(0) {
        Err(format!("{text} is in the future: nothing was stored since"))
    } else {
        Ok(since)
    }
}

#[derive(Serialize)]
struct Verified {
    #[serde(flatten)]
    outcome: VerifyOutcome,
    elapsed_ms: u64,
}

/// How much of each kind is damaged.
fn damage_counts(outcome: &VerifyOutcome) -> String {
    let counts = [
        (outcome.damaged_chunks, "chunk"),
        (outcome.damaged_pages.len() as u64, "page"),
        (outcome.damaged_documents.len() as u64, "document"),
        (outcome.damaged_layers.len() as u64, "layer"),
        (outcome.damaged_markers.len() as u64, "marker"),
        (outcome.damaged_files.len() as u64, "file"),
        (outcome.affected.len() as u64, "affected disk"),
    ];
    let counted = counts.iter().filter(|(count, _)| *count > 0);
    counted.map(|(count, what)| show_count(*count, what)).collect::<Vec<_>>().join(", ")
}

pub(crate) fn run(invocation: &Invocation, arguments: &VerifyArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open_for_disks()?;
    let view = ProgressView::new(invocation);
    let progress = |part, now| view.verifying(part, now);
    let request = VerifyRequest {
        scope: arguments.scope()?,
        program: "verify",
        cancel: &cancel,
        progress: &progress,
    };
    let outcome = coldrise_session::verify(&repository, &request)?;
    drop(view);
    let mut text = text(&outcome);
    text.push_str(&format!(" ({})", show_duration(invocation.elapsed())));
    let exit_code = if !outcome.is_clean {
        coldrise_runs::exit_code(ErrorKind::Corrupt)
    } else if !outcome.unread.is_empty() {
        coldrise_runs::exit_code(ErrorKind::Incomplete)
    } else {
        0
    };
    let verified = Verified { outcome, elapsed_ms: invocation.elapsed_ms() };
    let mut report = Report::answer(&verified, text);
    report.exit_code = exit_code;
    Ok(report)
}

impl VerifyArguments {
    fn scope(&self) -> Result<VerifyScope> {
        Ok(if let Some(address) = &self.request.address {
            VerifyScope::Only(address.parse()?)
        } else if let Some(percent) = self.request.sample {
            VerifyScope::Sample(percent)
        } else if let Some(since) = &self.since {
            VerifyScope::Since(since.unix_ms(jiff::Timestamp::now()))
        } else {
            VerifyScope::Everything
        })
    }
}

fn text(verified: &VerifyOutcome) -> String {
    let mut lines = Vec::new();
    let documents = verified.damaged_documents.iter().chain(&verified.damaged_layers);
    for document in documents.chain(&verified.damaged_files).chain(&verified.damaged_markers) {
        lines.push(format!("damaged: {}", document.message()));
    }
    for page in &verified.damaged_pages {
        lines.push(format!("damaged: {}", page.reason));
    }
    for chunk in verified.chunks_described.iter().take(MAX_LISTED) {
        lines.push(format!("damaged: chunk {}: {}", chunk.id, chunk.reason));
    }
    let more = verified.damaged_chunks.saturating_sub(MAX_LISTED as u64);
    if more > 0 {
        lines.push(format!("damaged: {} more", show_count(more, "chunk")));
    }
    for disk in &verified.affected {
        let bytes = disk.ranges.iter().map(|range| range.end - range.start).sum();
        let mut ranges: Vec<_> = disk.ranges.iter().take(MAX_LISTED).map(show_range).collect();
        if disk.ranges.len() > MAX_LISTED {
            ranges.push("…".to_owned());
        }
        lines.push(format!(
            "affected: {}: {}, at {}",
            disk.disk,
            show_size(bytes),
            ranges.join(", ")
        ));
    }
    if !verified.is_clean && verified.affected.is_empty() && verified.damaged_documents.is_empty() {
        lines.push("affected: no restore point and no session".to_owned());
    }
    for unread in &verified.unread {
        lines.push(format!("not verified: {}: {}", unread.what, unread.reason));
    }
    let read = format!(
        "{} ({}), {}, {}, {}, {}",
        show_count(verified.chunks, "chunk"),
        show_size(verified.read_bytes),
        show_count(verified.pages, "page"),
        show_count(verified.layers, "layer"),
        show_count(verified.points, "restore point"),
        show_count(verified.sessions, "session"),
    );
    if !verified.is_clean {
        lines.push(ADVICE.to_owned());
    }
    lines.push(if verified.is_clean {
        format!("no damage in {read}")
    } else {
        format!("damage found: {}; read: {read}", damage_counts(verified))
    });
    lines.join("\n")
}

fn show_range(range: &Range<u64>) -> String {
    format!("{}-{}", range.start, range.end)
}
