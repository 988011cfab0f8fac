//! `coldrise backup`: a new restore point.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_ingest::{
    Appliance, BackupRequest, BackupSummary, DiskSummary, Rate, SourceSpec, appliance_path,
    open_appliance, read_configuration, store_shared,
};
use coldrise_inventory::{Hardware, configured_name};
use coldrise_live_backup::{LiveBackup, LiveOptions, Mode};
use coldrise_requests::{Backup, BackupOptions, parse_backup_machine};
use coldrise_session::SharedWriter;
use coldrise_store::{
    BackupTarget, Configuration, DisplayName, LIBVIRT_XML, MachineName, PointName, Repository,
};
use serde::Serialize;

use super::backup_live::MadeInstant;
use super::host::OnHosts;
use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::{Report, print_on_stderr, table};
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
    #[command(flatten)]
    request: Backup,

    #[command(flatten)]
    options: BackupOptions,

    /// With --from: the folder of the scratch files, which vanish with the backup. With libvirt it needs as
    /// much free space as the disks have. With --on it is a folder of that host. Default: $TMPDIR, else /var/tmp.
    #[arg(long, value_name = "DIR", requires = "from", display_order = 2)]
    scratch: Option<PathBuf>,

    /// Allow images to refer to other files (backing files). Without this option, such images
    /// are refused.
    #[arg(long)]
    follow_backing: bool,

    /// Name the point for this time, such as 20261120T100000Z: the time of the disks' state,
    /// for example for old images. Default: now.
    #[arg(long, value_name = "TIME", conflicts_with_all = ["bitmap", "from"])]
    time: Option<PointName>,
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
    /// Whether nothing has changed since the base, by its bitmaps.
    is_unchanged: bool,
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

/// Whether a bitmap says that nothing has changed.
fn is_unchanged(summary: &DiskSummary) -> bool {
    summary.is_incremental && summary.read_bytes == 0 && summary.counts.zero_chunks == 0
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
        Some(stored) => coldrise_hypervisors::libvirt::check_domain(&stored.text),
        None => Ok(()),
    }
}

/// A whole machine out of files. Its manifest is checked before anything is stored.
fn read_appliance(invocation: &Invocation, path: &Path, cancel: &AtomicBool) -> Result<Appliance> {
    let view = ProgressView::new(invocation);
    let appliance = open_appliance(path, &view, cancel);
    drop(view);
    let appliance = appliance?;
    appliance.remarks.iter().for_each(|remark| invocation.remark(&format!("warning: {remark}")));
    Ok(appliance)
}

