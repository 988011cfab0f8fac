//! A recovered machine under vCenter or ESXi: its files come from our NFS server, then move to production storage.
//!
//! ```text
//!   publish ─▶ note "starting" ─▶ serve NFS ─▶ CreateNasDatastore on each host ─▶ RegisterVM_Task
//!     ─▶ ReconfigVM_Task (no network) ─▶ PowerOnVM_Task, questions answered ─▶ note "running"
//!   move: note "moving" ─▶ RelocateVM_Task ─▶ note "moved" ─▶ RemoveDatastore ─▶ seal
//!   undo: PowerOffVM_Task ─▶ UnregisterVM ─▶ RemoveDatastore ─▶ note removed ─▶ the session ends
//! ```
//!
//! # Invariants
//!
//! 1. The note is durable before the first change on the server, and is removed after the last one is undone. It names
//!    server, user, hosts, NFS server and path.
//! 2. What exists is asked from the server, never concluded from the note. Our datastore is that with our NFS server
//!    and path. It has a folder for each session: our machine is the one whose .vmx is in it.
//! 3. A machine is unregistered before its datastore is removed: ESXi keeps an unreachable datastore with a
//!    registered machine forever. Other sessions use the same datastore; the last one removes it.
//! 4. The session ends only after its machine is unregistered.
//!
//! # A crash at each step
//!
//! | we die after | on the server | `recover live/S` | `recover --undo` |
//! |---|---|---|---|
//! | the note | nothing | continues | removes the note |
//! | a datastore was made | it, on some hosts | makes the others | removes it |
//! | RegisterVM was asked | the task continues | waits for it | waits for it, unregisters |
//! | PowerOn was asked | the task continues, perhaps with a question | waits, answers | cancels the question, powers off |
//! | RelocateVM was asked | the task continues | refuses | refuses: `move live/S` follows the task |
//! | the note says "moved" | the datastore, without the machine | refuses | refuses: `move live/S` removes it and seals |
//! | the machine was unregistered | the datastore | begins again | removes the rest |
//!
//! One process at a time changes a recovery: it holds the lock of the notes.

mod client;
mod inventory;
mod moves;
mod note;
mod overview;
mod soap;
mod task;
mod undo;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::{NotesLock, SessionNotes};
use coldrise_store::{Repository, SessionName};

use client::Client;
pub use client::{AccessOptions, PASSWORD_VARIABLE, VsphereAccess};
use inventory::{Datastore, Host, Machine};
pub use moves::{VsphereMove, VsphereMoveRequest, move_machine};
pub use note::{VsphereNote, VspherePhase};
pub use overview::{ListedDatastore, ListedHost, VsphereOverview, overview};
use soap::{Reference, element};
use task::{Identity, Patience, Questions, await_end};

/// Maximum length of a datastore's name, in characters.
const MAX_DATASTORE_CHARS: usize = 42;
/// For registering, reconfiguring and powering off.
const TASK_PATIENCE: Duration = Duration::from_secs(120);
/// For powering on: an administrator may have to answer a question.
const POWER_ON_PATIENCE: Duration = Duration::from_secs(600);

/// The name of the datastore of an NFS server. It begins differently from what administrators choose: only a datastore
/// of this name is removed.
pub fn datastore_name(nfs_host: &str) -> String {
    // A colon has a meaning in paths of ESXi.
    format!("coldrise-{}", nfs_host.replace(':', "-")).chars().take(MAX_DATASTORE_CHARS).collect()
}

/// Takes the lock for changes of a recovery.
///
/// # Errors
/// `Busy` if another process holds it.
pub fn lock(notes: &SessionNotes, session: &SessionName) -> Result<NotesLock> {
    notes.lock()?.ok_or_else(|| {
        let text = format!("another coldrise recover or move works on session {session}");
        Error::new(ErrorKind::Busy, text).advise("wait for its end; or end it with Ctrl-C")
    })
}

/// The note of a session; `None` if no machine was recovered on it under vSphere, or the session is gone.
///
/// # Errors
/// `Corrupt` if the note does not authenticate.
pub fn recovery_note(
    repository: &Arc<Repository>,
    session: &SessionName,
) -> Result<Option<VsphereNote>> {
    match SessionNotes::of(repository, session) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        notes => VsphereNote::read(&notes?),
    }
}

/// Checks that nothing on a server uses a session.
///
/// # Errors
/// `Busy` if a machine may run on it.
pub fn check_no_machine(repository: &Arc<Repository>, session: &SessionName) -> Result<()> {
    match recovery_note(repository, session)? {
        Some(note) if !note.is_moved() => Err(Error::new(ErrorKind::Busy, note.sentence(session))),
        _ => Ok(()),
    }
}

