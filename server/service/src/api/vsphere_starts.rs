//! Starting recoveries under vCenter and ESXi, with what is configured there: see [`crate::hypervisors`].
//!
//! These write to no path of the service's host, so operators of the machine may start them.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::vsphere::VsphereNote;
use coldrise_store::{Address, SessionName};

use super::production::{check_text, Move, Recover};
use super::starts::{live, new_session, Command};
use crate::access::{Identity, Permission};
use crate::hypervisors::{vsphere_note, Hypervisor};
use crate::invalid::invalid;
use crate::service::Service;

/// Maximum number of hosts that get a machine's datastore.
const MAX_HOSTS: usize = 64;

impl Recover {
    /// `to`: vcenter:NAME or esxi:NAME.
    pub(super) fn under_vsphere(
        self,
        service: &Service,
        caller: &Identity,
        to: &str,
    ) -> Result<Command> {
        caller.allow(Permission::Operate)?;
        let (kind, name) = to.split_once(':').unwrap_or_default();
        let hypervisor = service.database.hypervisor(name)?;
        let known = hypervisor.settings.kind.word();
        if kind != known {
            return Err(invalid(format!("to: {name} is configured as {known}:{name}")));
        }
        if self.connect.is_some() {
            return Err(invalid("connect: goes with libvirt"));
        }
        if self.network.as_deref().is_some_and(|network| !["none", "same"].contains(&network)) {
            return Err(invalid(
                "network: give none or same; choose networks in the vSphere client",
            ));
        }
        if self.hosts.len() > MAX_HOSTS {
            return Err(invalid(format!("hosts: give at most {MAX_HOSTS}")));
        }
        for host in &self.hosts {
            check_text(host)?;
        }
        let (machine, address) = self.subject(service, caller)?;
        if let Address::Live { session, .. } = self.address.parse::<Address>()? {
            check_server(service, &session, &hypervisor)?;
        }
        let session = new_session(service, self.name)?;
        if let Some(name) = &session {
            // It must not take the name of a machine that the caller does not see.
            caller.allow_machine(Permission::Operate, name.as_str())?;
        }
        let to = format!("{known}:{}", hypervisor.settings.address);
        let command = Command::new("recover", Some(machine)).option("to", Some(to));
        let mut command = with_access(service, command, &hypervisor)?
            .option("nfs-server", hypervisor.settings.nfs_server)
            .option("name", session)
            .flag("new-uuid", self.new_uuid)
            .option("network", self.network);
        for client in &hypervisor.settings.allow {
            command = command.option("allow", Some(client));
        }
        for host in self.hosts {
            command = command.option("host", Some(host));
        }
        Ok(command.words([address]))
    }
}

/// A session goes on where it was started.
fn check_server(service: &Service, session: &SessionName, hypervisor: &Hypervisor) -> Result<()> {
    let Some(note) = vsphere_note(service, session)? else {
        let text = format!("no machine was recovered under vCenter or ESXi on session {session}");
        return Err(Error::new(ErrorKind::NotFound, text));
    };
    if note.access.server != hypervisor.settings.address {
        let text = format!("the machine of session {session} is at {}", note.access.server);
        return Err(invalid(text));
    }
    Ok(())
}

impl Move {
    /// Of a machine that was recovered under vCenter.
    pub(super) fn datastore_command(
        self,
        service: &Service,
        caller: &Identity,
        session: &SessionName,
    ) -> Result<Command> {
        let found = live(service, caller, Permission::Operate, session)?;
        if !self.targets.is_empty() || self.rate_bytes_per_second.is_some() || self.replace {
            return Err(invalid("vCenter moves this machine to a datastore: give `to` alone"));
        }
        self.to.as_deref().map(check_text).transpose()?;
        Ok(Command::new("move", Some(found.machine))
            .option("to", self.to)
            .words([format!("live/{session}")]))
    }
}

/// The recovery under vSphere on a session that the caller may see; `None` without one.
pub(super) fn vsphere_note_of(
    service: &Service,
    caller: &Identity,
    session: &SessionName,
) -> Result<Option<VsphereNote>> {
    live(service, caller, Permission::Operate, session)?;
    vsphere_note(service, session)
}

/// How a command logs in. The password itself is in no argument.
fn with_access(service: &Service, command: Command, hypervisor: &Hypervisor) -> Result<Command> {
    let access = hypervisor.access(&service.options)?;
    Ok(command
        .option("user", Some(access.user))
        .option("password-file", access.password_file.map(|path| path.display().to_string()))
        .option("thumbprint", access.thumbprint)
        .option("certificate", access.certificate.map(|path| path.display().to_string())))
}

/// The same by the server's address. A server that is not configured is logged in to as the session's note says.
pub(super) fn with_known_access(
    service: &Service,
    command: Command,
    server: &str,
) -> Result<Command> {
    let known = service.database.hypervisors()?;
    match known.into_iter().find(|one| one.settings.address == server) {
        Some(hypervisor) => with_access(service, command, &hypervisor),
        None => Ok(command),
    }
}
