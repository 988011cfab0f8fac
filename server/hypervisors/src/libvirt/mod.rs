//! A recovered machine under libvirt: a transient domain on a session that this host serves over NBD.
//!
//! ```text
//!   publish ─▶ serve the session on a Unix socket ─▶ note "recovery" ─▶ virsh create
//!   the server died: the domain is paused (error_policy=stop) ─▶ serve again ─▶ virsh resume
//! ```
//!
//! # A crash at each step
//!
//! The note is written before the domain exists, and has the domain's whole text. So after a crash anywhere, `recover`
//! of the session serves it again at the same socket, and resumes the domain or creates it; `recover --undo` ends it.
//! A transient domain is gone with its host; the session has every write that was flushed. libvirt refuses a
//! second domain of the same name or UUID, so no step starts a machine twice.
//!
//! Another machine of the same name may start, such as the original one, with the same UUID. So a domain is
//! ours only if one of its disks is an export of the session at the note's socket. No other one is resumed, paused or
//! ended.

mod default_domain;
mod devices;
mod domain_xml;
mod left_machines;
mod live_domain;
mod part_files;
mod presence;
mod tpm;
mod uefi;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_session::SessionNotes;
use coldrise_store::{MachineName, Repository, SessionName};
use serde::{Deserialize, Serialize};

use crate::virsh::Virsh;

pub use default_domain::default_domain;
pub use domain_xml::{
    DomainOptions, DomainXml, NetworkChoice, VariablesPlace, check_domain, escaped, rewrite,
};
pub use left_machines::{LeftMachine, RemovedMachines, left_on, note_left, remove_left};
pub use live_domain::{
    LiveDomain, WritableDisk, all_domains, domains, find_domain, find_running, is_named_by_another,
};
pub use part_files::PartFiles;
pub use presence::missing;
pub use tpm::{check_tpm, own_tpm};
pub use uefi::NotedVariables;

/// For one request. Starting a domain on a busy host takes seconds.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How long libvirt may take to start a machine: it probes QEMU first, which takes long on a busy host. It continues
/// after our time limit.
const START_PATIENCE: Duration = Duration::from_secs(300);
const NAME: &str = "recovery";

/// The document that says which domain runs on a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryNote {
    /// The host of the repository that runs it; `None` for this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<MachineName>,
    /// The URI of libvirt.
    pub connect: String,
    /// The domain's name.
    pub name: String,
    /// The NBD server's socket, as the domain finds it.
    pub socket: PathBuf,
    /// For `virsh create`.
    pub xml: String,
    /// The variables of its firmware; `None` without UEFI, and in notes of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variables: Option<NotedVariables>,
    /// The state of its TPM; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<PathBuf>,
}

impl RecoveryNote {
    /// Reads the note of a session.
    ///
    /// # Errors
    /// `Corrupt` if it does not authenticate.
    pub fn read(notes: &SessionNotes) -> Result<Option<RecoveryNote>> {
        notes.read_json(NAME)
    }

    /// Writes it, durably.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn write(&self, notes: &SessionNotes) -> Result<()> {
        notes.write_json(NAME, self)
    }

    /// The state of the session's machine; `None` if another machine has its name.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not answer.
    pub fn state(&self, host: &Host, session: &SessionName) -> Result<Option<DomainState>> {
        let domain = self.domain(host);
        let state = domain.state()?;
        if state == DomainState::Off {
            return Ok(Some(state));
        }
        match domain.virsh.run(&["dumpxml", &self.name], PATIENCE) {
            Ok(text) => Ok(self.is_own(session, &text)?.then_some(state)),
            // It may have ended in between.
            Err(_) if domain.state()? == DomainState::Off => Ok(Some(DomainState::Off)),
            Err(error) => Err(error),
        }
    }

    /// Whether a domain has a disk of the session.
    fn is_own(&self, session: &SessionName, text: &str) -> Result<bool> {
        let document = roxmltree::Document::parse(text).map_err(|error| {
            Error::with_source(ErrorKind::ToolFailed, "libvirt's XML is not well-formed", error)
        })?;
        let (export, socket) = (format!("live/{session}/"), self.socket.to_string_lossy());
        let disks = document.descendants().filter(|node| node.has_tag_name("disk"));
        let mut sources =
            disks.flat_map(|disk| disk.children()).filter(|node| node.has_tag_name("source"));
        Ok(sources.any(|source| {
            source.attribute("name").is_some_and(|name| name.starts_with(&export))
                && source.children().any(|host| host.attribute("socket") == Some(&*socket))
        }))
    }

    /// The error while another machine has the name.
    pub fn name_is_taken(&self) -> Error {
        let text = format!(
            "the domain {} runs already, and is another machine: it has no disk of this session",
            self.name
        );
        Error::new(ErrorKind::Busy, text)
    }

    /// Its domain.
    pub fn domain(&self, host: &Host) -> Domain {
        Domain { virsh: Virsh::at(host, &self.connect), name: self.name.clone() }
    }
}

/// Checks that no session has a machine on a host that is about to be removed: nothing would find that machine any more.
///
/// # Errors
/// `Busy` then; those of the notes.
pub fn check_no_machines_on(repository: &Arc<Repository>, host: &MachineName) -> Result<()> {
    let mut names = Vec::new();
    for session in coldrise_session::sessions(repository)? {
        let name = session.document.name;
        let note = RecoveryNote::read(&SessionNotes::of(repository, &name)?)?;
        if note.is_some_and(|note| note.host.as_ref() == Some(host)) {
            names.push(format!("live/{name}"));
        }
    }
    let Some(first) = names.first() else { return Ok(()) };
    let text = format!("machines of {} were recovered on host {host}", names.join(", "));
    Err(Error::new(ErrorKind::Busy, text).advise(format!(
        "end them first: coldrise recover {first} --undo, with --without-server if the host is gone for good; after a move coldrise unpublish; \
         if it only has a new key: coldrise host remove {host} --force, coldrise host add"
    )))
}

