//! `coldrise backup`: a new restore point.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{
    read_configuration, store_shared, BackupRequest, BackupSummary, DiskSummary, Rate, SourceSpec,
};
use coldrise_inventory::{configured_name, Hardware};
use coldrise_session::SharedWriter;
use coldrise_store::{
    BackupTarget, Configuration, DisplayName, MachineName, PointName, Repository, LIBVIRT_XML,
};
use serde::Serialize;

use super::backup_live::{LiveArguments, LiveBackup, MadeInstant};
use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::{print_on_stderr, table, Report};
use crate::units::{show_duration, show_size};
use coldrise_hosting::signals::cancel_flag;

/// Back up a machine's disks as one restore point.
///
/// Reads whole disks and stores only new data; with --bitmap, reads only changed data. The
/// point appears when it is complete. A cancelled or failed backup leaves no point; the next
/// run does not store the same data twice. Backups of different machines can run at the same
/// time. They share stored data and do not wait for each other.
///
/// With --from, backs up a machine while it runs: all its disks at one instant, and from the second
/// backup on only changed data.
#[derive(Debug, Args)]
pub(crate) struct BackupArguments {
    /// The machine's name: 1 to 63 of the characters a-z 0-9 . _ -, starting with a letter or
    /// digit. With --from libvirt also another name of a domain: "Web Server 01" is stored as
    /// web-server-01, and the name is kept as the display name.
    #[arg(value_name = "MACHINE")]
    machine: MachineArgument,

    /// What people call the machine, if that differs from MACHINE: any printable text of at most 255
    /// characters. Lists show it, and searches and jobs find it. Default: the title or name in
    /// libvirt's configuration, displayName in a .vmx file, display_name in Coldrise's own; else that
    /// of the latest backup. MACHINE itself removes it.
    #[arg(long, value_name = "NAME")]
    display_name: Option<DisplayName>,

    /// A disk's name and its source: an image file or an NBD URI.
    ///
    /// FORMAT is raw, qcow2, vmdk, vhd or vhdx. Without it, the file's extension decides.
    /// Content is never probed for the format.
    ///
    /// With --from: DISK=DEVICE; DEVICE is libvirt's target, such as vda, or QEMU's id of the device or
    /// the drive, or the block node's name. Default: all writable disks, with their existing names.
    #[arg(value_name = "DISK=[FORMAT:]SOURCE", required_unless_present = "from")]
    disks: Vec<String>,

    #[command(flatten)]
    live: LiveArguments,

    /// Store the machine's configuration with the point: a libvirt .xml file, a .vmx file, or
    /// Coldrise's own .json. With --from libvirt the default is the domain's XML.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Read only the blocks that this dirty bitmap marks as written since the machine's latest
    /// backup. Every source must have the bitmap: NBD servers export it as
    /// qemu:dirty-bitmap:NAME, qcow2 files contain it as a persistent bitmap.
    #[arg(long, value_name = "NAME", conflicts_with = "from")]
    bitmap: Option<String>,

    /// Allow images to refer to other files (backing files). Without this option, such images
    /// are refused.
    #[arg(long)]
    follow_backing: bool,

    /// Name the point for this time, such as 20261120T100000Z: the time of the disks' state,
    /// for example for old images. Default: now.
    #[arg(long, value_name = "TIME", conflicts_with_all = ["bitmap", "from"])]
    time: Option<PointName>,

    /// Read at most this many bytes per second from the sources, such as 20M.
    ///
    /// All disks share the rate. Only data that is read counts: neither holes nor, with --bitmap,
    /// unchanged data. The reads of 100 ms at a time are even. At least 64K.
    #[arg(long, value_name = "BYTES")]
    rate: Option<Rate>,
}

/// The machine of a backup.
#[derive(Clone, Debug)]
enum MachineArgument {
    Name(MachineName),
    /// A name that addresses no machine, and one that does and resembles it.
    Other(DisplayName, MachineName),
}

impl FromStr for MachineArgument {
    type Err = Error;

