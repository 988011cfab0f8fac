//! `coldrise files diff`: the files that differ between two points.

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use coldrise_block::Result;
use coldrise_files::{Change, ChangeKind, FilesAddress, Received, Snapshot, path_hex, shown};
use serde::Serialize;

use super::{Reading, ReadingOptions, Unread, about, address, place};
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::show_size;
use coldrise_hosting::signals::ChildSignals;

/// List the files that differ between two points.
///
/// Files are compared by length and time of the last change, links by their target. Their content is
/// not read.
#[derive(Debug, Args)]
pub(crate) struct DiffArguments {
    /// MACHINE/POINT[/DISK[,DISK...]]:[FILE-SYSTEM]/PATH.
    #[arg(value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(address))]
    from: FilesAddress,

    /// The address to compare with; without a path, that of the first one.
    #[arg(value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(address))]
    to: FilesAddress,

    #[command(flatten)]
    options: ReadingOptions,
}

#[derive(Serialize)]
struct Answer {
    from: String,
    to: String,
    is_equal: bool,
    changes: Vec<ListedChange>,
    /// The number of files and folders that could not be read.
    unread: u64,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct ListedChange {
    path: String,
    path_hex: Option<String>,
    change: &'static str,
    kind: &'static str,
    from_size_bytes: Option<u64>,
    to_size_bytes: Option<u64>,
}

impl ListedChange {
    fn new(change: &Change<'_>) -> ListedChange {
        ListedChange {
            path: shown(change.path),
            path_hex: path_hex(change.path),
            change: match change.kind {
                ChangeKind::Added => "added",
                ChangeKind::Removed => "removed",
                ChangeKind::Changed => "changed",
            },
            kind: change.entry_kind.word(),
            from_size_bytes: change.sizes.0,
            to_size_bytes: change.sizes.1,
        }
    }
}

pub(super) fn run(invocation: &Invocation, arguments: &DiffArguments) -> Result<Report> {
    let mut signals = ChildSignals::catch()?;
    let repository = &invocation.open()?;
    let from = &arguments.from;
    let mut to = arguments.to.clone();
    if to.path.is_none() {
        to.path.clone_from(&from.path);
        to.system = to.system.or_else(|| from.system.clone());
    }
    let options = &arguments.options;
    let first_point = Reading::point(invocation.caller()?, repository, from)?;
    let second_point = Reading::point(invocation.caller()?, repository, &to)?;
    let start = |point, address: &FilesAddress, signals: &mut ChildSignals| {
        options.start(invocation, point, address, signals)
    };
    let mut unread = Unread::default();
    let first = start(&first_point, from, &mut signals)?;
    let [before, after] = if first_point.point == second_point.point {
        // One machine serves one conversation at a time.
        let before = snapshot(invocation, first, from, &mut signals, &mut unread)?;
        let second = start(&second_point, &to, &mut signals)?;
        [before, snapshot(invocation, second, &to, &mut signals, &mut unread)?]
    } else {
        // Both start at the same time.
        let second = start(&second_point, &to, &mut signals)?;
        let before = snapshot(invocation, first, from, &mut signals, &mut unread)?;
        [before, snapshot(invocation, second, &to, &mut signals, &mut unread)?]
    };
    let points =
        [&first_point, &second_point].map(|point| format!("{}/{}", point.machine, point.point));
    let changes: Vec<_> = before.changes(&after).iter().map(ListedChange::new).collect();
    let text = text(&changes);
    let [from, to] = points;
    let answer = Answer {
        from,
        to,
        is_equal: changes.is_empty() && unread.0 == 0,
        changes,
        unread: unread.0,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let mut report = Report::answer(&answer, text);
    report.exit_code = unread.exit_code();
    Ok(report)
}

fn snapshot(
    invocation: &Invocation,
    reading: Reading,
    address: &FilesAddress,
    signals: &mut ChildSignals,
    unread: &mut Unread,
) -> Result<Snapshot> {
    reading.talk(signals, None, |client, systems| {
        let placed = place(client, systems, address);
        // Two points are read: say which.
        let (device, path) = placed.map_err(|error| error.context(address.to_string()))?;
        let mut snapshot = Snapshot::default();
        let done = client.walk(device, path, |received| {
            match received {
                Received::Entry(entry) => snapshot.add(entry),
                Received::Content(_) => {}
                Received::Unread(text) => unread.add(invocation, text),
            }
            Ok(())
        });
        about(address, done)?;
        Ok(snapshot)
    })
}

fn text(changes: &[ListedChange]) -> String {
    if changes.is_empty() {
        return "no differences".to_owned();
    }
    let line = |change: &ListedChange| {
        let size = |bytes: Option<u64>| bytes.map(show_size).unwrap_or_default();
        let path = &change.path;
        match change.change {
            "added" => format!("+ {path}  {}\n", size(change.to_size_bytes)),
            "removed" => format!("- {path}\n"),
            _ if change.from_size_bytes == change.to_size_bytes => format!("~ {path}\n"),
            _ => {
                format!(
                    "~ {path}  {} -> {}\n",
                    size(change.from_size_bytes),
                    size(change.to_size_bytes)
                )
            }
        }
    };
    changes.iter().map(line).collect()
}
