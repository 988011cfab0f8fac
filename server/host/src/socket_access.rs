//! Access rights of a Unix socket.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

use coldrise_block::{Context, Error, ErrorKind, Result};

/// A user, and optionally a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketOwner {
    user: u32,
    group: Option<u32>,
}

impl FromStr for SocketOwner {
    type Err = Error;

    /// `USER` or `USER:GROUP`, names or numbers.
    fn from_str(text: &str) -> Result<SocketOwner> {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        if user.is_empty() || group == Some("") {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{text:?} is not an owner: give USER or USER:GROUP"),
            ));
        }
        let group = group.map(|group| number_of("group", group)).transpose()?;
        Ok(SocketOwner { user: number_of("passwd", user)?, group })
    }
}

impl SocketOwner {
    /// This user, and a group by its name; `None` if there is no such group.
    pub fn of_group(name: &str) -> Option<SocketOwner> {
        let group = number_of("group", name).ok()?;
        Some(SocketOwner { user: rustix::process::geteuid().as_raw(), group: Some(group) })
    }

    /// Whether it has this group.
    pub fn is_group(self, number: u32) -> bool {
        self.group == Some(number)
    }
}

/// The number of a user or a group, from the system's databases, including LDAP and others.
fn number_of(database: &str, name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let output = Command::new("getent").args([database, "--", name]).output();
    let output = output.context(|| "starting getent, which knows users and groups")?;
    // NAME:PASSWORD:NUMBER:...
    let line = String::from_utf8_lossy(&output.stdout);
    line.split(':').nth(2).and_then(|number| number.trim().parse().ok()).ok_or_else(|| {
        let what = if database == "group" { "group" } else { "user" };
        let text = format!("there is no {what} {name:?} on this machine: give a name or a number");
        Error::new(ErrorKind::InvalidInput, text)
    })
}

/// Permissions of a socket, as chmod takes them.
///
/// # Errors
/// `InvalidInput` unless it is an octal number up to 777.
pub fn parse_mode(text: &str) -> Result<u32> {
    u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidInput,
            format!("{text:?} is not a mode of a socket: give an octal number such as 660"),
        )
    })
}

/// The owner of a socket. Users with write permission may connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// The owner, if it is not this user.
    pub owner: Option<SocketOwner>,
    /// `None`: its owner, and the group if one is given.
    pub mode: Option<u32>,
}

impl SocketAccess {
    /// Changes the socket's owner. Until then only this user can connect to it.
    ///
    /// # Errors
    /// `Io` if the system refuses: only root can give files to other users.
    pub fn apply(self, path: &Path) -> Result<()> {
        let what = |what| move || format!("{what} of the socket {}", path.display());
        let group = self.owner.and_then(|owner| owner.group);
        if let Some(owner) = self.owner {
            std::os::unix::fs::chown(path, Some(owner.user), group)
                .context(what("setting the owner (which takes root)"))?;
        }
        let mode = self.mode.unwrap_or(if group.is_some() { 0o660 } else { 0o600 });
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
            .context(what("setting the mode"))
    }
}
