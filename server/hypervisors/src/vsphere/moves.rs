//! Moves a recovered machine to production storage while it runs: Storage vMotion, done by vCenter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Phase, Progress, ProgressState, Result};
use coldrise_session::SessionNotes;
use coldrise_store::{Repository, SessionName};

use super::Vsphere;
use super::client::Client;
use super::inventory::{self, Datastore, Machine};
use super::note::{VsphereNote, VspherePhase};
use super::soap::Reference;
use super::task::{self, Watch, await_end};

/// A copy over a slow network takes long.
const MOVE_PATIENCE: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long a seal may wait for the NFS server.
const SEAL_PATIENCE: Duration = Duration::from_secs(30);

/// A move that a user asks for.
pub struct VsphereMoveRequest<'a> {
    /// The repository.
    pub repository: &'a Arc<Repository>,
    /// The session.
    pub session: &'a SessionName,
    /// The name of the datastore; `None` to follow or finish a move that was interrupted.
    pub target: Option<&'a str>,
    /// Set to cancel the move.
    pub cancel: &'a AtomicBool,
    /// Shows the progress, which vCenter tells in percent.
    pub progress: &'a dyn Progress,
    /// Tells people about the steps.
    pub tell: &'a dyn Fn(&str),
}

/// The result of a move.
pub struct VsphereMove {
    /// The name of the machine.
    pub name: String,
    /// The name of the datastore.
    pub target: String,
    /// The restore point of the session's last state; `None` if it is not sealed yet.
    pub point: Option<String>,
}

/// Moves the machine of a session, or finishes a move that was interrupted.
///
/// # Errors
/// `Unsupported` without a vCenter; `NotFound` for an unknown datastore; `Interrupted` if the user cancelled; those of
/// the server. The machine runs on the session then, unless the message says something else.
pub fn move_machine(request: &VsphereMoveRequest<'_>) -> Result<VsphereMove> {
    let notes = SessionNotes::of(request.repository, request.session)?;
    let _lock = super::lock(&notes, request.session)?;
    let note = VsphereNote::read(&notes)?.ok_or_else(|| {
        let text = format!("no machine was recovered on session {}", request.session);
        Error::new(ErrorKind::NotFound, text)
    })?;
    let is_cancelled = || request.cancel.load(Ordering::SeqCst);
    let vsphere = Vsphere::login(&note.access, &is_cancelled)?;
    let mut running = MoveRun { request, vsphere, notes, note };
    running.run()
}

struct MoveRun<'a> {
    request: &'a VsphereMoveRequest<'a>,
    vsphere: Vsphere<'a>,
    notes: SessionNotes,
    note: VsphereNote,
}

