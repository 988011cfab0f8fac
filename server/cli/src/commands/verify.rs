//! `coldrise verify`: reads and authenticates stored data, and names the disks that damage
//! affects.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::{Catalog, Held, Inventory, LayerReport, Recent};
use coldrise_store::{
    Address, Affected, CatalogDamage, Coverage, Damaged, DiskName, Repository, VerifyOptions,
    VerifyReport,
};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::progress::{ProgressView, VerifyView};
use crate::report::Report;
use crate::signals::cancel_flag;
use crate::since::Since;
use crate::units::{show_count, show_duration, show_size};

/// Ranges of one disk, and damaged values, that are listed for people; --json has
/// them all.
const MAX_LISTED: usize = 10;
/// The program's name in leases, for people.
const PROGRAM: &str = "verify";

/// What to do about damage.
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
/// code is 1 if anything is damaged.
#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    /// Verify only this address: MACHINE/POINT or live/SESSION, with or without /DISK.
    #[arg(value_name = "ADDRESS")]
    address: Option<Address>,

    /// Read only about this percentage of the chunks, chosen at random, but at least a few.
    ///
    /// Captured blocks, chunk maps and documents are read completely.
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    #[arg(conflicts_with = "address")]
    sample: Option<f64>,

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

/// `5` or `5%` or `0.5`.
fn parse_percent(text: &str) -> std::result::Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).parse::<f64>();
    number
        .ok()
        .filter(|percent| *percent > 0.0 && *percent <= 100.0)
        .ok_or_else(|| "a percentage above 0 and up to 100, for example 5%".to_owned())
}

fn parse_since(text: &str) -> std::result::Result<Since, String> {
    let since = text.parse::<Since>().map_err(|error| error.to_string())?;
    let now = jiff::Timestamp::now();
    match u128::from(since.unix_ms(now)) > u128::try_from(now.as_millisecond()).unwrap_or(0) {
        true => Err(format!("{text} is in the future: nothing was stored since")),
        false => Ok(since),
    }
}

#[derive(Serialize)]
struct Verified {
    points: u64,
    sessions: u64,
    chunks: u64,
    pages: u64,
    layers: u64,
    read_bytes: u64,
    damaged_chunks: u64,
    /// The first of them.
    chunks_described: Vec<Damaged>,
    damaged_pages: Vec<Damaged>,
    damaged_documents: Vec<CatalogDamage>,
    damaged_layers: Vec<CatalogDamage>,
    damaged_markers: Vec<CatalogDamage>,
    /// Of the database, those of chunks left out.
    damaged_files: Vec<CatalogDamage>,
    affected: Vec<Affected>,
    is_clean: bool,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &VerifyArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open_for_disks()?;
    let ((inventory, _held), coverage) = match &arguments.address {
        Some(address) => (only(&repository, address)?, Coverage::Referenced),
        None => {
            let coverage = arguments.sample.map_or(Coverage::Everything, Coverage::Sample);
            (Held::everything(&repository, PROGRAM, &cancel)?, coverage)
        }
    };
    let view = ProgressView::new(invocation);
    let found = look(&repository, inventory, coverage, arguments, &cancel, &view)?;
    drop(view);
    let Found { inventory, mut chunks, layers, damaged_files } = found;