    fn from_str(text: &str) -> Result<MachineArgument> {
        let error = match MachineName::parse(text) {
            Ok(name) => return Ok(MachineArgument::Name(name)),
            Err(error) => error,
        };
        let other = DisplayName::parse(text).ok();
        let found = other.and_then(|other| Some((other.to_machine()?, other)));
        found.map(|(machine, other)| MachineArgument::Other(other, machine)).ok_or(error)
    }
}

impl MachineArgument {
    fn name(&self) -> &MachineName {
        match self {
            MachineArgument::Name(name) | MachineArgument::Other(_, name) => name,
        }
    }

    /// The text that was given.
    fn text(&self) -> &str {
        match self {
            MachineArgument::Name(name) => name.as_str(),
            MachineArgument::Other(other, _) => other.as_str(),
        }
    }

    /// The name that addresses no machine.
    fn other(&self) -> Option<&DisplayName> {
        match self {
            MachineArgument::Name(_) => None,
            MachineArgument::Other(other, _) => Some(other),
        }
    }

    /// # Errors
    /// `InvalidInput`, with the name to give.
    fn check_is_name(&self) -> Result<()> {
        let MachineArgument::Other(other, machine) = self else { return Ok(()) };
        let advice =
            format!("keep it as a display name: backup {machine} --display-name '{other}'");
        MachineName::parse(other.as_str()).map(drop).map_err(|error| error.advise(advice))
    }
}

#[derive(Serialize)]
struct Made<'a> {
    address: String,
    machine: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    display_name: Option<&'a str>,
    point: &'a str,
    disks: Vec<MadeDisk<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instant: Option<MadeInstant<'a>>,
    warnings: &'a [String],
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct MadeDisk<'a> {
    disk: &'a str,
    size_bytes: u64,
    read_bytes: u64,
    stored_bytes: u64,
    new_chunks: u64,
    known_chunks: u64,
    zero_bytes: u64,
    base: Option<&'a str>,
    is_incremental: bool,
}

impl<'a> MadeDisk<'a> {
    fn new(summary: &'a DiskSummary, chunk_size_bytes: u64) -> Self {
        MadeDisk {
            disk: summary.disk.as_str(),
            size_bytes: summary.size_bytes,
            read_bytes: summary.read_bytes,
            stored_bytes: summary.counts.stored_bytes,
            new_chunks: summary.counts.stored_chunks,
            known_chunks: summary.counts.known_chunks,
            zero_bytes: summary.counts.zero_chunks.saturating_mul(chunk_size_bytes),
            base: summary.base.as_ref().map(|point| point.as_str()),
            is_incremental: summary.is_incremental,
        }
    }
}

