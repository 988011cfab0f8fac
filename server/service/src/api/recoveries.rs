//! Starting recoveries: machines that boot, and servers of disks.

use std::net::{IpAddr, SocketAddr};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_requests::{AtEnd, Boot, Protocol, Serve};
use coldrise_store::Address;

use super::starts::{Command, live, new_session, origin};
use crate::access::{Identity, Permission};
use crate::invalid::invalid;
use crate::service::Service;

/// The lowest port of a server. Those below are of the host's own services, and root could take them.
const MIN_PORT: u16 = 1024;
/// Maximum number of clients in an allow list.
const MAX_CLIENTS: usize = 1000;

/// A machine to boot.
pub(super) fn boot(boot: Boot, service: &Service, caller: &Identity) -> Result<Command> {
    let machine = booting(&boot, service, caller)?;
    if boot.memory_mib.is_some_and(|mib| !(16..=16 << 20).contains(&mib)) {
        return Err(invalid("memory_mib: give 16 to 16777216"));
    }
    if boot.cpus.is_some_and(|cpus| !(1..=255).contains(&cpus)) {
        return Err(invalid("cpus: give 1 to 255"));
    }
    new_session(service, boot.session.as_deref())?;
    Ok(Command { kind: "boot", machine: Some(machine), line: boot.command_line() })
}

/// The machine that boots.
fn booting(boot: &Boot, service: &Service, caller: &Identity) -> Result<String> {
    let Address::Live { session, disk } = boot.address.parse::<Address>()? else {
        return origin(service, caller, &boot.address);
    };
    if disk.is_some() {
        return Err(invalid("give MACHINE/POINT or live/SESSION: a machine boots all disks"));
    }
    if boot.session.is_some() {
        return Err(invalid("session: names the new session of a point; live/SESSION has one"));
    }
    // The captured writes of the session exist nowhere else.
    let permission = match boot.at_end {
        AtEnd::Discard => Permission::Administer,
        _ => Permission::Operate,
    };
    let found = live(service, caller, permission, &session)?;
    if found.is_served {
        let text = format!("session {session} is in use: end what runs on it first");
        return Err(Error::new(ErrorKind::Busy, text));
    }
    Ok(found.machine)
}

/// A server of all points and sessions: all machines are served, so rights on all are needed.
pub(super) fn serve(serve: Serve, service: &Service, caller: &Identity) -> Result<Command> {
    caller.allow_all(Permission::Operate)?;
    caller.allow_all(Permission::ReadContent)?;
    let listen = serve.listen.as_deref().map(|text| {
        text.parse::<SocketAddr>()
            .map_err(|_| invalid("listen: give an IP address and a port, such as 127.0.0.1:10809"))
    });
    let listen = listen.transpose()?;
    let is_local = listen.is_none_or(|address| address.ip().is_loopback());
    if !is_local {
        caller.allow_all(Permission::Administer)?;
    }
    let ports =
        [("listen", listen.map(|address| address.port())), ("mount_port", serve.mount_port)];
    let is_low = |port: &Option<u16>| port.is_some_and(|port| port < MIN_PORT);
    if let Some((field, _)) = ports.iter().find(|(_, port)| is_low(port)) {
        return Err(invalid(format!("{field}: give a port from {MIN_PORT} to 65535")));
    }
    let keys: Vec<&String> = serve.tls_certificates.iter().chain(&serve.tls_psk).collect();
    if let Some(path) = keys.iter().find(|path| !path.starts_with('/')) {
        return Err(invalid(format!("{path:?}: give an absolute path of the service's host")));
    }
    for path in &keys {
        caller.allow_all(Permission::Administer)?;
        service.options.refuse_own_files(path)?;
    }
    let wrong = match serve.protocol {
        Protocol::Nbd if !is_local && keys.is_empty() => {
            Some("NBD for other hosts needs TLS: give tls_certificates or tls_psk")
        }
        Protocol::Nbd if !serve.allow.is_empty() || serve.mount_port.is_some() => {
            Some("allow and mount_port are for NFS; NBD has TLS")
        }
        Protocol::Nfs if !is_local && serve.allow.is_empty() => {
            Some("NFS for other hosts needs a list of clients: give allow")
        }
        Protocol::Nfs if !keys.is_empty() => Some("NFS has no TLS here: give allow, or use NBD"),
        _ if serve.allow.len() > MAX_CLIENTS => Some("allow: give at most 1000 clients"),
        _ => None,
    };
    if let Some(text) = wrong {
        return Err(invalid(text));
    }
    if let Some(client) = serve.allow.iter().find(|client| !is_network(client)) {
        return Err(invalid(format!("allow: {client:?} is not a network such as 10.0.0.0/24")));
    }
    Ok(Command { kind: serve.command(), machine: None, line: serve.command_line() })
}

/// Whether a text is an address, or a network of addresses.
pub(crate) fn is_network(text: &str) -> bool {
    let (address, bits) = text.split_once('/').unwrap_or((text, "0"));
    let Ok(address) = address.parse::<IpAddr>() else { return false };
    let max_bits = if address.is_ipv4() { 32 } else { 128 };
    bits.parse::<u8>().is_ok_and(|bits| bits <= max_bits)
}
