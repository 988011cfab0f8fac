//! Starting recoveries under vCenter and ESXi, with what is configured there: see [`crate::hypervisors`].
//!
//! These write to no path of the service's host, so operators of the machine may start them.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::vsphere::VsphereNote;
use coldrise_requests::{Move, Recover, VsphereLogin};
use coldrise_store::{Address, SessionName};

use super::libvirt_starts::{check_text, subject};
use super::starts::{Command, live};
use crate::access::{Identity, Permission};
use crate::hypervisors::{Hypervisor, vsphere_note};
use crate::invalid::invalid;
use crate::service::Service;

/// Maximum number of hosts that get a machine's datastore.
const MAX_HOSTS: usize = 64;

/// `to`: vcenter:NAME or esxi:NAME.
pub(super) fn under_vsphere(
    mut request: Recover,
    service: &Service,
    caller: &Identity,
) -> Result<Command> {
    caller.allow(Permission::Operate)?;
    let to = request.to.unwrap_or_default();
    let (kind, name) = to.split_once(':').unwrap_or_default();
    let hypervisor = service.database.hypervisor(name)?;
    let known = hypervisor.settings.kind.word();
    if kind != known {
        return Err(invalid(format!("to: {name} is configured as {known}:{name}")));
    }
    request.to = Some(format!("{known}:{}", hypervisor.settings.address));
    if request.connect.is_some() || request.on.is_some() {
        return Err(invalid("connect, on: only for libvirt"));
    }
    if request.network.as_deref().is_some_and(|network| !["none", "same"].contains(&network)) {
        return Err(invalid("network: give none or same; choose networks in the vSphere client"));
    }
    if request.hosts.len() > MAX_HOSTS {
        return Err(invalid(format!("hosts: give at most {MAX_HOSTS}")));
    }
    for host in &request.hosts {
        check_text(host)?;
    }
    let machine = subject(&request, service, caller)?;
    if let Address::Live { session, .. } = request.address.parse::<Address>()? {
        check_server(service, &session, &hypervisor)?;
    }
    let login =
        VsphereLogin { nfs_server: hypervisor.settings.nfs_server, ..login(service, &hypervisor)? };
    let mut command = Command::new("recover", machine, &request)?;
    command.line = command.line.with(&login);
    for client in &hypervisor.settings.allow {
        command.line = command.line.option("allow", Some(client));
    }
    Ok(command)
}

/// A session continues where it was started.
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

/// The move of a machine that was recovered under vCenter.
pub(super) fn to_datastore(
    request: &Move,
    service: &Service,
    caller: &Identity,
    session: &SessionName,
) -> Result<Command> {
    let found = live(service, caller, Permission::Operate, session)?;
    if !request.targets.is_empty() || request.rate_bytes_per_second.is_some() || request.replace {
        return Err(invalid("vCenter moves this machine to a datastore: give `to` alone"));
    }
    request.to.as_deref().map(check_text).transpose()?;
    Command::new("move", found.machine, request)
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
fn login(service: &Service, hypervisor: &Hypervisor) -> Result<VsphereLogin> {
    let access = hypervisor.access(&service.options)?;
    Ok(VsphereLogin {
        user: Some(access.user),
        password_file: access.password_file,
        certificate: access.certificate,
        thumbprint: access.thumbprint,
        nfs_server: None,
    })
}

/// The same by the server's address. A server that is not configured is logged in to as the session's note says.
pub(super) fn known_login(service: &Service, server: &str) -> Result<VsphereLogin> {
    let mut known = service.database.hypervisors()?.into_iter();
    match known.find(|one| one.settings.address == server) {
        Some(hypervisor) => login(service, &hypervisor),
        None => Ok(VsphereLogin::default()),
    }
}
