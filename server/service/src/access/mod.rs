//! Who may do what.
//!
//! A request's caller is an [`Identity`]: a logged-in user, a token, or the peer of the Unix socket.
//! Its [`Role`] gives permissions, its patterns the machines it sees. Handlers ask
//! [`Identity::allow`] before they do anything; a caller that may not learn of a machine gets the
//! same answer as for a machine that does not exist.

pub(crate) mod audit;
mod limits;
pub(crate) mod logins;
mod password;
mod secret;
pub(crate) mod setup;
pub(crate) mod tokens;
pub(crate) mod users;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::database::Database;
use crate::pattern::{Pattern, any_matches};

pub(crate) use limits::LoginLimits;
pub(crate) use password::check_password;
pub(crate) use secret::{Secret, random_id, sha256};

/// The rights of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// Reads everything but users, tokens, the audit log and the content of disks.
    Viewer,
    /// A viewer that also starts and cancels runs: backup, boot check, verify, publish, seal,
    /// restore to an image file; and reads the content of disks.
    Operator,
    /// Everything: also deletes, restores over devices, changes jobs, users and tokens.
    Admin,
    /// Starts backups of its machines and sees their runs. It can neither read nor delete.
    Backup,
    /// Reads the metrics.
    Metrics,
}

/// The right that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permission {
    /// Machines, points, sessions, jobs, space, alarms.
    View,
    /// Runs and their logs.
    ViewRuns,
    /// The bytes of disks, and screenshots.
    ReadContent,
    /// Start backups.
    Backup,
    /// Start and cancel other runs that delete nothing.
    Operate,
    /// Delete, overwrite devices, change settings, jobs, users and tokens; read the audit log.
    Administer,
    /// Read the metrics.
    Metrics,
}

impl Role {
    /// Whether the role has the permission. The whole table is here.
    fn has(self, permission: Permission) -> bool {
        use Permission::{Administer, Backup, Metrics, View, ViewRuns};
        match self {
            Role::Admin => true,
            Role::Operator => permission != Administer,
            Role::Viewer => matches!(permission, View | ViewRuns | Metrics),
            Role::Backup => matches!(permission, Backup | ViewRuns),
            Role::Metrics => permission == Metrics,
        }
    }

    /// The stored word.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Role::Viewer => "viewer",
            Role::Operator => "operator",
            Role::Admin => "admin",
            Role::Backup => "backup",
            Role::Metrics => "metrics",
        }
    }

    /// The role of a stored word. An unknown one is refused by the caller.
    pub(crate) fn from_word(word: &str) -> Option<Role> {
        [Role::Viewer, Role::Operator, Role::Admin, Role::Backup, Role::Metrics]
            .into_iter()
            .find(|role| role.word() == word)
    }
}

/// How a caller proved who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// The cookie of a login, by the login's id.
    Login(String),
    /// A token.
    Token,
    /// The credentials of the Unix socket's peer.
    Peer,
}

/// The caller of a request.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// `admin1`, `token:ci`, `unix:root`; as in the audit log.
    pub(crate) name: String,
    pub(crate) role: Role,
    /// The machines that it sees.
    pub(crate) machines: Vec<Pattern>,
    pub(crate) proof: Proof,
    /// The address that it calls from.
    pub(crate) source: String,
}

impl Identity {
    /// Checks that the role has the permission, on all machines.
    ///
    /// # Errors
    /// `Forbidden` if not.
    pub(crate) fn allow(&self, permission: Permission) -> Result<()> {
        if self.role.has(permission) {
            return Ok(());
        }
        let text =
            format!("{} has the role {}, which may not do this", self.name, self.role.word());
        Err(Error::new(ErrorKind::Forbidden, text))
    }

    /// Like [`Identity::allow`], for one machine.
    ///
    /// # Errors
    /// `NotFound` if the caller may not see this machine, as for one that does not exist.
    pub(crate) fn allow_machine(&self, permission: Permission, machine: &str) -> Result<()> {
        self.allow(permission)?;
        if self.sees(machine) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NotFound, format!("there is no machine {machine}")))
    }

    /// Like [`Identity::allow`], for what concerns all machines.
    ///
    /// # Errors
    /// `Forbidden` if the caller is limited to some machines.
    pub(crate) fn allow_all(&self, permission: Permission) -> Result<()> {
        self.allow(permission)?;
        if self.sees_all() {
            return Ok(());
        }
        let text = format!("{} is limited to some machines; this concerns all", self.name);
        Err(Error::new(ErrorKind::Forbidden, text))
    }

    /// Whether the caller sees this machine.
    pub(crate) fn sees(&self, machine: &str) -> bool {
        any_matches(&self.machines, machine)
    }

    /// Whether the caller sees all machines.
    pub(crate) fn sees_all(&self) -> bool {
        self.machines.contains(&Pattern::all())
    }
}

impl Database {
    /// Whether a caller is still who it was: its token or login exists, with the same role and
    /// machines. Long answers ask this from time to time.
    pub(crate) fn is_current(&self, identity: &Identity) -> bool {
        let is_same = |role: Role, machines: &[Pattern]| {
            role == identity.role && machines == identity.machines
        };
        match &identity.proof {
            Proof::Peer => true,
            Proof::Login(id) => self.login_role(id).is_ok_and(|role| role == Some(identity.role)),
            Proof::Token => {
                let id = identity.name.trim_start_matches("token:");
                self.tokens().is_ok_and(|tokens| {
                    tokens.iter().any(|token| token.id == id && token.is_valid(is_same))
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Permission, Role};

    #[test]
    fn a_role_has_exactly_its_permissions() {
        use Permission::*;
        let all = [View, ViewRuns, ReadContent, Backup, Operate, Administer, Metrics];
        let of = |role: Role| all.into_iter().filter(|p| role.has(*p)).collect::<Vec<_>>();
        assert_eq!(of(Role::Admin), all);
        assert_eq!(of(Role::Operator), [View, ViewRuns, ReadContent, Backup, Operate, Metrics]);
        assert_eq!(of(Role::Viewer), [View, ViewRuns, Metrics]);
        assert_eq!(of(Role::Backup), [ViewRuns, Backup]);
        assert_eq!(of(Role::Metrics), [Metrics]);
    }
}
