//! The note that says what was registered where.

use coldrise_block::Result;
use coldrise_session::SessionNotes;
use coldrise_store::SessionName;
use serde::{Deserialize, Serialize};

use super::client::VsphereAccess;
use super::soap::Reference;

const NAME: &str = "vsphere";

/// How far a recovery is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "phase")]
pub enum VspherePhase {
    /// Any of the steps up to power on may be done.
    Starting,
    /// The machine was powered on.
    Running,
    /// The server copies the disks to the datastore `target`.
    Moving {
        /// Its name.
        target: String,
    },
    /// All files of the machine are there.
    Moved {
        /// The name of the datastore.
        target: String,
        /// The restore point of the session's last state, once it is sealed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        point: Option<String>,
    },
}

/// The document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsphereNote {
    /// The server, and how to log in.
    #[serde(flatten)]
    pub access: VsphereAccess,
    /// The name of the machine.
    pub name: String,
    /// The machine, once it is registered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Reference>,
    /// The hosts that mount the datastore. The first one runs the machine.
    pub hosts: Vec<String>,
    /// The name of the datastore, which all sessions share.
    pub datastore: String,
    /// The NFS server, as the hosts reach it.
    pub nfs_host: String,
    /// The folder of the sessions there.
    pub nfs_path: String,
    /// Whether the network cards are connected.
    pub has_network: bool,
    /// Whether the machine gets a new UUID and new network addresses.
    pub has_new_uuid: bool,
    /// How far it is.
    #[serde(flatten)]
    pub phase: VspherePhase,
}

impl VsphereNote {
    /// Reads the note of a session.
    ///
    /// # Errors
    /// `Corrupt` if it does not authenticate.
    pub fn read(notes: &SessionNotes) -> Result<Option<VsphereNote>> {
        notes.read_json(NAME)
    }

    /// Writes it, durably.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn write(&self, notes: &SessionNotes) -> Result<()> {
        notes.write_json(NAME, self)
    }

    /// Removes it.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub(super) fn remove(notes: &SessionNotes) -> Result<()> {
        notes.remove(NAME)
    }

    /// Whether all files of the machine are on production storage.
    pub fn is_moved(&self) -> bool {
        matches!(self.phase, VspherePhase::Moved { .. })
    }

    /// Whether a later step logs in to the server.
    pub fn is_needed(&self) -> bool {
        !self.is_moved() || self.is_unfinished()
    }

    /// Whether a killed command may have left something.
    pub fn is_unfinished(&self) -> bool {
        match &self.phase {
            VspherePhase::Starting | VspherePhase::Moving { .. } => true,
            VspherePhase::Running => false,
            VspherePhase::Moved { point, .. } => point.is_none(),
        }
    }

    /// For people: where the machine is, and what to do.
    pub fn sentence(&self, session: &SessionName) -> String {
        let VsphereNote { name, access, datastore, .. } = self;
        let (server, hosts) = (&access.server, self.hosts.join(", "));
        match &self.phase {
            VspherePhase::Starting => format!(
                "the recovery of {name} at {server} on session {session} was not completed (datastore {datastore} on \
                 {hosts}): continue with coldrise recover live/{session} --to vcenter:{server}, or clean up with \
                 coldrise recover live/{session} --undo"
            ),
            VspherePhase::Running => format!(
                "{name} at {server} runs on session {session} (datastore {datastore} on {hosts}); end it with coldrise \
                 recover live/{session} --undo"
            ),
            VspherePhase::Moving { target } => format!(
                "{name} at {server} is being moved from session {session} to {target}; if no coldrise move runs: \
                 coldrise move live/{session} follows it to its end"
            ),
            VspherePhase::Moved { target, point } => {
                let end = match point {
                    Some(point) => format!("the session ends with the point {point}"),
                    None => format!("not finished: run coldrise move live/{session} again"),
                };
                format!(
                    "{name} at {server} was moved to {target}; start it there, not from session {session}; {end}"
                )
            }
        }
    }
}
