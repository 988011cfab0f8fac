//! `coldrise diff`: the differences between two points or sessions.

use clap::Args;
use coldrise_block::Result;
use coldrise_inventory::Difference;
use coldrise_store::Address;
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::show_size;
use coldrise_hosting::signals::cancel_flag;

/// Maximum number of listed ranges per disk.
const MAX_RANGES: usize = 1_000_000;

/// Show the differences between two restore points or sessions.
///
/// Disks are paired by name; two addresses with disks pair those two. Between backups, ranges
/// are as coarse as the repository's chunks; captured writes are compared in blocks of 4 KiB.
#[derive(Debug, Args)]
pub(crate) struct DiffArguments {
    /// MACHINE/POINT[/DISK], live/SESSION[/DISK] or live/SESSION@TIME[/DISK].
    #[arg(value_name = "ADDRESS")]
    from: Address,

    /// The address to compare with.
    #[arg(value_name = "ADDRESS")]
    to: Address,
}

#[derive(Serialize)]
struct Answer {
    #[serde(flatten)]
    difference: Difference,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &DiffArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open_for_disks()?;
    let (from, to) = (&arguments.from, &arguments.to);
    let difference = Difference::read(&repository, from, to, MAX_RANGES, &cancel)?;
    let text = text(&difference);
    Ok(Report::answer(&Answer { difference, elapsed_ms: invocation.elapsed_ms() }, text))
}

fn text(difference: &Difference) -> String {
    let mut text = format!("from {}\nto   {}\n\n", difference.from, difference.to);
    let rows: Vec<Vec<String>> = difference
        .disks
        .iter()
        .map(|disk| {
            let size = if disk.from_size_bytes == disk.to_size_bytes {
                show_size(disk.to_size_bytes)
            } else {
                format!("{} -> {}", show_size(disk.from_size_bytes), show_size(disk.to_size_bytes))
            };
            let differs = show_size(disk.differing_bytes);
            vec![disk.disk.clone(), size, differs, disk.range_count.to_string()]
        })
        .collect();
    text.push_str(&table(&["DISK", ">SIZE", ">DIFFERS", ">RANGES"], &rows));
    for (names, which) in [(&difference.only_from, "first"), (&difference.only_to, "second")] {
        if !names.is_empty() {
            text.push_str(&format!("only in the {which}: {}\n", names.join(", ")));
        }
    }
    if difference.is_equal {
        text.push_str("equal\n")
    } else {
        let total = show_size(difference.differing_bytes);
        text.push_str(&format!("{total} differ (--json lists the ranges)\n"));
    }
    text
}
