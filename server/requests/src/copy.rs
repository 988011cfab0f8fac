//! Copies of points in another repository.

use std::path::PathBuf;

use clap::Args;
use coldrise_ingest::Rate;
use coldrise_replica::{RateWindow, parse_prefix};
use coldrise_store::MachineName;
use serde::Serialize;

use crate::value::text;

/// Options of a copy that jobs have, too.
#[derive(Clone, Debug, Default, Args, Serialize)]
pub struct CopyOptions {
    /// Copy only these machines. Default: all machines.
    #[arg(value_name = "MACHINE", value_parser = text(MachineName::parse))]
    pub machines: Vec<String>,

    /// The directory of the other repository, made with coldrise init; or the name of a link to another site,
    /// see coldrise link; or a bucket, s3://BUCKET/PREFIX, see coldrise bucket. If a link has the same name as a directory, write ./NAME.
    #[arg(long, value_name = "DIR|LINK|BUCKET")]
    pub to: Option<PathBuf>,

    /// Read the other repository's passphrase from FILE. Default: the passphrase of this repository.
    #[arg(long, value_name = "FILE", conflicts_with = "from", display_order = 50)]
    pub to_passphrase_file: Option<PathBuf>,

    /// Add this prefix to the machines' names there, such as site-b-.
    #[arg(long, value_name = "TEXT", value_parser = parse_prefix, display_order = 100)]
    pub prefix: Option<String>,

    /// Copy only the newest N of each machine's points that are missing there.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), display_order = 100)]
    pub last: Option<u32>,

    /// Copy all points that are missing there, including those older than the newest point there.
    #[arg(long, display_order = 100)]
    pub all: bool,

    /// Read at most this many bytes per second, such as 20M. Over a link, this limits the bytes sent.
    #[arg(long, value_name = "BYTES", value_parser = text(str::parse::<Rate>), display_order = 100)]
    pub rate: Option<String>,

    /// Limit the rate during this weekly window, in bytes per second (5M), or stop (off): mon-fri
    /// 08:00-18:00=5M, sat,sun=off, 22:00-06:00=off. Can be repeated. Where windows overlap, the lowest rate
    /// applies; outside all windows, --rate applies. Times are in this host's local time.
    #[arg(long, value_name = "WINDOW=RATE", value_parser = text(str::parse::<RateWindow>), display_order = 100)]
    pub window: Vec<String>,
}