/// A domain of libvirt, existing or not.
pub struct Domain {
    pub(crate) virsh: Virsh,
    pub(crate) name: String,
}

/// The state of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DomainState {
    /// There is none of this name, or it is off.
    Off,
    /// It runs.
    Running,
    /// It is paused because its disks could not be read or written.
    DiskError,
    /// It is paused for another reason, which libvirt tells.
    Paused(String),
}

impl Domain {
    /// A domain by name or UUID.
    pub fn new(virsh: &Virsh, name: impl Into<String>) -> Domain {
        Domain { virsh: virsh.clone(), name: name.into() }
    }

    /// Asks for its state.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not answer.
    pub fn state(&self) -> Result<DomainState> {
        if !self.is_listed()? {
            return Ok(DomainState::Off);
        }
        let state = match self.virsh.run(&["domstate", "--reason", &self.name], PATIENCE) {
            Ok(state) => state,
            // Libvirt may have ended in between, and not the domain.
            Err(error) if self.is_listed()? => return Err(error),
            Err(_) => return Ok(DomainState::Off),
        };
        let state = state.trim();
        Ok(match state.split_once(" (") {
            Some(("paused", "I/O error)")) => DomainState::DiskError,
            Some(("running" | "idle" | "in shutdown", _)) => DomainState::Running,
            Some(("shut off" | "crashed", _)) => DomainState::Off,
            _ => DomainState::Paused(state.chars().take(60).collect()),
        })
    }

    /// Whether it runs, or is paused. A list fails only if libvirt does; the state of an unknown domain would fail, too.
    fn is_listed(&self) -> Result<bool> {
        let listed = self.virsh.run(&["list", "--name", "--uuid"], PATIENCE)?;
        let mut names = listed.lines().map(|line| line.trim().split_once(' ').unwrap_or_default());
        Ok(names.any(|(uuid, name)| [uuid, name.trim()].contains(&self.name.as_str())))
    }

    /// The number of requests that its disks have answered, by the name of the disk in the domain.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not answer.
    pub fn answered(&self) -> Result<HashMap<String, u64>> {
        let text = self.virsh.run(&["domstats", "--block", "--raw", &self.name], PATIENCE)?;
        Ok(answered_in(&text))
    }

    /// Creates a transient domain, which runs when this returns.
    ///
    /// # Errors
    /// `ToolFailed` with libvirt's reason.
    pub fn create(&self, xml: &str) -> Result<()> {
        let words = ["create", "/dev/stdin"];
        let created = self.virsh.run_with(&words, Some(xml), START_PATIENCE);
        created.map(drop).map_err(|error| {
            let message = error.full_message();
            if message.contains("isconnected from") || message.contains("connect to the hypervisor") {
                return error;
            }
            let advice = if message.contains("find any firmware") {
                "the machine starts by UEFI: install its firmware on this host (Debian: apt install ovmf)"
            } else if message.contains("already defined with uuid") {
                "the original is defined on this host: recover the machine under its name, or with --new-uuid"
            } else if message.contains("etwork not found") || message.contains("interface MTU on") {
                "the host does not have that network: choose another one, or none (virsh net-list --all shows those of libvirt)"
            } else {
                "to start it with plain hardware instead of the stored configuration: --default-hardware"
            };
            error.advise(advice)
        })
    }

    /// Lets it run on.
    ///
    /// # Errors
    /// `ToolFailed` with libvirt's reason.
    pub fn resume(&self) -> Result<()> {
        self.virsh.run(&["resume", &self.name], PATIENCE).map(drop)
    }

    /// Pauses it.
    ///
    /// # Errors
    /// `ToolFailed` with libvirt's reason.
    pub fn suspend(&self) -> Result<()> {
        self.virsh.run(&["suspend", &self.name], PATIENCE).map(drop)
    }

    /// Ends it at once, as a power cut does. It may have ended by itself.
    ///
    /// # Errors
    /// `ToolFailed` with libvirt's reason.
    pub fn destroy(&self) -> Result<()> {
        match self.virsh.run(&["destroy", &self.name], PATIENCE) {
            Err(error) if self.state()? != DomainState::Off => Err(error),
            _ => Ok(()),
        }
    }
}

/// Reads lines such as `block.0.name=vda` and `block.0.wr.reqs=7`.
fn answered_in(text: &str) -> HashMap<String, u64> {
    let (mut names, mut counts) = (HashMap::new(), HashMap::<&str, u64>::new());
    for line in text.lines() {
        let Some((key, value)) = line.trim().strip_prefix("block.").and_then(|l| l.split_once('='))
        else {
            continue;
        };
        match key.split_once('.') {
            Some((number, "name")) => drop(names.insert(number, value)),
            Some((number, "rd.reqs" | "wr.reqs" | "fl.reqs")) => {
                *counts.entry(number).or_default() += value.parse::<u64>().unwrap_or(0);
            }
            _ => {}
        }
    }
    let count = |number| counts.get(number).copied().unwrap_or(0);
    names.into_iter().map(|(number, name)| (name.to_owned(), count(number))).collect()
}
