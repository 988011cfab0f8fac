//! `coldrise fold`: turns sealed layers into deduplicated chunks.

mod watch;

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Phase, Progress, ProgressState, Result};
use coldrise_requests::Fold;
use coldrise_session::{Catalog, Folded};
use coldrise_store::{Address, DiskDocument, PointDocument, PointOrigin, Repository, WriteOptions};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::{Report, table};
use crate::units::{show_count, show_duration, show_size};
use coldrise_hosting::signals::cancel_flag;

/// Turn the captured writes of sealed sessions into deduplicated chunks.
///
/// A synthetic restore point consists of layers, which hold captured blocks as they were
/// written. A fold compresses and deduplicates the blocks and frees the space of the layers.
/// Nothing else changes, and machines keep running: the process that serves a session continues
/// on the chunks. Folding is optional.
#[derive(Debug, Args)]
pub(crate) struct FoldArguments {
    #[command(flatten)]
    request: Fold,

    /// Keep running in the background and fold points as they are sealed, one after the other,
    /// at the lowest priority. A backup or another command that writes to the repository
    /// interrupts it within about a second, and is never refused because of it. Ctrl-C or
    /// SIGTERM ends it; it can be killed at any moment.
    #[arg(long, conflicts_with = "address")]
    watch: bool,

    /// With --watch: seconds between two searches for points to fold.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "watch")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    interval: u64,
}