    let mut affected = std::mem::take(&mut chunks.affected);
    affected.extend(layers.affected);
    let is_clean = chunks.is_clean()
        && affected.is_empty()
        && inventory.damaged.is_empty()
        && inventory.damaged_markers.is_empty()
        && layers.damaged.is_empty()
        && damaged_files.is_empty();
    let verified = Verified {
        points: inventory.points.len() as u64,
        sessions: inventory.sessions.len() as u64,
        chunks: chunks.chunks,
        pages: chunks.pages,
        layers: layers.layers,
        read_bytes: chunks.read_bytes + layers.read_bytes,
        damaged_chunks: chunks.damaged_chunk_count,
        chunks_described: chunks.damaged_chunks,
        damaged_pages: chunks.damaged_pages,
        damaged_documents: inventory.damaged,
        damaged_layers: layers.damaged,
        damaged_markers: inventory.damaged_markers,
        damaged_files,
        affected: joined(affected),
        is_clean,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let mut text = text(&verified);
    text.push_str(&format!(" ({})", show_duration(invocation.elapsed())));
    let mut report = Report::answer(&verified, text);
    if !is_clean {
        report.exit_code = ErrorKind::Corrupt.exit_code();
    }
    Ok(report)
}

/// The verified data and its damage.
struct Found {
    inventory: Inventory,
    chunks: VerifyReport,
    layers: LayerReport,
    damaged_files: Vec<CatalogDamage>,
}

fn look(
    repository: &Arc<Repository>,
    inventory: Inventory,
    coverage: Coverage,
    arguments: &VerifyArguments,
    cancel: &AtomicBool,
    view: &ProgressView,
) -> Result<Found> {
    let is_whole =
        arguments.address.is_none() && arguments.sample.is_none() && arguments.since.is_none();
    // The thread is joined whatever fails: a process that exits while one is in the database
    // crashes.
    std::thread::scope(|scope| {
        // Beside the chunks: opening the list of the files takes as long as a hundred of those.
        let files = is_whole.then(|| scope.spawn(|| repository.damaged_files(cancel)));
        let read = || {
            let mut inventory = inventory;
            let recent = arguments.since.as_ref().map(|since| {
                let since_ms = since.unix_ms(jiff::Timestamp::now());
                Recent::new(std::mem::take(&mut inventory), since_ms)
            });
            let wanted = recent.as_ref().map_or(&inventory, |recent| &recent.inventory);
            let view = VerifyView::new(view, wanted.captured_bytes(repository));
            let progress = |now| view.chunks(now);
            let options = VerifyOptions { coverage, threads: 0, cancel, progress: &progress };
            let chunks = match &recent {
                Some(recent) => repository.verify_recent(&recent.disks(), &options)?,
                None => repository.verify(&inventory.disks(), &options)?,
            };
            let progress = |now| view.captured(now);
            let options = VerifyOptions { progress: &progress, ..options };
            let layers = wanted.verify_layers(repository, &options)?;
            let inventory = recent.map_or(inventory, |recent| recent.inventory);
            Ok((inventory, chunks, layers))
        };
        let (inventory, chunks, layers) =
            read().inspect_err(|_| cancel.store(true, Ordering::Relaxed))?;
        let panicked =
            |_| Error::new(ErrorKind::Internal, "the thread that looks at files panicked");
        let damaged_files = match files {
            Some(files) => files.join().map_err(panicked)??,
            None => Vec::new(),
        };
        Ok(Found { inventory, chunks, layers, damaged_files })
    })
}

/// What one address needs, and what keeps it.
fn only(repository: &Arc<Repository>, address: &Address) -> Result<(Inventory, Held)> {
    let mut inventory = Inventory::default();
    let held;
    let missing = |disk: &DiskName| {
        Error::new(ErrorKind::NotFound, format!("{address}: there is no disk {disk}"))
    };
    match address {
        Address::Point { machine, selector, disk } => {
            let mut point = Catalog::new(repository).point(machine, selector)?;
            held = Held::point(repository, PROGRAM, &mut point)?;
            if let Some(disk) = disk {
                point.disks.retain(|there| there.name == *disk);
                if point.disks.is_empty() {
                    return Err(missing(disk));
                }
            }
            inventory.points.push(point);
        }
        Address::Live { session, disk } => {
            let mut session = coldrise_session::session(repository, session)?.document;
            held = Held::session(repository, PROGRAM, &session)?;
            if let Some(disk) = disk {
                session.disks.retain(|there| there.name == *disk);
                if session.disks.is_empty() {
                    return Err(missing(disk));
                }
            }
            inventory.sessions.push(session);
        }
    }
    Ok((inventory, held))
}

/// One entry per disk, its ranges in order and joined: a disk may miss chunks and
/// captured blocks.
fn joined(affected: Vec<Affected>) -> Vec<Affected> {
    let mut whole: Vec<Affected> = Vec::new();
    for one in affected {
        match whole.iter_mut().find(|there| there.disk == one.disk) {
            Some(there) => there.ranges.extend(one.ranges),
            None => whole.push(one),
        }
    }
    for one in &mut whole {
        one.ranges.sort_by_key(|range| range.start);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for range in one.ranges.drain(..) {
            match ranges.last_mut() {
                Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                _ => ranges.push(range),
            }
        }
        one.ranges = ranges;
    }
    whole
}

fn text(verified: &Verified) -> String {
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
        lines.push("affected: nothing that a restore point or a session refers to".to_owned());
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
    lines.push(match verified.is_clean {
        true => format!("no damage in {read}"),
        false => format!("damage found in {read}"),
    });
    lines.join("\n")
}

fn show_range(range: &Range<u64>) -> String {
    format!("{}-{}", range.start, range.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_read_with_and_without_their_sign() {
        assert_eq!((parse_percent("5%"), parse_percent("0.5")), (Ok(5.0), Ok(0.5)));
        for text in ["0", "-1", "101", "five", "", "%", "NaN", "inf"] {
            assert!(parse_percent(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ranges_of_a_disk_are_joined() {
        let of = |disk: &str, ranges: Vec<Range<u64>>| Affected { disk: disk.to_owned(), ranges };
        let found = joined(vec![
            of("a", vec![10..20, 50..60]),
            of("b", vec![0..1, 3..4]),
            of("a", vec![0..5, 20..30, 55..58]),
        ]);
        assert_eq!(found, [of("a", vec![0..5, 10..30, 50..60]), of("b", vec![0..1, 3..4])]);
    }
}
