//! Links to other sites, as the repository keeps them.
//!
//! ```text
//!   REPOSITORY/links/identity       this side's private key
//!   REPOSITORY/links/NAME.link      a paired site: its key, and how it is reached or what it may do
//!   REPOSITORY/links/NAME.invite    a code that was given out
//! ```
//!
//! All are sealed with the repository's key: a stolen drive gives no access. Removing a link's file ends its rights: the
//! server looks every second.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::MachinePattern;
use coldrise_line::{CODE_VALID, Identity, PairingCode, PeerKey};
use coldrise_store::{MAX_NAME_BYTES, MachineName, Repository, SealedFolder};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

const FOLDER: &str = "links";
const IDENTITY: &str = "identity";
const LINK: &str = "link";
const INVITATION: &str = "invite";

/// A site that is paired with this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Its name here.
    pub name: MachineName,
    /// SHA-256 of its public key.
    pub key: String,
    /// HOST:PORT where it serves; `None` if it dials.
    pub address: Option<String>,
    /// The prefix of its machines' names here.
    #[serde(default)]
    pub prefix: String,
    /// What it may do here when it dials.
    #[serde(default)]
    pub may: Right,
    /// When it was paired, in milliseconds since 1970.
    pub paired_at_ms: u64,
}

impl Link {
    /// The key.
    ///
    /// # Errors
    /// `InvalidInput` if it is none.
    pub fn peer(&self) -> Result<PeerKey> {
        self.key.parse()
    }
}

/// The rights of a site that dials.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Right {
    /// Add restore points. It reads none.
    #[default]
    Send,
    /// Read restore points of the machines that match one of these. It adds none.
    Fetch {
        /// The patterns.
        machines: Vec<MachinePattern>,
    },
}

impl Right {
    /// The word for it.
    pub fn word(&self) -> &'static str {
        match self {
            Right::Send => "send",
            Right::Fetch { .. } => "fetch",
        }
    }

    /// The patterns of the machines that it may read.
    pub fn machines(&self) -> &[MachinePattern] {
        match self {
            Right::Send => &[],
            Right::Fetch { machines } => machines,
        }
    }
}

/// Checks the name of a link. Its form is that of a machine's name.
///
/// # Errors
/// `InvalidInput`, naming the allowed form.
pub fn parse_link_name(text: &str) -> Result<MachineName> {
    MachineName::parse(text).map_err(|error| {
        let text = format!(
            "{} is not a link name: use 1 to {MAX_NAME_BYTES} of a-z 0-9 . _ -, start with a letter or digit; \
             live and latest are reserved",
            shown(text)
        );
        Error::new(error.kind(), text)
    })
}

/// Checks what the names of machines are to begin with. An empty prefix is none.
///
/// # Errors
/// `InvalidInput`, naming the allowed form.
pub fn parse_prefix(text: &str) -> Result<String> {
    // At least one byte of a name follows.
    if text.is_empty() || MachineName::parse(&format!("{text}x")).is_ok() {
        return Ok(text.to_owned());
    }
    let text = format!(
        "{} is not a prefix of machine names: use up to {} of a-z 0-9 . _ - and start with a letter or digit",
        shown(text),
        MAX_NAME_BYTES - 1
    );
    Err(Error::new(ErrorKind::InvalidInput, text))
}

/// The user's text, in quotes and shortened.
fn shown(text: &str) -> String {
    format!("{:?}", text.chars().take(80).collect::<String>())
}

/// A code that was given out and not used yet.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Invitation {
    /// The name that the link gets.
    pub name: MachineName,
    /// The code.
    pub code: String,
    /// The prefix of its machines' names here.
    pub prefix: String,
    /// Its rights.
    #[serde(default)]
    pub may: Right,
    /// Until when it is valid, in milliseconds since 1970.
    pub until_ms: u64,
}

/// The links of a repository.
pub struct Links(SealedFolder);

impl Links {
    /// Opens them; nothing is read yet.
    pub fn of(repository: &Arc<Repository>) -> Links {
        Links(SealedFolder::new(repository, FOLDER))
    }

    /// This side's private key. The first call makes it.
    ///
    /// # Errors
    /// `Corrupt` if it was changed; errors of the drive.
    pub fn identity(&self) -> Result<Identity> {
        let make = || Ok(Zeroizing::new(Identity::generate()?.pkcs8().to_vec()));
        Identity::from_pkcs8(&self.0.secret(IDENTITY, make)?)
    }

    /// All links, by name.
    ///
    /// # Errors
    /// `Corrupt` if one was changed; errors of the drive.
    pub fn all(&self) -> Result<Vec<Link>> {
        self.0.documents(LINK)
    }

    /// One of them.
    ///
    /// # Errors
    /// `NotFound`, and those of [`Links::all`].
    pub fn find(&self, name: &MachineName) -> Result<Link> {
        let all = self.all()?;
        all.iter().find(|link| link.name == *name).cloned().ok_or_else(|| {
            let known: Vec<&str> = all.iter().map(|link| link.name.as_str()).collect();
            let text = match known.is_empty() {
                true => format!("there is no link {name}, and no other one"),
                false => format!("there is no link {name}; there are: {}", known.join(", ")),
            };
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// Adds a link.
    ///
    /// # Errors
    /// `AlreadyExists` if the name is taken; errors of the drive.
    pub fn add(&self, link: &Link) -> Result<()> {
        self.check_free(&link.name)?;
        self.0.put(&link.name, LINK, link)
    }

    /// Removes a link and its invitation. It has no rights any more when this returns and the server has looked.
    ///
    /// # Errors
    /// `NotFound` if there is none; errors of the drive.
    pub fn remove(&self, name: &MachineName) -> Result<()> {
        let link = self.0.remove(name, LINK)?;
        let invitation = self.0.remove(name, INVITATION)?;
        if link || invitation {
            return Ok(());
        }
        self.find(name).map(drop)
    }

    /// Makes a code for a new link; it replaces one of the same name.
    ///
    /// # Errors
    /// `AlreadyExists` if there is a link of that name; errors of the drive.
    pub fn invite(
        &self,
        name: &MachineName,
        prefix: &str,
        may: &Right,
        now_ms: u64,
    ) -> Result<Invitation> {
        self.check_free(name)?;
        parse_prefix(prefix)?;
        let invitation = Invitation {
            name: name.clone(),
            code: PairingCode::generate()?.to_string(),
            prefix: prefix.to_owned(),
            may: may.clone(),
            until_ms: now_ms + CODE_VALID.as_millis() as u64,
        };
        self.0.put(name, INVITATION, &invitation)?;
        Ok(invitation)
    }

    /// The codes that are still valid. Those that are not are removed.
    ///
    /// # Errors
    /// As for [`Links::all`].
    pub fn invitations(&self, now_ms: u64) -> Result<Vec<Invitation>> {
        let all: Vec<Invitation> = self.0.documents(INVITATION)?;
        let (valid, old): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|invitation| invitation.until_ms > now_ms);
        old.iter().try_for_each(|invitation| self.withdraw(&invitation.name))?;
        Ok(valid)
    }

    /// Removes an invitation.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn withdraw(&self, name: &MachineName) -> Result<()> {
        self.0.remove(name, INVITATION).map(drop)
    }

    fn check_free(&self, name: &MachineName) -> Result<()> {
        match self.0.has(name, LINK) {
            false => Ok(()),
            true => {
                let text = format!("there is a link {name} already");
                Err(Error::new(ErrorKind::AlreadyExists, text)
                    .advise("choose another name, or remove it: coldrise link remove"))
            }
        }
    }
}
