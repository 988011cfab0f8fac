//! The hosts of a repository, as it keeps them.
//!
//! ```text
//!   REPOSITORY/hosts/identity     the private key with which this repository logs in
//!   REPOSITORY/hosts/NAME.host    a host: its address and pinned key
//!   REPOSITORY/hosts/NAME.seen    the last login, the last check, and what that has seen
//! ```

use std::io::Write;
use std::process::Command;
use std::sync::Arc;

use coldrise_block::{
    Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind, create_private, now_ms,
};
use coldrise_store::{MAX_NAME_BYTES, MachineName, Repository, SealedFolder};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::address::HostAddress;
use crate::key::HostKey;
use crate::ssh::text_of;

const FOLDER: &str = "hosts";
const IDENTITY: &str = "identity";
const HOST: &str = "host";
const SEEN: &str = "seen";
/// A command that connects again and again records the same result after this time, in milliseconds.
const RECORD_INTERVAL_MS: u64 = 10_000;

/// A host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownHost {
    /// Its name here.
    pub name: MachineName,
    /// Where it is.
    pub address: HostAddress,
    /// Its SSH key.
    pub key: HostKey,
    /// When it was added, in milliseconds since 1970.
    pub added_at_ms: u64,
}

/// What was seen at the last contact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contact {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// The version of libvirt.
    pub libvirt: String,
    /// The version of QEMU.
    pub qemu: String,
    /// The names of its machines, running or not.
    pub machines: Vec<String>,
    /// The folder of scratch files.
    pub scratch: String,
    /// Its free space, in bytes.
    pub scratch_free_bytes: u64,
    /// What works only in part, and why.
    pub shortcomings: Vec<String>,
}

/// The last login of any command at a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// When it was tried, in milliseconds since 1970.
    pub checked_at_ms: u64,
    /// Why it failed, else why the last check failed; `None` if both worked.
    pub error: Option<String>,
    /// Why the last check that could log in failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_error: Option<String>,
    /// What the last check has seen that worked.
    pub contact: Option<Contact>,
}

/// Checks the name of a host. Its form is that of a machine's name.
///
/// # Errors
/// `InvalidInput`, naming the allowed form.
pub fn parse_host_name(text: &str) -> Result<MachineName> {
    MachineName::parse(text).map_err(|error| {
        let shown: String = text.chars().take(80).collect();
        let text = format!(
            "{shown:?} is not a host's name: use 1 to {MAX_NAME_BYTES} of a-z 0-9 . _ -, start with a letter or digit; \
             live and latest are reserved"
        );
        Error::new(error.kind(), text)
    })
}

/// The hosts of a repository.
#[derive(Clone)]
pub struct Hosts(SealedFolder);

impl Hosts {
    /// Opens them; nothing is read yet.
    pub fn of(repository: &Arc<Repository>) -> Hosts {
        Hosts(SealedFolder::new(repository, FOLDER))
    }

    /// All hosts, by name.
    ///
    /// # Errors
    /// `Corrupt` if one was changed; errors of the drive.
    pub fn all(&self) -> Result<Vec<KnownHost>> {
        self.0.documents(HOST)
    }

    /// One of them.
    ///
    /// # Errors
    /// `NotFound`, and those of [`Hosts::all`].
    pub fn find(&self, name: &MachineName) -> Result<KnownHost> {
        let all = self.all()?;
        all.iter().find(|host| host.name == *name).cloned().ok_or_else(|| {
            let known: Vec<&str> = all.iter().map(|host| host.name.as_str()).collect();
            let text = match known.is_empty() {
                true => format!("there is no host {name}, and no other one"),
                false => format!("there is no host {name}; there are: {}", known.join(", ")),
            };
            Error::new(ErrorKind::NotFound, text)
                .advise(format!("add it: coldrise host add {name} ADDRESS"))
        })
    }

    /// Whether there is a host of this name.
    pub fn has(&self, name: &MachineName) -> bool {
        self.0.has(name, HOST)
    }

    /// Adds a host.
    ///
    /// # Errors
    /// `AlreadyExists` if the name is taken; errors of the drive.
    pub fn add(&self, host: &KnownHost) -> Result<()> {
        self.check_free(&host.name)?;
        self.0.remove(&host.name, SEEN)?;
        self.0.put(&host.name, HOST, host)
    }

