//! A conversation about one point with the machine that reads file systems.

use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_files::{AttachedDisks, Client, FileSystems, FilesAddress, Limits};
use coldrise_session::{Catalog, PointOfMark, check_offered};
use coldrise_store::{Address, PointDocument, Repository};

use super::KeptMachine;
use crate::signals::ChildSignals;
use crate::{Caller, tell_newer};

/// Time limit for the start of the machine. Without KVM and on a busy host it takes long.
pub(super) const START_PATIENCE: Duration = Duration::from_secs(180);
/// The longest conversation.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(24 * 3600);
/// A conversation about one point.
pub struct Reading {
    machine: KeptMachine,
    /// The address with the point's own name, for people.
    pub point: String,
    /// The same as it was given.
    address: String,
    /// Whether the machine has all disks of the point.
    has_all_disks: bool,
    key: Vec<u8>,
    is_to_stay: bool,
}

impl Reading {
    /// The point of an address.
    ///
    /// # Errors
    /// `NotFound`; `Busy` for a point in quarantine.
    pub fn point(
        caller: &Caller,
        repository: &Arc<Repository>,
        address: &FilesAddress,
    ) -> Result<PointDocument> {
        let catalog = Catalog::new(repository);
        let whole = PointOfMark::of(repository, &address.whole)?;
        let Address::Point { machine, selector, .. } = &whole.address else {
            return Err(Error::new(ErrorKind::Internal, "files of a session"));
        };
        let point = catalog.point(machine, selector)?;
        tell_newer(caller, &catalog, selector, &point);
        let point = check_offered(point)?;
        // The machine that reads it stays for the next command.
        whole.keep();
        Ok(point)
    }

    /// Takes the machine of the address' point, which may be starting. Unless `is_to_end`, and without a key, it stays that long
    /// for the next command.
    ///
    /// # Errors
    /// Those of starting it.
    pub fn start(
        caller: &Caller,
        point: &PointDocument,
        address: &FilesAddress,
        key: Vec<u8>,
        stay: Duration,
        is_to_end: bool,
        signals: &mut ChildSignals,
    ) -> Result<Reading> {
        // The next command has to show the key again.
        let is_to_stay = key.is_empty() && !is_to_end;
        let machine = KeptMachine::take(caller, point, &address.disks, stay, signals)?;
        Ok(Reading {
            has_all_disks: machine.disks().len() == point.disks.len(),
            machine,
            point: format!("{}/{}", point.machine, point.point),
            address: address.point(),
            key,
            is_to_stay,
        })
    }

    /// Talks with the machine, then leaves or ends it. `max_bytes` bounds the content that is taken;
    /// without it, the size of the disks does.
    ///
    /// # Errors
    /// Those of the machine and of `talk`; `Interrupted` if the program is asked to end.
    pub fn talk<T>(
        self,
        signals: &mut ChildSignals,
        max_bytes: Option<u64>,
        talk: impl FnOnce(&mut Client<'_>, &FileSystems) -> Result<T>,
    ) -> Result<T> {
        let content_bytes = max_bytes.unwrap_or(self.machine.disk_bytes());
        let limits = Limits { content_bytes, time: TIME_LIMIT };
        let disks = self.machine.disks();
        let done = self.machine.connect(signals).and_then(|stream| {
            let look_after = || match signals.was_asked_to_end() {
                true => Err(Error::new(ErrorKind::Interrupted, "interrupted")),
                false => self.machine.look_after(),
            };
            let mut client = Client::greet(stream, START_PATIENCE, limits, look_after)?;
            let attached =
                AttachedDisks { address: &self.address, names: &disks, is_all: self.has_all_disks };
            let systems = FileSystems::read(&mut client, &attached, &self.key)?;
            talk(&mut client, &systems)
        });
        // A machine that has answered nonsense is not asked again.
        let is_sound = !done.as_ref().is_err_and(|error| error.kind() == ErrorKind::ToolFailed);
        match self.is_to_stay && is_sound {
            true => self.machine.leave(),
            false => self.machine.end(),
        }
        done
    }
}
