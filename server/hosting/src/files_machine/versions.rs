//! Looks at one path in many points.
//!
//! A machine starts in seconds and looks at one point in a fraction of one. So each machine gets the disks
//! of up to 12 points, and shows itself those of one at a time (docs/decisions/0052).

use std::cell::RefCell;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_files::{AttachedDisks, Client, FileSystems, FilesAddress, Limits, State, together};
use coldrise_session::{Catalog, check_offered};
use coldrise_store::{PointDocument, Repository};

use super::reading::{START_PATIENCE, TIME_LIMIT};
use super::{FilesMachine, PointDisks};
use crate::Caller;
use crate::signals::ChildSignals;

/// The machine offers its socket within this time.
const PORT_PATIENCE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(10);

/// Gets the state of each point.
type AddState<'a> = &'a mut dyn FnMut(&PointDocument, State);

/// Calls `add` with what each of the points has under the path of the address, in their order. The key opens encrypted disks.
///
/// # Errors
/// Those of the machine; `InvalidInput` if the address does not say which file system.
pub fn read_points(
    caller: &Caller,
    repository: &Arc<Repository>,
    mut rest: Vec<PointDocument>,
    (address, key): (&FilesAddress, &[u8]),
    signals: &mut ChildSignals,
    add: AddState<'_>,
) -> Result<()> {
    while let Some(first) = rest.first() {
        if let Err(error) = check_offered(first.clone()) {
            add(first, State::Unread(error.full_message()));
            rest.remove(0);
            continue;
        }
        let count = together(&rest);
        let (group, _) = rest.split_at(count);
        let machine = Machine { caller, repository, group, address, key };
        match machine.read(signals, add) {
            Ok(done) => drop(rest.drain(..done)),
            // Some were forgotten meanwhile: those that are there still have their versions.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let there = Catalog::new(repository).points(&first.machine)?;
                let before = rest.len();
                rest.retain(|point| there.iter().any(|found| found.point == point.point));
                if rest.len() == before {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A machine with the disks of some points.
struct Machine<'a> {
    caller: &'a Caller,
    repository: &'a Arc<Repository>,
    group: &'a [PointDocument],
    address: &'a FilesAddress,
    key: &'a [u8],
}

impl Machine<'_> {
    /// Looks at the points until the machine cannot continue. Returns how many it has looked at, at least one.
    fn read(&self, signals: &mut ChildSignals, add: AddState<'_>) -> Result<usize> {
        let points: Vec<_> = self.group.iter().collect();
        let started =
            FilesMachine::start(self.caller, self.repository, &points, &[], None, signals)?;
        let disks: Vec<PointDisks> = started
            .disks
            .iter()
            .map(|disks| PointDisks { names: disks.names.clone(), ..*disks })
            .collect();
        let machine = RefCell::new((started, signals));
        let looked = self.look(&machine, &disks, add);
        // Also after an error: QEMU ends before its disks.
        let ended = machine.into_inner().0.end();
        let done = looked?;
        ended.map(|()| done)
    }

    /// The conversation with a machine.
    fn look(
        &self,
        machine: &RefCell<(FilesMachine, &mut ChildSignals)>,
        disks: &[PointDisks],
        add: AddState<'_>,
    ) -> Result<usize> {
        let stream = {
            let mut machine = machine.borrow_mut();
            let (machine, signals) = &mut *machine;
            connect(machine, signals)?
        };
        let look_after = || {
            let mut machine = machine.borrow_mut();
            let (machine, signals) = &mut *machine;
            machine.look_after(self.caller, signals)
        };
        let limits = Limits { content_bytes: 0, time: TIME_LIMIT };
        let mut client = Client::greet(stream, START_PATIENCE, limits, look_after)?;
        let mut done = 0;
        for (point, disks) in self.group.iter().zip(disks) {
            match self.state(&mut client, point, disks) {
                Ok(state) => add(point, state),
                // The address does not say which file system.
                Err(error) if error.kind() == ErrorKind::InvalidInput => return Err(error),
                Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
                // The next machine continues with this point.
                Err(_) if done > 0 => break,
                Err(error) => {
                    add(point, State::Unread(error.full_message()));
                    return Ok(1);
                }
            }
            done += 1;
        }
        Ok(done)
    }

    /// What a point has under the path.
    ///
    /// # Errors
    /// Those after which the machine cannot be used.
    fn state(
        &self,
        client: &mut Client<'_>,
        point: &PointDocument,
        disks: &PointDisks,
    ) -> Result<State> {
        if self.group.len() > 1 {
            client.select(disks.first, disks.names.len() as u64)?;
        }
        let address = &format!("{}/{}", point.machine, point.point);
        let attached = AttachedDisks { address, names: &disks.names, is_all: true };
        let systems = FileSystems::read(client, &attached, self.key)?;
        let path = self.address.path.as_deref().unwrap_or(b"/");
        State::read(client, &systems, self.address.system.as_deref(), path)
    }
}

fn connect(machine: &FilesMachine, signals: &mut ChildSignals) -> Result<UnixStream> {
    let until = Instant::now() + PORT_PATIENCE;
    loop {
        match UnixStream::connect(&machine.port) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() > until => {
                let text = "the machine that reads the file systems did not start";
                return Err(Error::with_source(ErrorKind::ToolFailed, text, error));
            }
            Err(_) if signals.was_asked_to_end() => {
                return Err(Error::new(ErrorKind::Interrupted, "interrupted"));
            }
            Err(_) => std::thread::sleep(INTERVAL),
        }
    }
}
