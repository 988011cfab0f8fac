//! The end of a recovery: the machine, its registration, and the datastore, in this order.

use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};

use super::inventory::{self, Datastore, Host, Machine};
use super::note::{VsphereNote, VspherePhase};
use super::soap::Reference;
use super::task::{self, Identity, Patience, Questions, Watch, await_end};
use super::{Steps, TASK_PATIENCE, Vsphere, datastore_system};

/// How long ESXi may still use a datastore whose machine is gone.
const RELEASE_PATIENCE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(200);

impl Vsphere<'_> {
    /// Ends the machine like a power cut, and removes everything from the server. Steps that are done already are
    /// left out. Returns whether there was a machine.
    ///
    /// # Errors
    /// The server's; `Busy` while the machine is moved. The note keeps the rest.
    pub fn undo(&self, steps: &Steps<'_>, note: &VsphereNote) -> Result<bool> {
        let client = &self.client;
        let hosts = inventory::hosts(client)?;
        if let Ok([first, ..]) = inventory::choose(&hosts, &note.hosts).as_deref() {
            self.await_registration(steps, &inventory::place(client, first)?.folder)?;
        }
        let mut was_there = false;
        if let Some(datastore) = self.datastore_of(&hosts, note)? {
            match self.machine_on(&datastore, steps.session)? {
                Some(machine) => {
                    was_there = true;
                    self.end_machine(steps, note, &machine)?;
                }
                None => self.tell_elsewhere(steps, note)?,
            }
            self.release(note, &datastore.reference)?;
        }
        VsphereNote::remove(steps.notes)?;
        Ok(was_there)
    }

    /// The machine may have been moved with other tools.
    fn tell_elsewhere(&self, steps: &Steps<'_>, note: &VsphereNote) -> Result<()> {
        let Some(reference) = &note.machine else { return Ok(()) };
        if let Some(machine) = inventory::machine(&self.client, reference)? {
            (steps.tell)(&format!(
                "{} has no files on {}: it is left as it is",
                machine.name, note.datastore
            ));
        }
        Ok(())
    }

    fn end_machine(&self, steps: &Steps<'_>, note: &VsphereNote, machine: &Machine) -> Result<()> {
        let (client, reference) = (&self.client, &machine.reference);
        if !task::running(client, reference, ".relocate")?.is_empty() {
            let text = format!("{} is being moved to other storage", machine.name);
            let session = steps.session;
            return Err(Error::new(ErrorKind::Busy, text).advise(format!(
                "coldrise move live/{session} follows it; Ctrl-C cancels it there"
            )));
        }
        // A killed undo leaves the same as a killed start: any of its steps may be done.
        VsphereNote { phase: VspherePhase::Starting, ..note.clone() }.write(steps.notes)?;
        let started = Instant::now();
        loop {
            let starting = task::running(client, reference, ".poweron")?;
            let Some(now) = inventory::machine(client, reference)? else { return Ok(()) };
            match (&*starting, now.is_on) {
                ([], false) => break,
                ([], true) => {
                    let task = client.call_for_reference("PowerOffVM_Task", reference, "")?;
                    let what = format!("powering off {}", machine.name);
                    await_end(client, &task, &what, TASK_PATIENCE, &mut Patience(steps))?;
                }
                // It may wait for an answer.
                ([_, ..], _) => {
                    let mut questions = Questions::new(reference, Identity::Cancelled, steps);
                    questions.look(client, 0)?;
                    std::thread::sleep(INTERVAL);
                }
            }
            if started.elapsed() > TASK_PATIENCE {
                let text = format!("{} does not power off", machine.name);
                return Err(Error::new(ErrorKind::Incomplete, text).advise(
                    "look at its tasks in the vSphere client, then run the command again",
                ));
            }
        }
        client.call("UnregisterVM", reference, "").map(drop)
    }

    /// Removes the datastore from all hosts, unless machines of other sessions use it.
    pub(super) fn release(&self, note: &VsphereNote, reference: &Reference) -> Result<()> {
        let started = Instant::now();
        loop {
            let hosts = inventory::hosts(&self.client)?;
            let found = inventory::datastores(&self.client, std::slice::from_ref(reference));
            let datastore = match found {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                found => found?.pop(),
            };
            let Some(datastore) = datastore.filter(|found| found.name == note.datastore) else {
                return Ok(());
            };
            let mut users = Vec::new();
            for machine in &datastore.machines {
                let machine = inventory::machine(&self.client, machine)?;
                users.extend(machine.filter(|m| m.datastores.contains(reference)));
            }
            if !users.is_empty() {
                return Ok(());
            }
            let mut mounted = hosts.iter().filter(|host| host.datastores.contains(reference));
            let removed = mounted.try_for_each(|host| self.unmount(host, &datastore));
            match removed {
                // ESXi needs some time after the machine is gone.
                Err(error)
                    if error.kind() == ErrorKind::Busy && started.elapsed() < RELEASE_PATIENCE => {}
                removed => return removed,
            }
            std::thread::sleep(INTERVAL);
        }
    }

    fn unmount(&self, host: &Host, datastore: &Datastore) -> Result<()> {
        let body = datastore.reference.element("datastore");
        match self.client.call("RemoveDatastore", datastore_system(host)?, &body) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                let what = format!("removing {} from {}", datastore.name, host.name);
                Err(error.context(what).advise(
                    "see which templates and ISO images of the host are on this datastore; then run the command again",
                ))
            }
            _ => Ok(()),
        }
    }
}