/// Checks that a recovery will understand the machine's configuration.
fn check_configuration(configuration: Option<&Configuration>) -> Result<()> {
    Hardware::of(configuration)?;
    match configuration.filter(|stored| stored.format == LIBVIRT_XML) {
        Some(stored) => coldrise_recovery::libvirt::check_domain(&stored.text),
        None => Ok(()),
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: BackupArguments) -> Result<Report> {
    let configuration = arguments.config.as_deref().map(read_configuration).transpose()?;
    if let Err(error) = check_configuration(configuration.as_ref()) {
        // The disks are worth more than the configuration.
        print_on_stderr(&format!(
            "warning: a machine can be recovered from this point with plain hardware only (recover \
             --default-hardware): {}",
            error.full_message()
        ));
    }
    let cancel = cancel_flag()?;
    let machine = &arguments.machine;
    if !arguments.live.is_libvirt() {
        machine.check_is_name()?;
    }
    let mut live = arguments.live.connect(machine.text(), machine.other(), &arguments.disks)?;
    let disks = match live {
        Some(_) => Vec::new(),
        None => {
            arguments.disks.iter().map(|text| SourceSpec::parse(text)).collect::<Result<_>>()?
        }
    };
    let mut request = BackupRequest {
        machine: machine.name().clone(),
        display_name: arguments.display_name,
        disks,
        bitmap: arguments.bitmap,
        follow_backing: arguments.follow_backing,
        configuration,
        point: arguments.time,
        threads: 0,
        rate: arguments.rate,
    };
    let made = store_with(invocation, &mut request, live.as_mut(), &cancel);
    let (summary, chunk_size_bytes) = made.map_err(|error| match error.kind() {
        ErrorKind::Interrupted => Error::new(
            ErrorKind::Interrupted,
            "cancelled: no restore point was made; what is stored already is used when the \
             backup is run again",
        ),
        _ => error,
    })?;
    for warning in &summary.warnings {
        invocation.remark(&format!("warning: {warning}"));
    }
    let name = request.display_name.as_ref();
    Ok(report(invocation, &summary, name, live.as_ref(), chunk_size_bytes))
}

/// Stores all disks. Also returns the chunk size.
///
/// # Errors
/// As of `coldrise_ingest::backup`.
pub(crate) fn store(
    invocation: &Invocation,
    request: &BackupRequest,
    cancel: &AtomicBool,
) -> Result<(BackupSummary, u64)> {
    store_with(invocation, &mut request.clone(), None, cancel)
}

/// Stores all disks, and ends what a running machine got for the backup. Also returns the chunk size.
fn store_with(
    invocation: &Invocation,
    request: &mut BackupRequest,
    mut live: Option<&mut LiveBackup>,
    cancel: &AtomicBool,
) -> Result<(BackupSummary, u64)> {
    let writer = SharedWriter::join(invocation.access()?, cancel)?;
    let _claim = writer.repository()?.claim_machine(&request.machine)?;
    if let Some(live) = live.as_mut() {
        live.take(invocation, &*writer.repository()?, request, cancel)?;
    }
    request.display_name = display_name(&*writer.repository()?, request)?;
    let chunk_size_bytes = u64::from(writer.chunk_size_bytes());
    let tell_restart = || {
        invocation.remark(
            "the process that wrote the repository has ended unexpectedly: starting again, with what is \
             stored already",
        );
    };
    let progress = || ProgressView::new(invocation);
    let stored = store_shared(&writer, request, progress, &tell_restart, cancel)
        .map(|summary| (summary, chunk_size_bytes));
    // The machine is claimed until its bitmaps are in order.
    match live {
        Some(live) => live.end(invocation, stored),
        None => stored,
    }
}

/// The machine's display name: the one that was given, else that of the configuration, else that of the latest point.
/// To give the machine's own name removes it.
fn display_name(repository: &Repository, request: &BackupRequest) -> Result<Option<DisplayName>> {
    let is_beside = |name: DisplayName| name.beside(&request.machine);
    if let Some(given) = request.display_name.clone() {
        return Ok(is_beside(given));
    }
    let configured = request.configuration.as_ref().and_then(configured_name);
    match configured.and_then(is_beside) {
        None => Ok(repository.points(&request.machine)?.pop().and_then(|point| point.display_name)),
        configured => Ok(configured),
    }
}

fn report(
    invocation: &Invocation,
    summary: &BackupSummary,
    display_name: Option<&DisplayName>,
    live: Option<&LiveBackup>,
    chunk_size_bytes: u64,
) -> Report {
    let instant = live.and_then(LiveBackup::made);
    let made = Made {
        address: format!("{}/{}", summary.machine, summary.point),
        machine: summary.machine.as_str(),
        display_name: display_name.map(DisplayName::as_str),
        point: summary.point.as_str(),
        disks: summary.disks.iter().map(|disk| MadeDisk::new(disk, chunk_size_bytes)).collect(),
        instant,
        warnings: &summary.warnings,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let rows: Vec<Vec<String>> = made
        .disks
        .iter()
        .map(|disk| {
            vec![
                format!("  {}", disk.disk),
                show_size(disk.size_bytes),
                show_size(disk.read_bytes),
                show_size(disk.stored_bytes),
            ]
        })
        .collect();
    let text = format!(
        "made restore point {} in {}{}\n{}",
        made.address,
        show_duration(invocation.elapsed()),
        made.instant.as_ref().map(MadeInstant::sentence).unwrap_or_default(),
        table(&["  DISK", ">SIZE", ">READ", ">STORED"], &rows)
    );
    Report::done(&made, text)
}
