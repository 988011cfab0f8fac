//! Targets and their names, and the lines that connect to them.

use std::net::SocketAddr;
use std::path::PathBuf;

use coldrise_block::{Error, ErrorKind, Result};

/// The beginning of every target's name.
const AUTHORITY: &str = "iqn.2026-11.localhost.coldrise";
/// Bounds of a CHAP secret in characters: Windows' initiator takes no other.
const SECRET_CHARS: std::ops::RangeInclusive<usize> = 12..=16;
/// Longest user name in characters.
const USER_CHARS: usize = 63;

/// A restore point or session; its disks are LUNs 1, 2 and so on.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its address, such as `live/rescue`.
    pub address: String,
    /// Whether writes are refused.
    pub is_read_only: bool,
    /// LUN 1, 2 and so on.
    pub luns: Vec<Lun>,
}

/// A disk of a target.
#[derive(Clone, Debug)]
pub struct Lun {
    /// The disk's name.
    pub disk: String,
    /// The raw file of the disk in the mount.
    pub path: PathBuf,
}

/// The name and the secret that initiators have to give.
#[derive(Clone)]
pub struct Chap {
    user: String,
    secret: String,
}

impl Chap {
    /// # Errors
    /// `InvalidInput` for a name that tgtd, or a secret that Windows does not take.
    pub fn new(user: &str, secret: &str) -> Result<Chap> {
        let invalid = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
        let is_plain = |c: char| c.is_ascii_graphic() && c != ',';
        if !(1..=USER_CHARS).contains(&user.len()) || !user.chars().all(is_plain) {
            return invalid(format!(
                "{user:?} is not a name for CHAP: give up to {USER_CHARS} ASCII characters without blanks \
                 and commas"
            ));
        }
        if !SECRET_CHARS.contains(&secret.len()) || !secret.chars().all(is_plain) {
            return invalid(format!(
                "the CHAP secret must have {} to {} ASCII characters, without blanks and commas",
                SECRET_CHARS.start(),
                SECRET_CHARS.end()
            ));
        }
        Ok(Chap { user: user.to_owned(), secret: secret.to_owned() })
    }

    /// The user's name.
    pub fn user(&self) -> &str {
        &self.user
    }

    pub(super) fn secret(&self) -> &str {
        &self.secret
    }
}

impl Target {
    /// Its name: the address in the characters that names of targets have.
    pub fn name(&self) -> String {
        let allowed = |c: char| match c.to_ascii_lowercase() {
            c if c.is_ascii_alphanumeric() || c == '-' || c == '.' => c,
            '/' => ':',
            _ => '-',
        };
        format!("{AUTHORITY}:{}", self.address.chars().map(allowed).collect::<String>())
    }
}

/// Refuses two targets of one name.
///
/// # Errors
/// `InvalidInput`, naming both.
pub fn check_names(targets: &[Target]) -> Result<()> {
    for (at, target) in targets.iter().enumerate() {
        if let Some(other) = targets[..at].iter().find(|other| other.name() == target.name()) {
            let text = format!(
                "{} and {} would be one iSCSI target: serve them with two commands, on two ports",
                other.address, target.address
            );
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    }
    Ok(())
}

/// The commands that connect to a target, by the client that runs them.
pub fn lines(
    target: &Target,
    server: &str,
    listen: SocketAddr,
    chap: Option<&Chap>,
) -> [(&'static str, String); 3] {
    let (name, port) = (target.name(), listen.port());
    let windows_chap = chap.map_or_else(String::new, |chap| {
        format!(" -AuthenticationType ONEWAYCHAP -ChapUsername {} -ChapSecret SECRET", chap.user)
    });
    let linux_chap = chap.map_or_else(String::new, |chap| {
        let set = |name: &str, value: &str| {
            format!(
                "iscsiadm -m node -T {name_} -p {server}:{port} -o update -n {name} -v {value} && ",
                name_ = target.name()
            )
        };
        [
            set("node.session.auth.authmethod", "CHAP"),
            set("node.session.auth.username", &chap.user),
            set("node.session.auth.password", "SECRET"),
        ]
        .concat()
    });
    let qemu_user = chap.map_or_else(String::new, |chap| format!("{}%SECRET@", chap.user));
    [
        (
            "Windows",
            format!(
                "New-IscsiTargetPortal -TargetPortalAddress {server} -TargetPortalPortNumber {port}; \
                 Connect-IscsiTarget -NodeAddress {name}{windows_chap}"
            ),
        ),
        (
            "Linux",
            format!(
                "iscsiadm -m discovery -t sendtargets -p {server}:{port} && {linux_chap}iscsiadm -m \
                 node -T {name} -p {server}:{port} --login"
            ),
        ),
        ("QEMU", format!("iscsi://{qemu_user}{server}:{port}/{name}/1")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(address: &str) -> Target {
        Target { address: address.to_owned(), is_read_only: false, luns: Vec::new() }
    }

    #[test]
    fn names_have_the_characters_of_names() {
        assert_eq!(
            target("web01/20261120T100000Z+1").name(),
            "iqn.2026-11.localhost.coldrise:web01:20261120t100000z-1"
        );
        assert!(check_names(&[target("live/a"), target("live/b")]).is_ok());
        let error = check_names(&[target("live/a_b"), target("live/a-b")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn secrets_are_those_that_windows_takes() {
        assert!(Chap::new("web", "123456789012").is_ok());
        for (user, secret) in
            [("web", "short"), ("web", "12345678901234567"), ("a,b", "123456789012")]
        {
            assert!(Chap::new(user, secret).is_err(), "{user} {secret}");
        }
    }
}
