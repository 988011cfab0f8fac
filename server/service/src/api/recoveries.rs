//! Starting recoveries: machines that boot, and servers of disks.

use std::net::{IpAddr, SocketAddr};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::{DiskBus, Firmware};
use coldrise_store::Address;
use serde::{Deserialize, Serialize};

use super::starts::{live, new_session, point, Command};
use crate::access::{Identity, Permission};
use crate::invalid::invalid;
use crate::service::Service;

/// The lowest port of a server. Those below are of the host's own services, and root could take them.
const MIN_PORT: u16 = 1024;
/// Maximum number of clients in an allow list.
const MAX_CLIENTS: usize = 1000;

/// The network of a machine.
#[derive(Clone, Copy, Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum Network {
    /// A network card that leads nowhere.
    #[default]
    Isolated,
    /// The host's network, for connections that the machine makes.
    Connected,
    /// No network card.
    None,
}

/// What happens to the session when the machine is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum AtEnd {
    /// It stays.
    #[default]
    Keep,
    /// It becomes a restore point.
    Seal,
    /// It goes, with all that the machine has written.
    Discard,
}

/// A machine to boot.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Boot {
    /// MACHINE/POINT, which is published first, or live/SESSION.
    address: String,
    /// Name of the new session; one is made up if absent. GET /runs/{id} shows it as machine.session.
    session: Option<String>,
    /// As in the point's configuration, or 2048.
    #[schema(minimum = 16, maximum = 16777216)]
    memory_mib: Option<u64>,
    /// As in the point's configuration, or 2.
    #[schema(minimum = 1, maximum = 255)]
    cpus: Option<u32>,
    firmware: Option<Firmware>,
    disk_bus: Option<DiskBus>,
    #[serde(default)]
    network: Network,
    #[serde(default)]
    at_end: AtEnd,
}

impl Boot {
    pub(super) fn command(self, service: &Service, caller: &Identity) -> Result<Command> {
        let (machine, address) = self.subject(service, caller)?;
        if self.memory_mib.is_some_and(|mib| !(16..=16 << 20).contains(&mib)) {
            return Err(invalid("memory_mib: give 16 to 16777216"));
        }
        if self.cpus.is_some_and(|cpus| !(1..=255).contains(&cpus)) {
            return Err(invalid("cpus: give 1 to 255"));
        }
        let session = new_session(service, self.session)?;
        let network = match self.network {
            Network::Isolated => "isolated",
            Network::Connected => "user",
            Network::None => "none",
        };
        Ok(Command::new("boot", Some(machine))
            .flag("headless", true)
            .option("name", session)
            .option("memory", self.memory_mib.map(|mib| format!("{mib}M")))
            .option("cpus", self.cpus)
            .option("firmware", self.firmware.map(word).transpose()?)
            .option("disk-bus", self.disk_bus.map(word).transpose()?)
            .option("network", Some(network))
            .flag("seal", self.at_end == AtEnd::Seal)
            .flag("discard", self.at_end == AtEnd::Discard)
            .words([address]))
    }

    /// The machine and the address.
    fn subject(&self, service: &Service, caller: &Identity) -> Result<(String, String)> {
        let Address::Live { session, disk } = self.address.parse::<Address>()? else {
            return point(caller, Permission::Operate, &self.address);
        };
        if disk.is_some() {
            return Err(invalid("give MACHINE/POINT or live/SESSION: a machine boots all disks"));
        }
        if self.session.is_some() {
            return Err(invalid("session: names the new session of a point; live/SESSION has one"));
        }
        // What the session has captured before exists nowhere else.
        let permission = match self.at_end {
            AtEnd::Discard => Permission::Administer,
            _ => Permission::Operate,
        };
        let found = live(service, caller, permission, &session)?;
        if found.is_served {
            let text = format!("session {session} is in use: end what runs on it first");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        Ok((found.machine, format!("live/{session}")))
    }
}

/// The command line's word, which is the API's.
fn word(choice: impl Serialize) -> Result<String> {
    match serde_json::to_value(choice) {
        Ok(serde_json::Value::String(word)) => Ok(word),
        _ => Err(Error::new(ErrorKind::Internal, "a choice that is not a word")),
    }
}

/// The protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum Protocol {
    Nbd,
    Nfs,
}

