//! `coldrise plan`: estimates the needs of a repository.

use clap::{Args, ValueEnum, value_parser};
use coldrise_block::Result;
use coldrise_inventory::saved_percent;
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::{parse_size, show_count, show_size};

/// The measurement for one chunk size: the space of the chunks with each compression, as
/// shares of the input. docs/decisions/0005-chunk-size-and-compression.md.
struct Measured {
    chunk_size_bytes: u64,
    /// In the order of [`PlannedCompression`].
    space: [f64; 5],
}

const MEASURED: [Measured; 7] = [
    Measured { chunk_size_bytes: 4 << 10, space: [0.990, 0.533, 0.396, 0.389, 0.378] },
    Measured { chunk_size_bytes: 8 << 10, space: [1.002, 0.517, 0.379, 0.372, 0.359] },
    Measured { chunk_size_bytes: 16 << 10, space: [1.002, 0.501, 0.367, 0.360, 0.346] },
    Measured { chunk_size_bytes: 32 << 10, space: [1.001, 0.487, 0.364, 0.354, 0.334] },
    Measured { chunk_size_bytes: 64 << 10, space: [1.001, 0.473, 0.358, 0.346, 0.325] },
    Measured { chunk_size_bytes: 128 << 10, space: [1.000, 0.467, 0.353, 0.338, 0.317] },
    Measured { chunk_size_bytes: 256 << 10, space: [1.000, 0.464, 0.341, 0.325, 0.306] },
];

/// Bytes on disk per chunk beside its content: 67 in the index of known chunks and 53 in
/// the files' own indexes (measured with a million chunks).
const INDEX_DISK_BYTES: f64 = 120.0;
/// Bytes in the memory of every reading process: the top level of the files' indexes.
const READER_MEMORY_BYTES: f64 = 0.14;
/// Bytes in the memory of a writer, including a reader's: filter and index of known chunks.
const WRITER_MEMORY_BYTES: f64 = 1.64;

/// Upper limit of `--keep`.
const MAX_KEEP: i64 = 100_000;

/// Estimate space, index and memory of a repository, by chunk size.
///
/// Needs no repository. The assumptions stand below the table. The most important ones: the
/// data is like the measured guest, and each change is at least as large as a chunk. Smaller
/// scattered changes take more space in large chunks than the table shows.
#[derive(Debug, Args)]
pub(crate) struct PlanArguments {
    /// Data on all disks together, without holes, such as 500G, 1.5T or 10T.
    #[arg(value_name = "SIZE", value_parser = parse_protect)]
    #[arg(required_unless_present = "protect")]
    size: Option<u64>,

    /// The same as SIZE.
    #[arg(long, value_name = "SIZE", value_parser = parse_protect, conflicts_with = "size")]
    protect: Option<u64>,

    /// Percentage of the data that changes from one restore point to the next.
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = parse_change)]
    change: f64,

    /// Number of restore points kept per machine.
    #[arg(long, value_name = "N", default_value = "30", value_parser = value_parser!(u32).range(1..=MAX_KEEP))]
    keep: u32,

    /// Show only this chunk size.
    #[arg(long, value_name = "SIZE", value_parser = parse_chunk_size)]
    chunk_size: Option<u64>,

    /// Compression of chunks.
    #[arg(long, value_name = "METHOD", value_enum, default_value = "zstd:1")]
    compression: PlannedCompression,
}

/// The measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
enum PlannedCompression {
    #[value(name = "none")]
    #[serde(rename = "none")]
    None,
    #[value(name = "lz4")]
    #[serde(rename = "lz4")]
    Lz4,
    #[value(name = "zstd:1")]
    #[serde(rename = "zstd:1")]
    Zstd1,
    #[value(name = "zstd:3")]
    #[serde(rename = "zstd:3")]
    Zstd3,
    #[value(name = "zstd:9")]
    #[serde(rename = "zstd:9")]
    Zstd9,
}

fn parse_protect(text: &str) -> std::result::Result<u64, String> {
    match parse_size(text) {
        Ok(0) => Err("there is nothing to protect: give the size of the data".to_owned()),
        size => size.map_err(|error| error.to_string()),
    }
}

/// `5` or `5%` or `0.5`; 0 is allowed.
fn parse_change(text: &str) -> std::result::Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).parse::<f64>();
    number
        .ok()
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or_else(|| "a percentage from 0 to 100, for example 5%".to_owned())
}