    /// # Errors
    /// `AlreadyExists` if the name is taken.
    pub fn check_free(&self, name: &MachineName) -> Result<()> {
        match self.has(name) {
            false => Ok(()),
            true => {
                Err(Error::new(ErrorKind::AlreadyExists, format!("there is a host {name} already"))
                    .advise("choose another name, or remove it: coldrise host remove"))
            }
        }
    }

    /// Removes a host.
    ///
    /// # Errors
    /// `NotFound` if there is none; errors of the drive.
    pub fn remove(&self, name: &MachineName) -> Result<()> {
        self.0.remove(name, SEEN)?;
        match self.0.remove(name, HOST)? {
            true => Ok(()),
            false => self.find(name).map(drop),
        }
    }

    /// The last login; `None` before the first.
    ///
    /// # Errors
    /// `Corrupt` if it was changed; errors of the drive.
    pub fn seen(&self, name: &MachineName) -> Result<Option<Seen>> {
        match self.0.document(name, SEEN) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            seen => seen.map(Some),
        }
    }

    /// Whether a domain may be on a host that does not answer: it was there when its machines were seen last, or they
    /// never were. A UUID is not among the names that were seen.
    pub fn may_have(&self, name: &MachineName, domain: &str) -> bool {
        let is_uuid =
            domain.len() == 36 && domain.bytes().filter(|byte| *byte == b'-').count() == 4;
        let contact = self.seen(name).ok().flatten().and_then(|seen| seen.contact);
        is_uuid || contact.is_none_or(|contact| contact.machines.iter().any(|seen| seen == domain))
    }

    /// Records that a domain was seen on a host whose machines were seen before.
    ///
    /// # Errors
    /// `Corrupt` if the record was changed; errors of the drive.
    pub fn note_machine(&self, name: &MachineName, domain: &str) -> Result<()> {
        let Some(mut seen) = self.seen(name)? else { return Ok(()) };
        match &mut seen.contact {
            Some(contact) if !contact.machines.iter().any(|seen| seen == domain) => {
                contact.machines.push(domain.to_owned());
                self.record(name, &seen)
            }
            _ => Ok(()),
        }
    }

    /// Records a check.
    ///
    /// # Errors
    /// Errors of the drive.
    pub(crate) fn record(&self, name: &MachineName, seen: &Seen) -> Result<()> {
        self.0.put(name, SEEN, seen)
    }

    /// Records a login, unless one of the same result was recorded just before. The command does not depend on it.
    pub(crate) fn record_login(&self, name: &MachineName, error: Option<String>) {
        let before = self.seen(name).ok().flatten().unwrap_or_default();
        let now = now_ms();
        let error = error.or_else(|| before.check_error.clone());
        let is_new = now.saturating_sub(before.checked_at_ms) < RECORD_INTERVAL_MS;
        if is_new && before.error == error {
            return;
        }
        let seen = Seen { checked_at_ms: now, error, ..before };
        if let Err(error) = self.record(name, &seen) {
            tracing::debug!("recording a login: {}", error.full_message());
        }
    }

    /// The private key with which this repository logs in, in OpenSSH's form. The first call makes it.
    ///
    /// # Errors
    /// `ToolFailed` if ssh-keygen is not installed; errors of the drive.
    pub(crate) fn identity(&self) -> Result<Zeroizing<Vec<u8>>> {
        self.0.secret(IDENTITY, || {
            let folder = ScratchFolder::new(ScratchKind::Host)?;
            let path = folder.path().join("key");
            let mut command = Command::new("ssh-keygen");
            command.args(["-q", "-t", "ed25519", "-N", "", "-C", "coldrise", "-f"]).arg(&path);
            text_of(&mut command)?;
            std::fs::read(&path)
                .map(Zeroizing::new)
                .context(|| format!("reading {}", path.display()))
        })
    }

    /// The line for `authorized_keys` of a host's user.
    ///
    /// # Errors
    /// Those of making the key.
    pub fn authorized_keys_line(&self) -> Result<String> {
        let folder = ScratchFolder::new(ScratchKind::Host)?;
        let path = folder.path().join("key");
        let identity = self.identity()?;
        let written = create_private(&path).and_then(|mut file| file.write_all(&identity));
        written.context(|| format!("writing {}", path.display()))?;
        let public = text_of(Command::new("ssh-keygen").arg("-y").arg("-f").arg(&path))?;
        let mut words = public.split_whitespace();
        let (kind, key) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        Ok(format!("restrict,port-forwarding {kind} {key} coldrise"))
    }
}
