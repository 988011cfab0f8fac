//! Recovered machines that were left on a host which was away when their sessions ended, and their removal once it is back.
//!
//! ```text
//!   REPOSITORY/hosts/NAME.left    the notes of the machines on that host
//!   REPOSITORY/hosts/left.lock    held while such a file is changed, and while its machines are removed
//! ```
//!
//! A machine is noted before its session ends, and forgotten after its files are gone: a crash anywhere leaves the note,
//! and removing it again does no harm. Each recovery on a host removes first what was left there, so no note is of a machine that a
//! later session has.
//!
//! Only what is proven to be the session's is removed: a domain that has a disk of the session at its socket; the
//! variables, whose file has a name that no other session has; the TPM, whose folder has the UUID of the original, only beside one of
//! these two. There was no such folder when the recovery began, and no other domain of the host may have the UUID now.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_session::SessionNotes;
use coldrise_store::{MachineName, Repository, SealedFolder, SessionName};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::tpm::folder_of;
use super::{DomainState, RecoveryNote};

const FOLDER: &str = "hosts";
const KIND: &str = "left";
const LOCK: &str = "left.lock";

/// A machine whose session has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftMachine {
    session: String,
    note: RecoveryNote,
}

/// The result of [`remove_left`], in sentences.
#[derive(Debug, Default)]
pub struct RemovedMachines {
    /// What was removed.
    pub removed: Vec<String>,
    /// What may be of another machine, and stays.
    pub staying: Vec<String>,
}

/// What is known about a left machine.
enum Outcome {
    /// Its session exists.
    HasSession,
    /// There was nothing on the host.
    NothingThere,
    Removed,
    /// The folder of a TPM that may be another machine's.
    Stays(String),
}

impl LeftMachine {
    /// For people.
    pub fn name(&self) -> String {
        format!("{} of the ended session {}", self.note.name, self.session)
    }

    fn remove(&self, repository: &Arc<Repository>, host: &Host) -> Result<Outcome> {
        let (session, note) = (SessionName::parse(&self.session)?, &self.note);
        let mut is_used = false;
        for state in coldrise_session::sessions(repository)? {
            let name = state.document.name;
            let other = match SessionNotes::of(repository, &name) {
                // It ended meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                notes => RecoveryNote::read(&notes?)?,
            };
            let Some(other) = other.filter(|other| other.host == note.host) else { continue };
            if name == session {
                return Ok(Outcome::HasSession);
            }
            is_used |= other.tpm.is_some() && other.tpm == note.tpm;
        }
        let is_domain = match note.state(host, &session)? {
            None | Some(DomainState::Off) => false,
            Some(_) => note.domain(host).destroy().map(|()| true)?,
        };
        let variables = note.variables.as_ref().map_or(Path::new("/"), |noted| &noted.place.file);
        let folder = note.tpm.as_deref().map_or(Path::new("/"), folder_of);
        let sockets = note.socket.parent().unwrap_or(&note.socket);
        let [variables, tpm, socket, sockets] =
            host.look([variables, folder, &note.socket, sockets])?;
        let has_variables = note.variables.is_some() && variables.is_some();
        let has_tpm = note.tpm.is_some() && tpm.is_some();
        let is_proven = is_domain || has_variables;
        let mut own = note.clone();
        own.tpm = own.tpm.filter(|_| is_proven && !is_used);
        let stays = match own.remove_parts(host) {
            // Another domain has the UUID now.
            Err(error) if error.kind() == ErrorKind::Busy => true,
            removed => removed.map(|()| has_tpm && own.tpm.is_none())?,
        };
        if sockets.is_some() {
            host.remove_socket(&note.socket)?;
        }
        Ok(match (stays, is_proven || socket.is_some()) {
            (true, _) => Outcome::Stays(format!(
                "{} stays: it may be another machine's, and not the TPM of {}",
                folder.display(),
                self.name()
            )),
            (false, true) => Outcome::Removed,
            (false, false) => Outcome::NothingThere,
        })
    }
}

fn lock(folder: &SealedFolder) -> Result<File> {
    let path = folder.path().join(LOCK);
    let what = || format!("locking {}", path.display());
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.context(what)?;
    flock(&file, FlockOperation::LockExclusive).map_err(std::io::Error::from).context(what)?;
    Ok(file)
}

fn noted(folder: &SealedFolder, host: &MachineName) -> Result<Vec<LeftMachine>> {
    match folder.document(host, KIND) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        noted => noted,
    }
}

/// The machines that were left on a host.
///
/// # Errors
/// `Corrupt` if the file was changed; errors of the drive.
pub fn left_on(repository: &Arc<Repository>, host: &MachineName) -> Result<Vec<LeftMachine>> {
    noted(&SealedFolder::new(repository, FOLDER), host)
}

/// Notes the machine of a session that is about to end while its host is away.
///
/// # Errors
/// `Corrupt` if the file was changed; errors of the drive.
pub fn note_left(
    repository: &Arc<Repository>,
    session: &SessionName,
    note: &RecoveryNote,
    host: &MachineName,
) -> Result<()> {
    let folder = SealedFolder::new(repository, FOLDER);
    let _lock = lock(&folder)?;
    let mut machines = noted(&folder, host)?;
    let machine = LeftMachine { session: session.to_string(), note: note.clone() };
    if !machines.contains(&machine) {
        machines.push(machine);
    }
    folder.put(host, KIND, &machines)
}

/// Removes what was left on a host, which answers now.
///
/// # Errors
/// `ToolFailed` if its libvirt does not do so; errors of the host and of the drive. What could not be removed stays noted.
pub fn remove_left(repository: &Arc<Repository>, host: &Host) -> Result<RemovedMachines> {
    let mut result = RemovedMachines::default();
    let Some(name) = host.name().map(MachineName::parse).transpose()? else { return Ok(result) };
    let folder = SealedFolder::new(repository, FOLDER);
    if !folder.has(&name, KIND) {
        return Ok(result);
    }
    let _lock = lock(&folder)?;
    let (mut kept, mut failed) = (Vec::new(), Ok(()));
    for machine in noted(&folder, &name)? {
        match machine.remove(repository, host) {
            Ok(Outcome::NothingThere) => {}
            Ok(Outcome::Removed) => {
                let text = format!("removed {}, which was left on host {name}", machine.name());
                result.removed.push(text);
            }
            Ok(Outcome::HasSession) => kept.push(machine),
            Ok(Outcome::Stays(text)) => {
                result.staying.push(text);
                kept.push(machine);
            }
            Err(error) => {
                let what = format!("removing {}, which was left there", machine.name());
                failed = Err(Error::new(error.kind(), format!("{what}: {}", error.full_message())));
                kept.push(machine);
            }
        }
    }
    match kept.is_empty() {
        true => drop(folder.remove(&name, KIND)?),
        false => folder.put(&name, KIND, &kept)?,
    }
    failed.map(|()| result)
}