impl MoveRun<'_> {
    fn run(&mut self) -> Result<VsphereMove> {
        if !self.note.is_moved() {
            let copied = self.copy();
            copied.map_err(|error| self.advise_following(error))?;
        }
        self.finish()
    }

    fn client(&self) -> &Client<'_> {
        &self.vsphere.client
    }

    /// Starts the copy, or follows one that runs. Afterwards the note says "moved".
    fn copy(&mut self) -> Result<()> {
        let machine = self.machine()?;
        let hosts = inventory::hosts(self.client())?;
        let ours = self.vsphere.datastore_of(&hosts, &self.note)?;
        let is_here = |machine: &Machine| {
            ours.as_ref().is_some_and(|ours| machine.datastores.contains(&ours.reference))
        };
        let running = task::running(self.client(), &machine.reference, ".relocate")?;
        match (running.first(), is_here(&machine)) {
            (Some(running), _) => {
                (self.request.tell)("the machine is already being moved: following that task");
                self.follow(running)?;
            }
            (None, true) => self.begin(&machine)?,
            // An interrupted command, or the vSphere client, has moved it.
            (None, false) => {}
        }
        let machine = self.machine()?;
        if is_here(&machine) {
            self.set_phase(VspherePhase::Running)?;
            let text = format!("{} still has files on {}", machine.name, self.note.datastore);
            return Err(Error::new(ErrorKind::Incomplete, text).advise(
                "remove its snapshots and the ISO images of its drives that are there; then move it again",
            ));
        }
        let places = inventory::datastores(self.client(), &machine.datastores)?;
        let names: Vec<String> = places.into_iter().map(|place| place.name).collect();
        self.set_phase(VspherePhase::Moved { target: names.join(", "), point: None })
    }

    fn machine(&self) -> Result<Machine> {
        let gone = || {
            let text =
                format!("{} is not registered at {}", self.note.name, self.note.access.server);
            Error::new(ErrorKind::NotFound, text).advise(format!(
                "coldrise recover live/{} --to vcenter:{}",
                self.request.session, self.note.access.server
            ))
        };
        let reference = self.note.machine.as_ref().ok_or_else(gone)?;
        inventory::machine(self.client(), reference)?.ok_or_else(gone)
    }

    fn set_phase(&mut self, phase: VspherePhase) -> Result<()> {
        self.note.phase = phase;
        self.note.write(&self.notes)
    }

    fn begin(&mut self, machine: &Machine) -> Result<()> {
        let Some(name) = self.request.target else {
            if matches!(self.note.phase, VspherePhase::Moving { .. }) {
                self.set_phase(VspherePhase::Running)?;
            }
            let text = format!("{} runs on session {}", machine.name, self.request.session);
            return Err(
                Error::new(ErrorKind::InvalidInput, text).advise("give the target: --to DATASTORE")
            );
        };
        if !self.client().is_vcenter {
            let text = "a single ESXi does not move a machine while it runs: that needs vCenter and vMotion";
            return Err(Error::new(ErrorKind::Unsupported, text).advise(
                "shut the machine down, and copy its files to another datastore with the host's client",
            ));
        }
        let target = self.target(name)?;
        if self.request.cancel.load(Ordering::SeqCst) {
            let text = "cancelled; the machine runs on the session, as before";
            return Err(Error::new(ErrorKind::Interrupted, text));
        }
        self.set_phase(VspherePhase::Moving { target: target.name.clone() })?;
        let body = format!("<spec>{}</spec>", target.reference.element("datastore"));
        let asked = self.client().call_for_reference("RelocateVM_Task", &machine.reference, &body);
        match asked {
            Ok(task) => self.follow(&task),
            Err(error) => {
                let error = error.context(format!("moving {} to {}", machine.name, target.name));
                // Without an answer, it is unknown whether it was begun.
                if error.kind() != ErrorKind::Io {
                    self.set_phase(VspherePhase::Running)?;
                }
                Err(error)
            }
        }
    }

    /// The datastore of that name that the machine's host has.
    fn target(&self, name: &str) -> Result<Datastore> {
        let hosts = inventory::hosts(self.client())?;
        let chosen = inventory::choose(&hosts, &self.note.hosts)?;
        let references: Vec<Reference> =
            chosen.first().map(|host| host.datastores.clone()).unwrap_or_default();
        let mut found = inventory::datastores(self.client(), &references)?;
        found.retain(|datastore| !super::is_ours(datastore, &self.note));
        let names: Vec<&str> = found.iter().map(|datastore| datastore.name.as_str()).collect();
        let missing = Error::new(
            ErrorKind::NotFound,
            format!("the host has no datastore {name}; it has: {}", names.join(", ")),
        );
        found.into_iter().find(|datastore| datastore.name == name).ok_or(missing)
    }

    /// Follows a move to its end, or cancels it.
    fn follow(&mut self, task: &Reference) -> Result<()> {
        let session = coldrise_session::session(self.request.repository, self.request.session)?;
        let mut watch = MoveWatch {
            task,
            cancel: self.request.cancel,
            progress: self.request.progress,
            name: &self.note.name,
            total_bytes: session.document.disks.iter().map(|disk| disk.size_bytes).sum(),
            is_cancelled: false,
        };
        let what = format!("moving {}", self.note.name);
        match await_end(&self.vsphere.client, task, &what, MOVE_PATIENCE, &mut watch) {
            Ok(_) => Ok(()),
            // We do not know how it ends.
            Err(error) if matches!(error.kind(), ErrorKind::Io | ErrorKind::Incomplete) => {
                Err(error)
            }
            Err(error) => {
                self.set_phase(VspherePhase::Running)?;
                Err(error.context("not moved; the machine runs on the session, as before"))
            }
        }
    }

    fn advise_following(&self, error: Error) -> Error {
        match (&self.note.phase, error.kind()) {
            (VspherePhase::Moving { .. }, ErrorKind::Io | ErrorKind::Incomplete) => {
                error.advise(format!("coldrise move live/{} follows it", self.request.session))
            }
            _ => error,
        }
    }

    /// Removes the datastore, and seals the session: the machine no longer writes it.
    fn finish(&mut self) -> Result<VsphereMove> {
        let hosts = inventory::hosts(self.client())?;
        if let Some(datastore) = self.vsphere.datastore_of(&hosts, &self.note)? {
            self.vsphere.release(&self.note, &datastore.reference)?;
        }
        let VspherePhase::Moved { target, mut point } = self.note.phase.clone() else {
            return Err(Error::new(ErrorKind::Internal, "a move ends before it is done"));
        };
        if point.is_none() {
            let request = self.request;
            match coldrise_session::seal(request.repository, request.session, SEAL_PATIENCE) {
                Ok(sealed) => {
                    point = Some(format!("{}/{}", sealed.point.machine, sealed.point.point));
                    self.set_phase(VspherePhase::Moved {
                        target: target.clone(),
                        point: point.clone(),
                    })?;
                }
                Err(error) => (request.tell)(&format!(
                    "warning: the session's last state is not sealed: {}",
                    error.full_message()
                )),
            }
        }
        Ok(VsphereMove { name: self.note.name.clone(), target, point })
    }
}

/// Shows the progress, and cancels the task if the user asks for it.
struct MoveWatch<'a> {
    task: &'a Reference,
    cancel: &'a AtomicBool,
    progress: &'a dyn Progress,
    name: &'a str,
    total_bytes: u64,
    is_cancelled: bool,
}

impl Watch for MoveWatch<'_> {
    fn look(&mut self, client: &Client<'_>, percent: u64) -> Result<()> {
        let done_bytes = self.total_bytes / 100 * percent;
        self.progress.update(&ProgressState {
            phase: Phase::Moving,
            disk: self.name,
            done_bytes,
            total_bytes: self.total_bytes,
            read_bytes: done_bytes,
            stored_bytes: 0,
        });
        if self.cancel.load(Ordering::SeqCst) && !self.is_cancelled {
            self.is_cancelled = true;
            // It may have ended by itself; its state says how.
            if let Err(error) = client.call("CancelTask", self.task, "") {
                tracing::warn!("{}", error.full_message());
            }
        }
        Ok(())
    }
}
