//! A machine for the service: a run that keeps it, until it was idle for long.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_runs::{FilesPoint, FilesRecord, MachineFiles};
use coldrise_session::{Catalog, check_offered};
use coldrise_store::{Address, PointDocument, Repository};

use super::machine::FilesMachine;
use crate::caller::Caller;
use crate::signals::ChildSignals;

const INTERVAL: Duration = Duration::from_millis(100);

/// Serves the machine of points in the folder of this run. It ends when no client has talked to it for
/// `idle`, or when the run is cancelled.
///
/// # Errors
/// `InvalidInput` if this process has no folder of a run; those of the machine.
pub fn serve(
    caller: &Caller,
    files: &MachineFiles,
    addresses: &[Address],
    idle: Duration,
) -> Result<()> {
    let mut signals = ChildSignals::catch()?;
    let repository = &caller.open()?;
    let points = addresses.iter().map(|address| point(repository, address));
    let points: Vec<PointDocument> = points.collect::<Result<_>>()?;
    let all: Vec<&PointDocument> = points.iter().collect();
    let folder = Some(files.qemu_folder());
    let mut machine = FilesMachine::start(caller, repository, &all, &[], folder, &mut signals)?;
    files.tell_files(&record(caller, &points, &machine)?)?;
    let served = until_unused(caller, files, &mut machine, idle, &mut signals);
    let ended = machine.end();
    match served {
        // Nothing is lost: that is how such a run ends.
        Err(error) if error.kind() == ErrorKind::Interrupted => ended,
        served => served.and(ended),
    }
}

fn until_unused(
    caller: &Caller,
    files: &MachineFiles,
    machine: &mut FilesMachine,
    idle: Duration,
    signals: &mut ChildSignals,
) -> Result<()> {
    let mut last_use = Instant::now();
    loop {
        machine.look_after(caller, signals)?;
        match files.try_use()? {
            None => last_use = Instant::now(),
            // Held until the record is gone: no client takes the machine meanwhile.
            Some(_use) if last_use.elapsed() > idle => {
                files.forget_files();
                return Ok(());
            }
            Some(_) => {}
        }
        std::thread::sleep(INTERVAL);
    }
}

fn point(repository: &Arc<Repository>, address: &Address) -> Result<PointDocument> {
    let Address::Point { machine, selector, disk: None } = address else {
        return Err(Error::new(ErrorKind::InvalidInput, "give MACHINE/POINT"));
    };
    check_offered(Catalog::new(repository).point(machine, selector)?)
}

fn record(
    caller: &Caller,
    points: &[PointDocument],
    machine: &FilesMachine,
) -> Result<FilesRecord> {
    let repository = caller.repository_path();
    let repository = repository.canonicalize().context(|| "finding the repository")?;
    let of_point = |(point, disks): (&PointDocument, &super::PointDisks)| FilesPoint {
        address: format!("{}/{}", point.machine, point.point),
        first_disk: disks.first,
        disks: disks.names.clone(),
        disk_bytes: disks.bytes,
    };
    Ok(FilesRecord {
        repository: repository.to_string_lossy().into_owned(),
        points: points.iter().zip(&machine.disks).map(of_point).collect(),
    })
}
