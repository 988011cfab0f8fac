//! `coldrise bucket list`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{MachineName, PointDocument};
use serde::Serialize;

use super::{open_for, parse_url, tell_damaged};
use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::{show_moment, show_size};

/// List the machines in a bucket and their restore points, oldest first.
#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// The bucket: s3://BUCKET/PREFIX.
    #[arg(value_name = "BUCKET", value_parser = parse_url)]
    bucket: String,

    /// List only this machine.
    #[arg(value_name = "MACHINE")]
    machine: Option<MachineName>,
}

#[derive(Serialize)]
struct Listed {
    bucket: String,
    points: Vec<ListedPoint>,
    /// The objects of points that cannot be read.
    damaged: Vec<String>,
}

#[derive(Serialize)]
struct ListedPoint {
    address: String,
    created_at_ms: u64,
    size_bytes: u64,
    disks: Vec<ListedDisk>,
}

#[derive(Serialize)]
struct ListedDisk {
    disk: String,
    size_bytes: u64,
}

impl ListedPoint {
    fn new(point: &PointDocument) -> ListedPoint {
        let disk = |disk: &coldrise_store::DiskDocument| ListedDisk {
            disk: disk.name.to_string(),
            size_bytes: disk.size_bytes,
        };
        ListedPoint {
            address: format!("{}/{}", point.machine, point.point),
            created_at_ms: point.created_at_ms,
            size_bytes: point.disks.iter().map(|disk| disk.size_bytes).sum(),
            disks: point.disks.iter().map(disk).collect(),
        }
    }

    fn row(&self) -> Vec<String> {
        let disks: Vec<_> = self.disks.iter().map(|disk| disk.disk.as_str()).collect();
        vec![
            self.address.clone(),
            show_moment(self.created_at_ms),
            disks.join(" "),
            show_size(self.size_bytes),
        ]
    }
}

pub(super) fn run(
    invocation: &Invocation,
    arguments: &ListArguments,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    let bucket = open_for(invocation, &arguments.bucket, cancel)?;
    let mut points = match &arguments.machine {
        Some(machine) => bucket.points(machine)?,
        None => bucket.all_points()?,
    };
    if let (Some(machine), true) = (&arguments.machine, points.is_empty()) {
        let text = format!("{}: there is no machine {machine}", bucket.place());
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    points.sort_by(|a, b| (&a.machine, &a.point).cmp(&(&b.machine, &b.point)));
    let points: Vec<_> = points.iter().map(ListedPoint::new).collect();
    let rows: Vec<_> = points.iter().map(ListedPoint::row).collect();
    let text = match rows.is_empty() {
        true => "no restore points yet: coldrise copy --to makes them".to_owned(),
        false => table(&["ADDRESS", "STORED AT", "DISKS", ">SIZE"], &rows),
    };
    let damaged: Vec<String> = bucket.damaged_points().into_keys().collect();
    let text = text + &tell_damaged(&bucket);
    let is_damaged = !damaged.is_empty();
    let listed = Listed { bucket: arguments.bucket.clone(), points, damaged };
    let mut report = Report::answer(&listed, text);
    if is_damaged {
        report.exit_code = coldrise_runs::exit_code(ErrorKind::Corrupt);
    }
    Ok(report)
}