pub(crate) fn run(invocation: &Invocation, arguments: BackupArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let appliance = match &arguments.request.disks[..] {
        [only] if arguments.options.from.is_none() => appliance_path(only),
        _ => None,
    };
    let appliance = appliance.map(|path| read_appliance(invocation, path, &cancel)).transpose()?;
    let configuration = arguments.options.config.as_deref().map(read_configuration).transpose()?;
    let described = appliance.as_ref().map(|appliance| appliance.configuration.clone());
    let configuration = configuration.or(described);
    if let Err(error) = check_configuration(configuration.as_ref()) {
        // The disks are worth more than the configuration.
        print_on_stderr(&format!(
            "warning: a machine can be recovered from this point with plain hardware only (recover \
             --default-hardware): {}",
            error.full_message()
        ));
    }
    let Backup { machine: given, display_name, disks, rate_bytes_per_second: rate } =
        arguments.request;
    let (machine, other) = parse_backup_machine(&given)?;
    let display_name = display_name.as_deref().map(DisplayName::parse).transpose()?;
    let BackupOptions { from, on, connect, push, quiesce, agent, bitmap, .. } = arguments.options;
    let is_libvirt =
        from.as_deref().is_some_and(|from| from == "libvirt" || from.starts_with("libvirt:"));
    if other.is_some() && !is_libvirt {
        let advice =
            format!("keep it as a display name: backup {machine} --display-name '{given}'");
        MachineName::parse(&given).map_err(|error| error.advise(advice))?;
    }
    let domain = from.as_deref().and_then(|from| from.strip_prefix("libvirt:"));
    let named = other.as_ref().map_or(machine.as_str(), DisplayName::as_str);
    let domain = domain.unwrap_or(named);
    let (host, writer) = match OnHosts::find(invocation, &on)? {
        None => (Host::here(), None),
        Some(hosts) => {
            let access = invocation.access()?;
            // To open the repository takes about as long as to log in.
            let (host, writer) = std::thread::scope(|scope| {
                let joining = scope.spawn(|| SharedWriter::join(access, &cancel));
                (hosts.connect(connect.as_deref(), domain), joining.join())
            });
            let panicked =
                |_| Err(Error::new(ErrorKind::Internal, "opening the repository panicked"));
            (host?, Some(writer.unwrap_or_else(panicked)?))
        }
    };
    let live = from.map(|from| LiveOptions {
        from,
        host,
        connect,
        scratch: arguments.scratch,
        mode: if push { Mode::Push } else { Mode::Pull },
        is_quiesced: quiesce,
        agent,
    });
    let connect = |options| LiveBackup::connect(options, &machine, other, &disks);
    let mut live = live.map(connect).transpose()?;
    let disks = match (&live, appliance) {
        (Some(_), _) => Vec::new(),
        (None, Some(appliance)) => appliance.disks,
        (None, None) => disks.iter().map(|text| SourceSpec::parse(text)).collect::<Result<_>>()?,
    };
    let mut request = BackupRequest {
        machine,
        display_name,
        disks,
        bitmap,
        follow_backing: arguments.follow_backing,
        configuration,
        parts: Vec::new(),
        point: arguments.time,
        threads: 0,
        rate: rate.map(Rate::from_bytes_per_second).transpose()?,
    };
    let writer = writer.map_or_else(|| SharedWriter::join(invocation.access()?, &cancel), Ok);
    let made = writer
        .and_then(|writer| store_with(invocation, &writer, &mut request, live.as_mut(), &cancel));
    let (summary, chunk_size_bytes) = made.map_err(|error| match error.kind() {
        ErrorKind::Interrupted => Error::new(
            ErrorKind::Interrupted,
            "cancelled: no restore point was made; the next run reuses the data that is \
             already stored",
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
    let writer = SharedWriter::join(invocation.access()?, cancel)?;
    store_with(invocation, &writer, &mut request.clone(), None, cancel)
}

/// Backs up a machine that runs elsewhere. Returns the point's name.
///
/// # Errors
/// As of `coldrise_ingest::backup`, and those of the hypervisor.
pub(crate) fn store_live(
    invocation: &Invocation,
    machine: &MachineName,
    derived_from: Option<DisplayName>,
    options: LiveOptions,
    disks: &[String],
    cancel: &AtomicBool,
) -> Result<PointName> {
    let mut live = LiveBackup::connect(options, machine, derived_from, disks)?;
    invocation.remark(&format!("a backup of {machine} is made first"));
    let mut request = BackupRequest {
        machine: machine.clone(),
        display_name: None,
        disks: Vec::new(),
        bitmap: None,
        follow_backing: false,
        configuration: None,
        parts: Vec::new(),
        point: None,
        threads: 0,
        rate: None,
    };
    let writer = SharedWriter::join(invocation.access()?, cancel)?;
    let (summary, _) = store_with(invocation, &writer, &mut request, Some(&mut live), cancel)?;
    summary.warnings.iter().for_each(|warning| invocation.remark(&format!("warning: {warning}")));
    Ok(summary.point)
}

/// Stores all disks, and ends what a running machine got for the backup. Also returns the chunk size.
fn store_with(
    invocation: &Invocation,
    writer: &SharedWriter<'_>,
    request: &mut BackupRequest,
    live: Option<&mut LiveBackup>,
    cancel: &AtomicBool,
) -> Result<(BackupSummary, u64)> {
    let _claim = writer.repository()?.claim_machine(&request.machine)?;
    let chunk_size_bytes = u64::from(writer.chunk_size_bytes());
    let tell_restart = || {
        invocation.remark(
            "the process that wrote the repository has ended unexpectedly: starting again; data that is \
             already stored is reused",
        );
    };
    let progress = || ProgressView::new(invocation);
    let Some(live) = live else {
        request.display_name = display_name(&*writer.repository()?, request)?;
        let summary = store_shared(writer, request, progress, &|| Ok(()), &tell_restart, cancel)?;
        return Ok((summary, chunk_size_bytes));
    };
    loop {
        let instant = live.take(&writer.repository()?, request, cancel)?;
        instant.remarks.iter().for_each(|remark| invocation.remark(remark));
        request.display_name = display_name(&*writer.repository()?, request)?;
        let stored = live.read(cancel, |cancel, proof| {
            store_shared(writer, request, progress, proof, &tell_restart, cancel)
        });
        // The machine is claimed until its bitmaps are in order.
        if let Some(summary) = live.end(stored, &|text| invocation.remark(text))? {
            return Ok((summary, chunk_size_bytes));
        }
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
        None => {
            let newest = repository.newest_points(&request.machine, 1)?.pop();
            Ok(newest.and_then(|point| point.display_name))
        }
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
    let instant = live.and_then(LiveBackup::instant).map(MadeInstant::new);
    let made = Made {
        address: format!("{}/{}", summary.machine, summary.point),
        machine: summary.machine.as_str(),
        display_name: display_name.map(DisplayName::as_str),
        point: summary.point.as_str(),
        disks: summary.disks.iter().map(|disk| MadeDisk::new(disk, chunk_size_bytes)).collect(),
        instant,
        is_unchanged: summary.disks.iter().all(is_unchanged),
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
        "made restore point {} in {}{}{}\n{}",
        made.address,
        show_duration(invocation.elapsed()),
        made.instant.as_ref().map(MadeInstant::sentence).unwrap_or_default(),
        if made.is_unchanged { "; nothing has changed since the last backup" } else { "" },
        table(&["  DISK", ">SIZE", ">READ", ">STORED"], &rows)
    );
    Report::done(&made, text)
}
