//! `coldrise restore`: writes a disk to a file, a device or an NBD server.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use clap::builder::TypedValueParser;
use coldrise_block::{Disk, Error, ErrorKind, Result};
use coldrise_formats::Format;
use coldrise_ingest::{RestoreOptions, RestoreTarget, restore};
use coldrise_inventory::find_disk;
use coldrise_requests::{Restore, format_words};
use coldrise_session::{Catalog, PointOfMark, ReadLease, open_live_disk, open_point_disk};
use coldrise_store::{Address, DiskName, Repository};
use serde::Serialize;

use super::{restore_ova, restore_parts};
use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::Report;
use crate::units::{show_duration, show_size};
use coldrise_hosting::signals::cancel_flag;
use coldrise_hosting::tell_newer;

/// The program's name in leases, for people.
pub(super) const PROGRAM: &str = "restore";

/// Write a disk of a restore point or session to a file, a device or an NBD server; or all disks to an OVA.
///
/// A file appears under its name when it is complete; holes stay holes. If a format has two
/// files, TARGET names the one that programs open; the other is written beside it. Block
/// devices and NBD exports are written in place and must be large enough.
///
/// An .ova has all disks of the machine and its hardware; VMware, VirtualBox and virt-v2v import it.
#[derive(Debug, Args)]
pub(crate) struct RestoreArguments {
    #[command(flatten)]
    request: Restore,

    /// Write the parts of MACHINE/POINT other than its disks into the folder TARGET: the configuration and, if stored,
    /// firmware variables and TPM state. The folder must be new or empty. list --parts shows the stored parts.
    #[arg(long, conflicts_with_all = ["format", "replace"])]
    parts: bool,
}

/// How a disk is written.
#[derive(Debug, Args)]
pub(crate) struct Written {
    /// Format of the image. Default: from the file's extension (raw, img, qcow2, vhd, vhdx,
    /// vmdk); raw for devices and NBD servers.
    #[arg(long, value_name = "FORMAT", value_parser = format_words().try_map(|word| word.parse::<Format>()))]
    format: Option<Format>,

