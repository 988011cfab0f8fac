//! `coldrise restore` of a whole machine: all its disks and its hardware, as an OVA.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Disk, Error, ErrorKind, Result};
use coldrise_ingest::{Ova, OvaDisk, RestoreOptions, RestoreTarget, restore_ova};
use coldrise_inventory::{VirtualSystem, configured_name, find_disk};
use coldrise_session::{Catalog, PointOfMark, ReadLease, open_live_disk, open_point_disk};
use coldrise_store::{Address, Configuration, DiskName, Repository};

use super::restore::{PROGRAM, interrupted, restored};
use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::Report;
use coldrise_hosting::tell_newer;

/// Purpose of the key that the ids of disks in an OVA are derived from; it never changes.
const IDENTITY: &str = "ova identity";

/// A machine at one time.
struct State {
    address: String,
    /// The machine, or the session.
    name: String,
    display_name: Option<String>,
    configuration: Option<Configuration>,
    created_at_ms: u64,
    disks: Vec<(DiskName, Arc<dyn Disk>)>,
    _held: ReadLease,
}

/// Writes the machine, or one disk of it if the address names one.
///
/// # Errors
/// As of [`restore_ova`].
pub(super) fn run(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    address: &Address,
    target: &RestoreTarget,
    force: bool,
    cancel: &AtomicBool,
) -> Result<Report> {
    if matches!(target, RestoreTarget::Path(path) if path.as_os_str() == "-") {
        let text =
            "an OVA cannot be written to standard output: its start is known only at the end";
        return Err(Error::new(ErrorKind::InvalidInput, text).advise("name a file: x.ova"));
    }
    let point = PointOfMark::of(repository, address)?;
    let state = match &point.address {
        Address::Point { machine, selector, disk } => {
            let catalog = Catalog::new(repository);
            let mut point = catalog.point(machine, selector)?;
            tell_newer(invocation.caller()?, &catalog, selector, &point);
            disk.as_ref().map(|name| find_disk(&point, name)).transpose()?;
            let held = ReadLease::point(repository, PROGRAM, &mut point)?;
            let names = point.disks.iter().map(|disk| disk.name.clone());
            State {
                address: format!("{machine}/{}", point.point),
                name: machine.to_string(),
                display_name: point.display_name.clone().map(String::from),
                configuration: point.configuration.clone(),
                created_at_ms: point.created_at_ms,
                disks: opened(names, disk.as_ref(), |name| {
                    open_point_disk(repository, &point, name)
                })?,
                _held: held,
            }
        }
        // It has become a point.
        Address::Marked { .. } => return Err(Error::new(ErrorKind::Internal, "a time mark")),
        Address::Live { session, disk } => {
            let document = coldrise_session::session(repository, session)?.document;
            let held = ReadLease::session(repository, PROGRAM, &document)?;
            // A name that the session does not have is an error of opening it.
            let names = match disk {
                Some(name) => vec![name.clone()],
                None => document.disks.iter().map(|disk| disk.name.clone()).collect(),
            };
            State {
                address: format!("live/{session}"),
                name: session.to_string(),
                display_name: None,
                configuration: document.configuration.clone(),
                created_at_ms: document.created_at_ms,
                disks: opened(names.into_iter(), None, |name| {
                    open_live_disk(repository, session, name)
                })?,
                _held: held,
            }
        }
    };
    let mut system = VirtualSystem::of(state.configuration.as_ref()).or_else(|error| {
        invocation
            .remark(&format!("warning: the OVA has plain hardware: {}", error.full_message()));
        VirtualSystem::of(None)
    })?;
    let configured = || state.configuration.as_ref().and_then(configured_name).map(String::from);
    system.name = state.display_name.clone().or_else(configured);
    let seed = |disk: &DiskName| {
        let material = format!("{}/{}/{disk}", state.address, state.created_at_ms);
        *repository.derive_key(IDENTITY, material.as_bytes())
    };
    let disks = state.disks.iter().map(|(name, disk)| OvaDisk {
        name: name.as_str(),
        disk: disk.as_ref(),
        seed: seed(name),
    });
    let ova = Ova {
        name: &state.name,
        system: &system,
        disks: disks.collect(),
        modified_unix_seconds: state.created_at_ms / 1000,
    };
    let options = RestoreOptions { format: None, threads: 0, force };
    let view = ProgressView::new(invocation);
    let done = restore_ova(&ova, target, &options, &view, cancel);
    drop(view);
    let written_bytes = done.map_err(|error| interrupted(error, target))?;
    let size_bytes = state.disks.iter().map(|(_, disk)| disk.size_bytes()).sum();
    Ok(restored(invocation, state.address, target, "ova", size_bytes, written_bytes))
}

/// All disks, or the named one.
fn opened(
    names: impl Iterator<Item = DiskName>,
    named: Option<&DiskName>,
    open: impl Fn(&DiskName) -> Result<Arc<dyn Disk>>,
) -> Result<Vec<(DiskName, Arc<dyn Disk>)>> {
    let names = names.filter(|name| named.is_none_or(|named| named == name));
    names.map(|name| open(&name).map(|disk| (name, disk))).collect()
}
