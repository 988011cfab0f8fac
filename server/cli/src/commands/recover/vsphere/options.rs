//! Options for vCenter and ESXi.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;

use clap::Args;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_recovery::vsphere::{ChosenHosts, VsphereAccess};
use coldrise_requests::VsphereLogin;

use super::NFS_PORT;
use coldrise_hosting::ganesha::Client;

/// Options for vCenter and ESXi.
#[derive(Debug, Args)]
#[command(next_help_heading = "vCenter and ESXi")]
pub(in crate::commands::recover) struct VsphereOptions {
    #[command(flatten)]
    login: VsphereLogin,

    /// Clients that the NFS server accepts, if this command starts it: addresses or networks, such as
    /// 10.0.0.0/24. Can be repeated. Default: the VMkernel addresses of the hosts.
    #[arg(long, value_name = "CIDR")]
    pub(super) allow: Vec<Client>,
}

impl VsphereOptions {
    /// The access of a new recovery.
    pub(super) fn access(&self, server: &str) -> Result<VsphereAccess> {
        let user = self.login.user.clone().ok_or_else(|| {
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
        if let Some(user) = &self.login.user {
            access.user.clone_from(user);
        }
        if let Some(path) = &self.login.password_file {
            access.password_file = Some(absolute(path)?);
        }
        if let Some(path) = &self.login.certificate {
            access.certificate = Some(absolute(path)?);
            access.thumbprint = None;
        }
        if let Some(thumbprint) = self.login.thumbprint {
            access.thumbprint = Some(thumbprint);
            access.certificate = None;
        }
        Ok(())
    }

    /// The address of this machine by which the hosts reach it.
    pub(super) fn nfs_host(&self, hosts: &ChosenHosts) -> Result<IpAddr> {
        if let Some(address) = self.login.nfs_server {
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