/// A server of all points and sessions.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Serve {
    protocol: Protocol,
    /// IP address and port, from 1024; 127.0.0.1 and the protocol's port if absent. Others than loopback are
    /// for administrators.
    listen: Option<String>,
    /// Serve sessions read-only, too.
    #[serde(default)]
    read_only: bool,
    /// NBD: TLS with the certificates in this folder of the host. Administrators only.
    tls_certificates: Option<String>,
    /// NBD: TLS with the keys in this file of the host. Administrators only.
    tls_psk: Option<String>,
    /// NFS: clients that may connect, such as 10.0.0.0/24; this host if absent.
    #[serde(default)]
    #[schema(max_items = 1000)]
    allow: Vec<String>,
    /// NFS: port of the mount protocol; 20048 if absent.
    #[schema(minimum = 1024, maximum = 65535)]
    mount_port: Option<u16>,
}

impl Serve {
    /// All machines are served, so rights on all are needed.
    pub(super) fn command(self, service: &Service, caller: &Identity) -> Result<Command> {
        caller.allow_all(Permission::Operate)?;
        caller.allow_all(Permission::ReadContent)?;
        let listen = self.listen.as_deref().map(|text| {
            text.parse::<SocketAddr>().map_err(|_| {
                invalid("listen: give an IP address and a port, such as 127.0.0.1:10809")
            })
        });
        let listen = listen.transpose()?;
        let is_local = listen.is_none_or(|address| address.ip().is_loopback());
        if !is_local {
            caller.allow_all(Permission::Administer)?;
        }
        let ports =
            [("listen", listen.map(|address| address.port())), ("mount_port", self.mount_port)];
        if let Some((field, _)) =
            ports.iter().find(|(_, port)| port.is_some_and(|port| port < MIN_PORT))
        {
            return Err(invalid(format!("{field}: give a port from {MIN_PORT} to 65535")));
        }
        let keys: Vec<&String> =
            [&self.tls_certificates, &self.tls_psk].into_iter().flatten().collect();
        if let Some(path) = keys.iter().find(|path| !path.starts_with('/')) {
            return Err(invalid(format!("{path:?}: give an absolute path of the service's host")));
        }
        for path in &keys {
            caller.allow_all(Permission::Administer)?;
            service.options.refuse_own_files(path)?;
        }
        let (kind, words) = match self.protocol {
            Protocol::Nbd if !is_local && keys.is_empty() => {
                return Err(invalid(
                    "NBD for other hosts needs TLS: give tls_certificates or tls_psk",
                ));
            }
            Protocol::Nbd if !self.allow.is_empty() || self.mount_port.is_some() => {
                return Err(invalid("allow and mount_port are for NFS; NBD has TLS"));
            }
            Protocol::Nfs if !is_local && self.allow.is_empty() => {
                return Err(invalid("NFS for other hosts needs a list of clients: give allow"));
            }
            Protocol::Nfs if !keys.is_empty() => {
                return Err(invalid("NFS has no TLS here: give allow, or use NBD"));
            }
            Protocol::Nbd => ("serve nbd", ["serve", "nbd"]),
            Protocol::Nfs => ("serve nfs", ["serve", "nfs"]),
        };
        if self.allow.len() > MAX_CLIENTS {
            return Err(invalid("allow: give at most 1000 clients"));
        }
        if let Some(client) = self.allow.iter().find(|client| !is_network(client)) {
            return Err(invalid(format!("allow: {client:?} is not a network such as 10.0.0.0/24")));
        }
        let arguments = words.map(str::to_owned).to_vec();
        let mut command = Command { kind, machine: None, arguments }
            .option("listen", listen)
            .option("tls-certificates", self.tls_certificates)
            .option("tls-psk", self.tls_psk)
            .option("mount-port", self.mount_port)
            .flag("read-only", self.read_only);
        for client in self.allow {
            command = command.option("allow", Some(client));
        }
        Ok(command)
    }
}

/// Whether a text is an address, or a network of addresses.
pub(crate) fn is_network(text: &str) -> bool {
    let (address, bits) = text.split_once('/').unwrap_or((text, "0"));
    let Ok(address) = address.parse::<IpAddr>() else { return false };
    let max_bits = if address.is_ipv4() { 32 } else { 128 };
    bits.parse::<u8>().is_ok_and(|bits| bits <= max_bits)
}