#[derive(Default, Serialize)]
struct Done {
    points: Vec<FoldedPoint>,
    removed_layers: u64,
    removed_bytes: u64,
    stored_bytes: u64,
    /// Restore points that were left, because sessions can go back to time marks in their layers.
    left_for_marks: u64,
    /// Sessions that keep layers: the processes that serve them did not move them.
    served_sessions: u64,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct FoldedPoint {
    address: String,
    read_bytes: u64,
    stored_chunks: u64,
    stored_bytes: u64,
    removed_layers: u64,
    removed_bytes: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &FoldArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let mut done = Done::default();
    if arguments.watch {
        let interval = Duration::from_secs(arguments.interval);
        watch::watch(invocation, interval, &cancel, &mut done)?;
        return Ok(report(invocation, done));
    }
    let writer = invocation.access()?.open_for_writing()?;
    let addresses = arguments.request.addresses.iter().map(|text| Address::parse(text));
    let addresses = addresses.collect::<Result<Vec<_>>>()?;
    let (points, left_for_marks) = chosen(writer.repository(), &addresses)?;
    done.left_for_marks = left_for_marks;
    let view = ProgressView::new(invocation);
    let progress = |point: &PointDocument, disk: &DiskDocument, done_bytes: u64| {
        view.update(&ProgressState {
            phase: Phase::Storing,
            disk: &format!("{}/{}/{}", point.machine, point.point, disk.name),
            done_bytes,
            total_bytes: disk.size_bytes,
            read_bytes: 0,
            stored_bytes: 0,
        });
    };
    let options = WriteOptions::default();
    let folded = coldrise_session::fold(&writer, &points, options, &progress, &cancel)?;
    done.add(&points, &folded);
    if let Some(error) = folded.failed {
        return Err(error);
    }
    drop(view);
    Ok(report(invocation, done))
}

fn report(invocation: &Invocation, mut done: Done) -> Report {
    done.elapsed_ms = invocation.elapsed_ms();
    let text = text(&done, invocation);
    Report::done(&done, text)
}

impl Done {
    fn add(&mut self, points: &[PointDocument], folded: &Folded) {
        self.served_sessions = self.served_sessions.max(folded.served_sessions);
        for (point, folded) in points.iter().zip(&folded.points) {
            self.removed_layers += folded.removed_layers;
            self.removed_bytes += folded.removed_bytes;
            self.stored_bytes += folded.stored_bytes;
            self.points.push(FoldedPoint {
                address: format!("{}/{}", point.machine, point.point),
                read_bytes: folded.read_bytes,
                stored_chunks: folded.stored_chunks,
                stored_bytes: folded.stored_bytes,
                removed_layers: folded.removed_layers,
                removed_bytes: folded.removed_bytes,
            });
        }
    }
}

/// The points with layers, the oldest first: a layer that several points share is folded
/// once. Also the number of those that are left for their time marks.
fn chosen(
    repository: &Arc<Repository>,
    addresses: &[Address],
) -> Result<(Vec<PointDocument>, u64)> {
    let catalog = Catalog::new(repository);
    let (mut points, mut left_for_marks) = (Vec::new(), 0);
    if addresses.is_empty() {
        for machine in catalog.machines()? {
            points.extend(catalog.points(&machine)?);
        }
    }
    for address in addresses {
        let Address::Point { machine, selector, disk: None } = address else {
            return Err(not_a_point(address));
        };
        let point = catalog.point(machine, selector)?;
        if let PointOrigin::Backup { .. } = point.origin {
            let message = format!("{address} is a backup: it has no layers to fold");
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        points.push(point);
    }
    points.retain(|point| point.disks.iter().any(|disk| !disk.layers.is_empty()));
    if addresses.is_empty() {
        // An incompletely readable point cannot be folded.
        points.retain(|point| point.quarantine.is_none());
        // A session can go back to time marks in them, which a fold removes.
        let marked = coldrise_session::layers_with_marks(repository)?;
        let has_marks = |disk: &DiskDocument| disk.layers.iter().any(|l| marked.contains(&l.id));
        let before = points.len();
        points.retain(|point| !point.disks.iter().any(has_marks));
        left_for_marks = (before - points.len()) as u64;
    }
    points.sort_by(|a, b| (&a.machine, &a.point).cmp(&(&b.machine, &b.point)));
    points.dedup_by(|a, b| (&a.machine, &a.point) == (&b.machine, &b.point));
    Ok((points, left_for_marks))
}

fn not_a_point(address: &Address) -> Error {
    let message = match address {
        Address::Live { session, .. } => format!(
            "{address} is a session: seal it (coldrise seal {session}) and fold the restore point \
             that this makes"
        ),
        Address::Marked { .. } => format!(
            "{address} is a time mark: seal it (coldrise seal {address}) and fold the restore \
             point that this makes"
        ),
        Address::Point { machine, selector, .. } => {
            format!("a fold takes all disks of a restore point: give {machine}/{selector}")
        }
    };
    Error::new(ErrorKind::InvalidInput, message)
}

fn text(done: &Done, invocation: &Invocation) -> String {
    let left = match done.left_for_marks {
        0 => String::new(),
        left => format!(
            "{} left: sessions can go back to time marks in their layers. To fold one all the same, \
             name it",
            show_count(left, "restore point")
        ),
    };
    if done.points.is_empty() {
        return match left.is_empty() {
            true => "nothing to fold: no restore point has layers".to_owned(),
            false => format!("nothing to fold; {left}"),
        };
    }
    let rows: Vec<Vec<String>> = done
        .points
        .iter()
        .map(|point| {
            vec![
                format!("  {}", point.address),
                show_size(point.read_bytes),
                show_size(point.stored_bytes),
                show_size(point.removed_bytes),
            ]
        })
        .collect();
    let mut text = format!(
        "folded {} in {}: {} gone, {} returned\n{}",
        show_count(done.points.len() as u64, "restore point"),
        show_duration(invocation.elapsed()),
        show_count(done.removed_layers, "layer"),
        show_size(done.removed_bytes),
        table(&["  POINT", ">CAPTURED", ">STORED", ">RETURNED"], &rows)
    );
    if !left.is_empty() {
        text.push_str(&format!("\n{left}"));
    }
    if done.served_sessions > 0 {
        text.push_str(&format!(
            "\n{} the folded layers, because the process that serves it did not release them: see \
             the warnings, and fold the next restore point sealed from it",
            match done.served_sessions {
                1 => "1 session keeps".to_owned(),
                more => format!("{more} sessions keep"),
            }
        ));
    }
    text
}
