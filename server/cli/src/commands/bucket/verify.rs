//! `coldrise bucket verify`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::{ErrorKind, Result};
use coldrise_bucket::{BucketCheck, BucketVerifyReport};
use serde::Serialize;

use super::{open_for, parse_url};
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::{show_count, show_duration, show_size};

/// Check that all restore points in a bucket can be read.
///
/// Reads everything that a point needs, checks it, and names the disks that are damaged.
#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    /// The bucket: s3://BUCKET/PREFIX.
    #[arg(value_name = "BUCKET", value_parser = parse_url)]
    bucket: String,

    /// Check only that nothing is missing: read the maps and the packs' tables, but no content.
    #[arg(long)]
    quick: bool,

    /// Then remove damaged data. The points that need it stay damaged; the next copy stores the data again if it still
    /// contains it. Refused while a copy to the bucket is running.
    #[arg(long, conflicts_with = "quick")]
    mend: bool,
}

#[derive(Serialize)]
struct Verified {
    bucket: String,
    is_quick: bool,
    #[serde(flatten)]
    report: BucketVerifyReport,
    elapsed_ms: u64,
}

pub(super) fn run(
    invocation: &Invocation,
    arguments: &VerifyArguments,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    let check = match (arguments.quick, arguments.mend) {
        (true, _) => BucketCheck::Quick,
        (false, false) => BucketCheck::Full,
        (false, true) => BucketCheck::Mend,
    };
    let report = open_for(invocation, &arguments.bucket, cancel)?.verify(check)?;
    let what = match arguments.quick {
        true => "maps checked, content not read".to_owned(),
        false => format!("{} read", show_size(report.read_bytes)),
    };
    let mut text = format!(
        "checked {} in {}: {what}, in {}",
        show_count(report.points, "restore point"),
        show_count(report.packs, "pack"),
        show_duration(invocation.elapsed())
    );
    for damaged in &report.damaged {
        text.push_str(&format!("\n{} is damaged: {}", damaged.address, damaged.reason));
    }
    if report.other_packs > 0 {
        let packs = show_count(report.other_packs, "pack");
        text.push_str(&format!(
            "\n{packs} more that no point needs: left by an unfinished copy or by removed points"
        ));
    }
    if !report.damaged.is_empty() && arguments.mend {
        text.push_str(&mended(&report));
    } else if !report.damaged.is_empty() {
        text.push_str(
            "\nget the objects back if the bucket keeps versions of them; else --mend removes the damaged data, and the next copy \
             stores it again",
        );
    }
    let code = match (report.damaged.is_empty(), report.points == 0 && report.other_packs > 0) {
        (false, _) => Some(ErrorKind::Corrupt),
        // Nothing was checked.
        (true, true) => Some(ErrorKind::Incomplete),
        (true, false) => None,
    };
    let verified = Verified {
        bucket: arguments.bucket.clone(),
        is_quick: arguments.quick,
        report,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let mut report = Report::done(&verified, text);
    if let Some(code) = code {
        report.exit_code = coldrise_runs::exit_code(code);
    }
    Ok(report)
}

/// The repairs, in lines.
fn mended(report: &BucketVerifyReport) -> String {
    let mut text = String::new();
    if let Some(name) = &report.put_back {
        text.push_str(&format!("\nput {name} back"));
    }
    if report.renamed_packs > 0 {
        let packs = show_count(report.renamed_packs, "pack");
        text.push_str(&format!("\nrebuilt the list of names in {packs}: nothing is lost"));
    }
    if report.mended_packs > 0 {
        let packs = show_count(report.mended_packs, "pack");
        text.push_str(&format!(
            "\nremoved damaged data from {packs}: the next copy stores it again"
        ));
    }
    if text.is_empty() {
        text.push_str(
            "\nno pack could be mended: damaged points stay damaged; forget them, and coldrise copy --all copies them again if \
             the source still has them",
        );
    }
    text
}
