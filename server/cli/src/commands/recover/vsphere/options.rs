//! Options for vCenter and ESXi.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;

use clap::Args;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_https::Thumbprint;
use coldrise_hypervisors::vsphere::{ChosenHosts, VsphereAccess};

use super::NFS_PORT;
use coldrise_hosting::ganesha::Client;

/// Options for vCenter and ESXi.
#[derive(Debug, Args)]
#[command(next_help_heading = "vCenter and ESXi")]
pub(in crate::commands::recover) struct VsphereOptions {
    /// Host that runs the machine, by its name in the inventory. Further ones get the datastore, too. Not
    /// needed if there is one host only.
    #[arg(long, value_name = "NAME")]
    pub(super) host: Vec<String>,

    /// User of vCenter or ESXi, such as backup@vsphere.local.
    #[arg(long, value_name = "USER")]
    user: Option<String>,

    /// Read the user's password from FILE; without it, COLDRISE_VSPHERE_PASSWORD from the environment.
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,

    /// Trust this certificate of vCenter or ESXi, or of its authority (PEM), instead of the system's authorities.
    #[arg(long, value_name = "FILE")]
    certificate: Option<PathBuf>,

    /// Trust exactly the certificate of vCenter or ESXi with this SHA-256 thumbprint, as its console shows it: 32
    /// bytes in hexadecimal, with or without colons. Its names and dates do not matter then.
    #[arg(long, value_name = "SHA256", conflicts_with = "certificate")]
    thumbprint: Option<Thumbprint>,

    /// Address of this machine by which the hosts reach it. Default: the one on the route to the first host.
    #[arg(long, value_name = "ADDRESS")]
    nfs_server: Option<IpAddr>,

    /// Clients that the NFS server accepts, if this command starts it: addresses or networks, such as
    /// 10.0.0.0/24. Can be repeated. Default: the VMkernel addresses of the hosts.
    #[arg(long, value_name = "CIDR")]
    pub(super) allow: Vec<Client>,

    /// With --undo: the server is gone for good, so change nothing there and only end the session.
    #[arg(long, requires = "undo")]
    pub(super) without_server: bool,
}

impl VsphereOptions {
    /// The access of a new recovery.
    pub(super) fn access(&self, server: &str) -> Result<VsphereAccess> {
        let user = self.user.clone().ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidInput,
                format!("who logs in to {server}? Give --user USER"),
            )
        })?;
        let mut access = VsphereAccess {
            server: server.to_owned(),
            user,
            password_file: None,
            certificate: None,
            thumbprint: None,
        };
        self.override_access(&mut access)?;
        Ok(access)
    }

    /// Options go before what the note says.
    pub(super) fn override_access(&self, access: &mut VsphereAccess) -> Result<()> {
        let absolute = |path: &PathBuf| {
            std::path::absolute(path).context(|| format!("finding {}", path.display()))
        };
        if let Some(user) = &self.user {
            access.user.clone_from(user);
        }
        if let Some(path) = &self.password_file {
            access.password_file = Some(absolute(path)?);
        }
        if let Some(path) = &self.certificate {
            access.certificate = Some(absolute(path)?);
            access.thumbprint = None;
        }
        if let Some(thumbprint) = self.thumbprint {
            access.thumbprint = Some(thumbprint);
            access.certificate = None;
        }
        Ok(())
    }

    /// The address of this machine by which the hosts reach it.
    pub(super) fn nfs_host(&self, hosts: &ChosenHosts) -> Result<IpAddr> {
        if let Some(address) = self.nfs_server {
            return Ok(address);
        }
        let unknown = || {
            let text = "it is not known by which address the hosts reach this machine";
            Error::new(ErrorKind::InvalidInput, text).advise("give --nfs-server ADDRESS")
        };
        let first = *hosts.addresses.first().ok_or_else(unknown)?;
        let any: SocketAddr = match first {
            IpAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
            IpAddr::V6(_) => ([0u16; 8], 0).into(),
        };
        // Sends nothing.
        let found = UdpSocket::bind(any).and_then(|socket| {
            socket.connect((first, NFS_PORT))?;
            socket.local_addr()
        });
        found.map(|address| address.ip()).map_err(|_| unknown())
    }
}