    /// Replace an existing file, or both files of the format.
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct Restored {
    address: String,
    target: String,
    format: &'static str,
    size_bytes: u64,
    written_bytes: u64,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &RestoreArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open_for_disks()?;
    let Restore { address, target, format, replace } = &arguments.request;
    let target = RestoreTarget::parse(target)?;
    refuse_inside(repository.path(), &target)?;
    if arguments.parts {
        return restore_parts::run(invocation, &repository, &address.parse()?, &target);
    }
    if arguments.request.is_ova()? {
        return restore_ova::run(
            invocation,
            &repository,
            &address.parse()?,
            &target,
            *replace,
            &cancel,
        );
    }
    let opened = open_disk(invocation, &repository, &address.parse()?)?;
    // The parser of the arguments has checked the word.
    let format = format.as_deref().and_then(|word| word.parse().ok());
    let written = Written { format, force: *replace };
    let (address, disk) = (opened.shown.clone(), opened.disk.as_ref());
    restore_disk(invocation, address, disk, &target, &written, &cancel)
}

/// Writes a disk to a target, and reports it.
///
/// # Errors
/// As for [`restore`].
pub(crate) fn restore_disk(
    invocation: &Invocation,
    address: String,
    disk: &dyn Disk,
    target: &RestoreTarget,
    written: &Written,
    cancel: &AtomicBool,
) -> Result<Report> {
    let options = RestoreOptions { format: written.format, threads: 0, force: written.force };
    let view = ProgressView::new(invocation);
    let done = restore(disk, target, &options, &view, cancel);
    drop(view);
    let summary = done.map_err(|error| interrupted(error, target))?;
    let (format, written_bytes) = (summary.format.word(), summary.written_bytes);
    Ok(restored(invocation, address, target, format, summary.size_bytes, written_bytes))
}

/// The error of a restore; a cancelled one says what is left.
pub(super) fn interrupted(error: Error, target: &RestoreTarget) -> Error {
    match (error.kind(), target) {
        (ErrorKind::Interrupted, RestoreTarget::Nbd(_)) => Error::new(
            ErrorKind::Interrupted,
            format!("cancelled: {target} is only partly written"),
        ),
        (ErrorKind::Interrupted, RestoreTarget::Path(_)) => {
            Error::new(ErrorKind::Interrupted, "cancelled: no file was made")
        }
        _ => error,
    }
}

/// Reports a restore.
pub(super) fn restored(
    invocation: &Invocation,
    address: String,
    target: &RestoreTarget,
    format: &'static str,
    size_bytes: u64,
    written_bytes: u64,
) -> Report {
    let restored = Restored {
        address,
        target: target.to_string(),
        format,
        size_bytes,
        written_bytes,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = format!(
        "restored {} to {} as {}: {}, {} written, in {}",
        restored.address,
        restored.target,
        restored.format,
        show_size(restored.size_bytes),
        show_size(restored.written_bytes),
        show_duration(invocation.elapsed())
    );
    Report::done(&restored, text)
}

/// Refuses a target in the repository's folder: with `--force` it could replace a file of it.
///
/// # Errors
/// `InvalidInput`.
pub(crate) fn refuse_inside(repository: &Path, target: &RestoreTarget) -> Result<()> {
    let RestoreTarget::Path(path) = target else { return Ok(()) };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folders = (parent.unwrap_or(Path::new(".")).canonicalize(), repository.canonicalize());
    let (Ok(folder), Ok(repository)) = folders else { return Ok(()) };
    if !folder.starts_with(&repository) {
        return Ok(());
    }
    let message = format!(
        "{target} is in the folder of the repository, which is reserved for Coldrise's own files: \
         name a file elsewhere"
    );
    Err(Error::new(ErrorKind::InvalidInput, message))
}

/// A disk of a point or session that is read.
pub(crate) struct OpenedDisk {
    /// Its exact address, for people.
    pub(crate) shown: String,
    /// MACHINE/POINT/DISK or live/SESSION/DISK.
    pub(crate) export: String,
    pub(crate) disk: Arc<dyn Disk>,
    _held: ReadLease,
    /// A point that was made of a mark goes with it.
    pub(crate) point: PointOfMark,
}

/// The disk of an address.
///
/// # Errors
/// `NotFound`; `InvalidInput` if there are several disks and the address names none.
pub(crate) fn open_disk(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    address: &Address,
) -> Result<OpenedDisk> {
    let point = PointOfMark::of(repository, address)?;
    let (folder, name, disk, held) = open_stored(invocation, repository, &point.address, address)?;
    let export = format!("{folder}/{name}");
    let shown = match &point.shown {
        Address::Marked { session, time, .. } => format!("live/{session}@{time}/{name}"),
        _ => export.clone(),
    };
    Ok(OpenedDisk { shown, export, disk, _held: held, point })
}

/// The address of the point or session, and the disk. Errors name `given`.
fn open_stored(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    address: &Address,
    given: &Address,
) -> Result<(String, DiskName, Arc<dyn Disk>, ReadLease)> {
    match address {
        Address::Point { machine, selector, disk } => {
            let catalog = Catalog::new(repository);
            let mut point = catalog.point(machine, selector)?;
            tell_newer(invocation.caller()?, &catalog, selector, &point);
            let names = point.disks.iter().map(|disk| &disk.name);
            let name = choose_disk(given, disk.as_ref(), names)?;
            find_disk(&point, &name)?;
            let held = ReadLease::point(repository, PROGRAM, &mut point)?;
            let opened = open_point_disk(repository, &point, &name)?;
            Ok((format!("{machine}/{}", point.point), name, opened, held))
        }
        Address::Marked { .. } => Err(Error::new(ErrorKind::Internal, "a time mark")),
        Address::Live { session, disk } => {
            let document = coldrise_session::session(repository, session)?.document;
            let names = document.disks.iter().map(|disk| &disk.name);
            let name = choose_disk(given, disk.as_ref(), names)?;
            let held = ReadLease::session(repository, PROGRAM, &document)?;
            let opened = open_live_disk(repository, session, &name)?;
            Ok((format!("live/{session}"), name, opened, held))
        }
    }
}

/// The named disk, or the only one.
///
/// # Errors
/// `InvalidInput` if there are several and none is named.
pub(crate) fn choose_disk<'a>(
    address: &Address,
    named: Option<&DiskName>,
    there: impl Iterator<Item = &'a DiskName>,
) -> Result<DiskName> {
    let there: Vec<&DiskName> = there.collect();
    match (named, &there[..]) {
        (Some(name), _) => Ok(name.clone()),
        (None, [only]) => Ok((*only).clone()),
        (None, _) => {
            let names: Vec<&str> = there.iter().map(|name| name.as_str()).collect();
            Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{address} has several disks: name one of {}", names.join(", ")),
            ))
        }
    }
}