/// The hosts that get a machine's datastore.
pub struct ChosenHosts {
    /// Their names in the inventory.
    pub names: Vec<String>,
    /// The addresses from which they reach NFS servers.
    pub addresses: Vec<IpAddr>,
}

/// A server, logged in.
pub struct Vsphere<'a> {
    client: Client<'a>,
}

/// What a step needs.
pub struct Steps<'a> {
    /// The session.
    pub session: &'a SessionName,
    /// Its notes; the caller holds the lock.
    pub notes: &'a SessionNotes,
    /// Tells people about the steps.
    pub tell: &'a dyn Fn(&str),
    /// Whether the user cancelled.
    pub is_cancelled: &'a dyn Fn() -> bool,
}

impl Steps<'_> {
    fn check_cancelled(&self) -> Result<()> {
        match (self.is_cancelled)() {
            true => Err(Error::new(ErrorKind::Interrupted, "the recovery was cancelled")),
            false => Ok(()),
        }
    }
}

impl<'a> Vsphere<'a> {
    /// Logs in. Once the user has cancelled, no request waits for longer than 5 s.
    ///
    /// # Errors
    /// `Unauthorized`; `Io` if the server does not answer; those of password and certificate.
    pub fn login(
        access: &VsphereAccess,
        is_cancelled: &'a dyn Fn() -> bool,
    ) -> Result<Vsphere<'a>> {
        Ok(Vsphere { client: Client::login(access, client::TIMEOUT, is_cancelled)? })
    }

    /// The hosts of these names; the only one if none is named.
    ///
    /// # Errors
    /// `NotFound`, `InvalidInput` if a name is needed, `Busy` if one is away.
    pub fn choose_hosts(&self, names: &[String]) -> Result<ChosenHosts> {
        let chosen = inventory::choose(&inventory::hosts(&self.client)?, names)?;
        Ok(ChosenHosts {
            addresses: chosen.iter().flat_map(|host| host.addresses.clone()).collect(),
            names: chosen.into_iter().map(|host| host.name).collect(),
        })
    }

    /// Does all steps that are not done yet, up to the machine that runs.
    ///
    /// # Errors
    /// The server's; `Interrupted`. The note says what to undo.
    pub fn start(&self, steps: &Steps<'_>, note: &mut VsphereNote) -> Result<()> {
        let client = &self.client;
        let hosts = inventory::choose(&inventory::hosts(client)?, &note.hosts)?;
        let first = hosts.first().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "the note of a recovery names no host")
        })?;
        let place = inventory::place(client, first)?;
        self.await_registration(steps, &place.folder)?;
        for host in &hosts {
            steps.check_cancelled()?;
            self.mount(host, note)?;
        }
        steps.check_cancelled()?;
        let datastore = self.datastore_of(&inventory::hosts(client)?, note)?.ok_or_else(|| {
            let text =
                format!("{} does not show the datastore {}", note.access.server, note.datastore);
            Error::new(ErrorKind::NotFound, text)
        })?;
        let machine = match self.machine_on(&datastore, steps.session)? {
            Some(machine) => machine,
            None => {
                let path = vmx_path(&datastore, steps.session);
                self.register(steps, first, &place, &path, &note.name)?
            }
        };
        note.machine = Some(machine.reference.clone());
        note.write(steps.notes)?;
        steps.check_cancelled()?;
        self.power_on(steps, &machine, note)?;
        note.phase = VspherePhase::Running;
        note.write(steps.notes)
    }

    /// Mounts the folder of the sessions on a host.
    fn mount(&self, host: &Host, note: &VsphereNote) -> Result<()> {
        let mounted = inventory::datastores(&self.client, &host.datastores)?;
        if mounted.iter().any(|datastore| is_ours(datastore, note)) {
            return Ok(());
        }
        let system = datastore_system(host)?;
        let spec = [
            element("remoteHost", &note.nfs_host),
            element("remotePath", &note.nfs_path),
            element("localPath", &note.datastore),
            element("accessMode", "readWrite"),
            element("type", "NFS"),
        ];
        let body = format!("<spec>{}</spec>", spec.concat());
        let mounted = self.client.call("CreateNasDatastore", system, &body);
        mounted.map(drop).map_err(|error| {
            let place = format!("{}:{}", note.nfs_host, note.nfs_path);
            error.context(format!("mounting {place} on {}", host.name)).advise(format!(
                "the host must reach {} at port 2049, and be among the addresses of --allow",
                note.nfs_host
            ))
        })
    }

    /// Our datastore, if a host has it.
    fn datastore_of(&self, hosts: &[Host], note: &VsphereNote) -> Result<Option<Datastore>> {
        let mut all: Vec<Reference> = Vec::new();
        for reference in hosts.iter().flat_map(|host| &host.datastores) {
            if !all.contains(reference) {
                all.push(reference.clone());
            }
        }
        let found = inventory::datastores(&self.client, &all)?;
        Ok(found.into_iter().find(|datastore| is_ours(datastore, note)))
    }

    /// The machine whose files are in the session's folder.
    fn machine_on(&self, datastore: &Datastore, session: &SessionName) -> Result<Option<Machine>> {
        let path = vmx_path(datastore, session);
        for reference in &datastore.machines {
            let machine = inventory::machine(&self.client, reference)?;
            // The list may be old.
            let is_here =
                |m: &Machine| m.path == path && m.datastores.contains(&datastore.reference);
            if let Some(machine) = machine.filter(is_here) {
                return Ok(Some(machine));
            }
        }
        Ok(None)
    }

    /// Waits for the registration that a killed command asked for.
    fn await_registration(&self, steps: &Steps<'_>, folder: &Reference) -> Result<()> {
        for running in task::running(&self.client, folder, ".registervm")? {
            // Its failure is seen by its result.
            let mut patience = Patience(steps);
            let _ = await_end(&self.client, &running, "RegisterVM", TASK_PATIENCE, &mut patience);
        }
        Ok(())
    }

    fn register(
        &self,
        steps: &Steps<'_>,
        host: &Host,
        place: &inventory::Place,
        path: &str,
        name: &str,
    ) -> Result<Machine> {
        let body = [
            element("path", path),
            element("name", name),
            element("asTemplate", "false"),
            place.pool.element("pool"),
            host.reference.element("host"),
        ];
        let what = format!("registering {path} as {name}");
        let task =
            self.client.call_for_reference("RegisterVM_Task", &place.folder, &body.concat())?;
        let machine = await_end(&self.client, &task, &what, TASK_PATIENCE, &mut Patience(steps))?;
        let machine = machine.map(|found| inventory::machine(&self.client, &found)).transpose()?;
        machine
            .flatten()
            .ok_or_else(|| Error::new(ErrorKind::ToolFailed, format!("{what} gave no machine")))
    }

    fn power_on(&self, steps: &Steps<'_>, machine: &Machine, note: &VsphereNote) -> Result<()> {
        let (client, reference) = (&self.client, &machine.reference);
        let identity = if note.has_new_uuid { Identity::New } else { Identity::Kept };
        let mut questions = Questions::new(reference, identity, steps);
        let what = format!("powering on {}", machine.name);
        // One that a killed command asked for.
        for running in task::running(client, reference, ".poweron")? {
            await_end(client, &running, &what, POWER_ON_PATIENCE, &mut questions)?;
        }
        let machine = inventory::machine(client, reference)?.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("{} was unregistered", machine.name))
        })?;
        if machine.is_on {
            return Ok(());
        }
        if !note.has_network && !machine.cards.is_empty() {
            let spec = inventory::card_changes(&machine.cards);
            let task = client.call_for_reference("ReconfigVM_Task", reference, &spec)?;
            let what = format!("disconnecting the network of {}", machine.name);
            await_end(client, &task, &what, TASK_PATIENCE, &mut Patience(steps))?;
        }
        let task = client.call_for_reference("PowerOnVM_Task", reference, "")?;
        await_end(client, &task, &what, POWER_ON_PATIENCE, &mut questions).map(drop)
    }
}

/// Where the .vmx of a session is.
fn vmx_path(datastore: &Datastore, session: &SessionName) -> String {
    format!("[{}] {session}/{session}.vmx", datastore.name)
}

fn is_ours(datastore: &Datastore, note: &VsphereNote) -> bool {
    datastore.nas.as_ref().is_some_and(|(host, path)| {
        (host.as_str(), path.as_str()) == (note.nfs_host.as_str(), note.nfs_path.as_str())
    })
}

fn datastore_system(host: &Host) -> Result<&Reference> {
    host.datastore_system.as_ref().ok_or_else(|| {
        let text = format!("the storage of the host {} cannot be changed", host.name);
        Error::new(ErrorKind::Forbidden, text)
            .advise("the user needs the privilege Host.Config.Storage")
    })
}
