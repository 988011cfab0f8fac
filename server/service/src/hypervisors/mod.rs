//! Servers of hypervisors, where machines are recovered: vCenter and ESXi.
//!
//! Only administrators make them, because the service connects to any address in them. The password is never
//! returned, and never part of a run's arguments: a run gets the path of a file. The service keeps the password in a
//! file of its own (`STATE/hypervisors`, mode 0600), or an administrator of the host puts it into `STATE/secrets`.
//!
//! # Order of writes
//!
//! A password goes to no other server than the one it was given for, and no password is left that no row names:
//!
//! - Another address or user: the old file is removed; the row changes, with a new random name of the file; the new
//!   file is written. A run that was queued before finds no file, so it fails.
//! - The same address and user: the file is replaced at once.
//! - Removal: the file, then the row.
//!
//! A crash in between leaves a row without a password: the test reports it, and the change can be repeated.

mod login_test;
mod store;

use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use axum::http::uri::Authority;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_https::{Thumbprint, check_certificate_file};
use coldrise_hypervisors::vsphere::{VsphereAccess, VsphereNote, recovery_note};
use coldrise_store::SessionName;
use serde::{Deserialize, Serialize};

use crate::arguments::Options;
use crate::invalid::invalid;
use crate::notifications::check_secret_name;
use crate::service::Service;

pub(crate) use login_test::test;
pub(crate) use store::{Hypervisor, put, remove};

/// Maximum length of a password, in bytes: this much of the file is read.
const MAX_PASSWORD_BYTES: usize = 4000;
/// Maximum length of an address and of a user's name, in bytes.
const MAX_NAME_BYTES: usize = 255;
/// Maximum number of networks.
const MAX_CLIENTS: usize = 100;

/// The kind of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum HypervisorKind {
    Vcenter,
    Esxi,
}

impl HypervisorKind {
    /// As in `--to`.
    pub(crate) fn word(self) -> &'static str {
        match self {
            HypervisorKind::Vcenter => "vcenter",
            HypervisorKind::Esxi => "esxi",
        }
    }
}

/// What an administrator sets of a server.
#[derive(Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct HypervisorSettings {
    pub(crate) kind: HypervisorKind,
    /// HOST or HOST:PORT.
    #[schema(min_length = 1, max_length = 255)]
    pub(crate) address: String,
    /// Who logs in, such as backup@vsphere.local.
    #[schema(min_length = 1, max_length = 255)]
    pub(crate) user: String,
    /// The user's password. It is never returned. Absent in a change, the stored one stays, if address and user
    /// stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 4000, write_only)]
    password: Option<String>,
    /// In place of `password`: the name of a file in the folder `secrets` of the service's state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password_file: Option<String>,
    /// Trust exactly the certificate with this SHA-256 thumbprint: 32 bytes in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    thumbprint: Option<Thumbprint>,
    /// In place of `thumbprint`: the absolute path, on the service's host, of the certificate of the server or its
    /// authority (PEM). Without both, the authorities of the host are trusted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    certificate_file: Option<String>,
    /// The service's host as the hosts reach it; the address on the route to them if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub(crate) nfs_server: Option<IpAddr>,
    /// Networks, such as 10.0.0.0/24, that an NFS server accepts that a recovery starts; the hosts' addresses if
    /// empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 100)]
    pub(crate) allow: Vec<String>,
}

impl HypervisorSettings {
    fn check(&self, options: &Options) -> Result<()> {
        let is_host = |c: char| c.is_ascii_alphanumeric() || ".-_:[]".contains(c);
        check_length("address", &self.address, MAX_NAME_BYTES)?;
        let is_address = self.address.chars().all(is_host) && !self.address.starts_with('-');
        if !is_address || !is_authority(&self.address) {
            return Err(invalid("address: give HOST or HOST:PORT"));
        }
        check_length("user", &self.user, MAX_NAME_BYTES)?;
        if let Some(password) = &self.password {
            check_length("password", password, MAX_PASSWORD_BYTES)?;
        }
        match (&self.password, &self.password_file) {
            (Some(_), Some(_)) => return Err(invalid("give password or password_file, not both")),
            (None, Some(name)) => check_secret_name(name)?,
            _ => {}
        }
        if let Some(path) = &self.certificate_file {
            if self.thumbprint.is_some() {
                return Err(invalid("give thumbprint or certificate_file, not both"));
            }
            check_length("certificate_file", path, 4096)?;
            if !path.starts_with('/') {
                return Err(invalid(
                    "certificate_file: give an absolute path of the service's host",
                ));
            }
            options.refuse_own_files(path)?;
            check_certificate_file(Path::new(path))
                .map_err(|error| invalid(format!("certificate_file: {}", error.message())))?;
        }
        if self.allow.len() > MAX_CLIENTS {
            return Err(invalid(format!("allow: give at most {MAX_CLIENTS} networks")));
        }
        match self.allow.iter().find(|client| !crate::api::is_network(client)) {
            Some(client) => {
                Err(invalid(format!("allow: {client:?} is not a network such as 10.0.0.0/24")))
            }
            None => Ok(()),
        }
    }

