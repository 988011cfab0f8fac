//! Requests whose fields differ from the command's options: machines that boot, and servers of disks.

use coldrise_inventory::{DiskBus, Firmware};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::CommandLine;

/// The network of a machine.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// A network card without a connection to any network.
    #[default]
    Isolated,
    /// The host's network, for outgoing connections only.
    Connected,
    /// No network card.
    None,
}

/// What happens to the session when the machine is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AtEnd {
    /// It stays.
    #[default]
    Keep,
    /// It becomes a restore point.
    Seal,
    /// It is removed, with everything that the machine has written.
    Discard,
}

/// A machine to boot.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Boot {
    /// MACHINE/POINT, which is published first, or live/SESSION.
    pub address: String,
    /// Name of the new session; generated if absent. GET /runs/{id} shows it as machine.session.
    pub session: Option<String>,
    /// Which time marks of the session are kept: off, or INTERVAL=AGE,…; 1s=10m,10s=1h,1m=1d if absent.
    pub marks: Option<String>,
    /// As in the point's configuration, or 2048.
    #[schema(minimum = 16, maximum = 16777216)]
    pub memory_mib: Option<u64>,
    /// As in the point's configuration, or 2.
    #[schema(minimum = 1, maximum = 255)]
    pub cpus: Option<u32>,
    /// As in the point's configuration, or BIOS.
    pub firmware: Option<Firmware>,
    /// As in the point's configuration, or virtio.
    pub disk_bus: Option<DiskBus>,
    /// The network.
    #[serde(default)]
    pub network: Network,
    /// What happens to the session.
    #[serde(default)]
    pub at_end: AtEnd,
}

impl Boot {
    /// The words of `coldrise boot`.
    pub fn command_line(&self) -> CommandLine {
        let network = match self.network {
            Network::Isolated => "isolated",
            Network::Connected => "user",
            Network::None => "none",
        };
        CommandLine::new("boot")
            .flag("headless", true)
            .option("name", self.session.as_ref())
            .option("marks", self.marks.as_ref())
            .option("memory", self.memory_mib.map(|mib| format!("{mib}M")))
            .option("cpus", self.cpus)
            .option("firmware", self.firmware.map(word))
            .option("disk-bus", self.disk_bus.map(word))
            .option("network", Some(network))
            .flag("seal", self.at_end == AtEnd::Seal)
            .flag("discard", self.at_end == AtEnd::Discard)
            .argument(&self.address)
    }
}

/// The command line's word, which is the API's.
fn word(choice: impl Serialize) -> String {
    let word = serde_json::to_value(choice).unwrap_or_default();
    word.as_str().unwrap_or_default().to_owned()
}

/// The protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Network block devices.
    Nbd,
    /// Files.
    Nfs,
}

/// A server of all points and sessions.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Serve {
    /// NBD or NFS.
    pub protocol: Protocol,
    /// IP address and port, from 1024; 127.0.0.1 and the protocol's port if absent. Only
    /// administrators may use addresses other than loopback.
    pub listen: Option<String>,
    /// Serve sessions read-only, too.
    #[serde(default)]
    pub read_only: bool,
    /// NBD: TLS with the certificates in this folder of the host. Administrators only.
    pub tls_certificates: Option<String>,
    /// NBD: TLS with the keys in this file of the host. Administrators only.
    pub tls_psk: Option<String>,
    /// NFS: clients that may connect, such as 10.0.0.0/24; this host if absent.
    #[serde(default)]
    #[schema(max_items = 1000)]
    pub allow: Vec<String>,
    /// NFS: port of the mount protocol; 20048 if absent.
    #[schema(minimum = 1024, maximum = 65535)]
    pub mount_port: Option<u16>,
}

impl Serve {
    /// The command.
    pub fn command(&self) -> &'static str {
        match self.protocol {
            Protocol::Nbd => "serve nbd",
            Protocol::Nfs => "serve nfs",
        }
    }

    /// The words of the command.
    pub fn command_line(&self) -> CommandLine {
        let line = CommandLine::new(self.command())
            .option("listen", self.listen.as_ref())
            .option("tls-certificates", self.tls_certificates.as_ref())
            .option("tls-psk", self.tls_psk.as_ref())
            .option("mount-port", self.mount_port)
            .flag("read-only", self.read_only);
        self.allow.iter().fold(line, |line, client| line.option("allow", Some(client)))
    }
}