fn parse_chunk_size(text: &str) -> std::result::Result<u64, String> {
    parse_size(text)
        .ok()
        .filter(|size| MEASURED.iter().any(|measured| measured.chunk_size_bytes == *size))
        .ok_or_else(|| "4K, 8K, 16K, 32K, 64K, 128K or 256K".to_owned())
}

#[derive(Serialize)]
struct Plan {
    protect_bytes: u64,
    change_percent: f64,
    keep: u32,
    compression: PlannedCompression,
    /// The size of all restore points, restored.
    recoverable_bytes: u64,
    /// The part of it that changes from one point to the next.
    different_bytes: u64,
    chunk_sizes: Vec<Planned>,
}

#[derive(Serialize)]
struct Planned {
    chunk_size_bytes: u64,
    /// The space on disk, including the index.
    occupied_bytes: u64,
    reduction_percent: f64,
    index_bytes: u64,
    reader_memory_bytes: u64,
    writer_memory_bytes: u64,
}

impl Planned {
    fn new(measured: &Measured, plan: &PlanArguments, different: f64, recoverable: u64) -> Planned {
        let chunks = different / measured.chunk_size_bytes as f64;
        let space = measured.space[plan.compression as usize];
        let index_bytes = (chunks * INDEX_DISK_BYTES) as u64;
        let occupied_bytes = ((different * space) as u64).saturating_add(index_bytes);
        Planned {
            chunk_size_bytes: measured.chunk_size_bytes,
            occupied_bytes,
            reduction_percent: saved_percent(occupied_bytes, recoverable),
            index_bytes,
            reader_memory_bytes: (chunks * READER_MEMORY_BYTES) as u64,
            writer_memory_bytes: (chunks * WRITER_MEMORY_BYTES) as u64,
        }
    }
}

pub(crate) fn run(_invocation: &Invocation, arguments: &PlanArguments) -> Result<Report> {
    let keep = f64::from(arguments.keep);
    let protect_bytes = arguments.size.or(arguments.protect).unwrap_or_default();
    let protect = protect_bytes as f64;
    let different = protect * (1.0 + arguments.change / 100.0 * (keep - 1.0));
    let recoverable_bytes = (protect * keep) as u64;
    let wanted = |measured: &&Measured| {
        arguments.chunk_size.is_none_or(|size| size == measured.chunk_size_bytes)
    };
    let plan = Plan {
        protect_bytes,
        change_percent: arguments.change,
        keep: arguments.keep,
        compression: arguments.compression,
        recoverable_bytes,
        different_bytes: different as u64,
        chunk_sizes: MEASURED
            .iter()
            .filter(wanted)
            .map(|measured| Planned::new(measured, arguments, different, recoverable_bytes))
            .collect(),
    };
    let text = text(&plan);
    Ok(Report::answer(&plan, text))
}

fn text(plan: &Plan) -> String {
    let rows: Vec<Vec<String>> = plan
        .chunk_sizes
        .iter()
        .map(|planned| {
            vec![
                format!("{}K", planned.chunk_size_bytes >> 10),
                show_size(planned.occupied_bytes),
                format!("{:.1} %", planned.reduction_percent),
                show_size(planned.index_bytes),
                show_size(planned.reader_memory_bytes),
                show_size(planned.writer_memory_bytes),
            ]
        })
        .collect();
    let name = plan.compression.to_possible_value();
    let compression = name.as_ref().map_or("", |value| value.get_name());
    let mut text = table(&[">CHUNK", ">ON DISK", ">SAVED", ">INDEX", ">READER", ">WRITER"], &rows);
    text.push_str(&format!(
        "\nindex: the part of it on the disk that finds chunks. Reader and writer: memory of each \
         process for it; up to 24 MiB and 80 MiB of caches come on top, and a reader's cache of \
         chunks.\n\
         assumed: {} of {}, each {} % different from the one before, so {} to \
         restore and {} to store; compressed by {compression} as much as the Debian guest of \
         docs/decisions/0005 was; no two machines alike; changes of at least one chunk; \
         captured writes of sessions not counted.\n",
        show_count(u64::from(plan.keep), "restore point"),
        show_size(plan.protect_bytes),
        plan.change_percent,
        show_size(plan.recoverable_bytes),
        show_size(plan.different_bytes),
    ));
    text
}