    /// The same without the password.
    fn redacted(&self) -> HypervisorSettings {
        HypervisorSettings { password: None, ..self.clone() }
    }

    /// Another server, or another user there: a stored password is not theirs.
    fn is_elsewhere(&self, old: &HypervisorSettings) -> bool {
        (&self.address, &self.user) != (&old.address, &old.user)
    }
}

/// Whether a URL can have it: brackets are those of an IPv6 address, a port is a number.
fn is_authority(text: &str) -> bool {
    let Ok(authority) = text.parse::<Authority>() else { return false };
    let host = authority.host();
    let rest = text.strip_prefix(host).unwrap_or(text);
    !host.is_empty()
        && (rest.is_empty() || authority.port_u16().is_some_and(|port| port != 0))
        && host
            .strip_prefix('[')
            .is_none_or(|v6| v6.strip_suffix(']').is_some_and(|v6| v6.parse::<Ipv6Addr>().is_ok()))
}

fn check_length(field: &str, text: &str, max_bytes: usize) -> Result<()> {
    if text.is_empty() || text.len() > max_bytes || text.chars().any(char::is_control) {
        let text = format!("{field}: give 1 to {max_bytes} bytes without control characters");
        return Err(invalid(text));
    }
    Ok(())
}

/// A named pipe would block who reads it.
fn regular_file(path: PathBuf) -> Result<PathBuf> {
    let found = path.symlink_metadata().context(|| format!("reading {}", path.display()))?;
    if !found.is_file() {
        return Err(invalid(format!("{} is not a regular file", path.display())));
    }
    Ok(path)
}

/// The folder of the passwords.
fn secrets_folder(options: &Options) -> Result<PathBuf> {
    let state = std::path::absolute(&options.state).context(|| "finding the service's folder")?;
    Ok(state.join("hypervisors"))
}

impl Hypervisor {
    /// How to log in.
    ///
    /// # Errors
    /// `InvalidInput` without a password.
    pub(crate) fn access(&self, options: &Options) -> Result<VsphereAccess> {
        let folder = secrets_folder(options)?;
        let settings = &self.settings;
        let password_file = match (&settings.password_file, &self.secret) {
            (Some(name), _) => regular_file(folder.with_file_name("secrets").join(name))?,
            (None, Some(name)) => folder.join(name),
            (None, None) => {
                let text = format!("the service has no password for {}", self.name);
                return Err(invalid(text).advise("give it again: Access, Hypervisors, Edit"));
            }
        };
        Ok(VsphereAccess {
            server: settings.address.clone(),
            user: settings.user.clone(),
            password_file: Some(password_file),
            certificate: settings.certificate_file.as_ref().map(PathBuf::from),
            thumbprint: settings.thumbprint,
        })
    }
}

/// Checks that no machine at this server depends on a session: its note names the server and the file.
///
/// # Errors
/// `Busy`, naming the session.
fn check_unused(service: &Service, hypervisor: &Hypervisor) -> Result<()> {
    let Ok(inventory) = service.inventory() else { return Ok(()) };
    let repository = inventory.repository()?;
    for session in coldrise_session::sessions(&repository)? {
        let name = &session.document.name;
        let Some(note) = recovery_note(&repository, name)? else { continue };
        if note.access.server == hypervisor.settings.address && note.is_needed() {
            let text = format!("session {name} needs {}: {}", hypervisor.name, note.sentence(name));
            return Err(Error::new(ErrorKind::Busy, text));
        }
    }
    Ok(())
}

/// The recovery under vSphere on a session; `None` without one.
///
/// # Errors
/// `Corrupt` if its note does not authenticate.
pub(crate) fn vsphere_note(
    service: &Service,
    session: &SessionName,
) -> Result<Option<VsphereNote>> {
    recovery_note(&service.inventory()?.repository()?, session)
}
