//! smb.conf for a share of the mount, apart from the distribution's smbd.

use std::net::SocketAddr;
use std::path::Path;

use coldrise_block::{Error, ErrorKind, Result};

/// Name of the share.
pub const SHARE: &str = "coldrise";
/// The user of this host as which smbd works: who mounts owns the files.
pub(super) const ACCOUNT: &str = "root";
/// Oldest version of Samba, major and minor.
pub(super) const OLDEST: (u32, u32) = (4, 17);
/// Longest user name in characters, as Windows has it.
const USER_CHARS: usize = 20;

/// The parameters of the server.
#[derive(Clone, Debug)]
pub(super) struct SmbConfiguration<'a> {
    /// Address and port.
    pub listen: SocketAddr,
    /// The mount.
    pub mount: &'a Path,
    /// A private folder for all of smbd's files.
    pub state: &'a Path,
    /// Clients that may connect, as `hosts allow` has them; all, if it is empty.
    pub allowed: &'a [String],
    /// Whether the share is read-only.
    pub is_read_only: bool,
}

impl SmbConfiguration<'_> {
    /// The complete file.
    ///
    /// # Errors
    /// `InvalidInput` for a path that the file cannot hold.
    pub(super) fn text(&self) -> Result<String> {
        let state = plain(self.state)?;
        let mount = plain(self.mount)?;
        let allowed = match self.allowed {
            [] => String::new(),
            allowed => format!("    hosts allow = {}\n", allowed.join(" ")),
        };
        Ok(format!(
            "# Written by coldrise serve smb; it is gone when that ends.
[global]
    server role = standalone server
    server min protocol = SMB3_11
    # Nothing of a disk travels in plain text, and no guest gets in.
    server smb encrypt = required
    map to guest = never
    restrict anonymous = 2
    username map = {state}/users
    passdb backend = tdbsam:{state}/passdb.tdb
    interfaces = {address}
    bind interfaces only = yes
    smb ports = {port}
{allowed}    disable netbios = yes
    disable spoolss = yes
    load printers = no
    printing = bsd
    printcap name = /dev/null
    usershare max shares = 0
    private dir = {state}
    lock directory = {state}
    state directory = {state}
    cache directory = {state}
    pid directory = {state}
    ncalrpc dir = {state}/ncalrpc
    log level = 0
[{SHARE}]
    path = {mount}
    read only = {read_only}
    valid users = {ACCOUNT}
    # The mount has no extended attributes. Modules that need them would also store the sparse
    # attribute, and Hyper-V refuses a disk that has it.
    vfs objects =
    store dos attributes = no
    ea support = no
    nt acl support = no
    map archive = no
    map readonly = no
    # Files have their full size already.
    strict allocate = no
    # Hyper-V's flushes must reach the session.
    strict sync = yes
    # The same disk can change over NBD: no client may cache.
    oplocks = no
    level2 oplocks = no
    kernel oplocks = no
    # The mount lacks the locks that this needs: every open would fail.
    kernel share modes = no
    # No other program sees the mount.
    posix locking = no
",
            address = self.listen.ip(),
            port = self.listen.port(),
            read_only = if self.is_read_only { "yes" } else { "no" },
        ))
    }
}

/// The map from the user whom clients name to the account.
///
/// # Errors
/// `InvalidInput` for a name that Windows or the file does not take.
pub(super) fn user_map(user: &str) -> Result<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let is_short = (1..=USER_CHARS).contains(&user.chars().count());
    if !is_short || !user.chars().all(is_plain) || user == ACCOUNT {
        let text = format!(
            "{user:?} is not a name for the share's user: give up to {USER_CHARS} letters, digits, '.', \
             '_' and '-', and not {ACCOUNT}"
        );
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(format!("{ACCOUNT} = {user}\n"))
}

/// Major and minor version in what `smbd --version` prints.
pub(super) fn version(output: &str) -> Option<(u32, u32)> {
    let mut numbers = output.trim().strip_prefix("Version ")?.split(['.', '-']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Values cannot be quoted, and `%` begins a variable.
fn plain(path: &Path) -> Result<&str> {
    let text = path.to_str().filter(|text| !text.contains(['%', '"', ';', '#', '\n', '\\']));
    text.ok_or_else(|| {
        let text =
            format!("smbd takes no folder such as {}: set TMPDIR to another", path.display());
        Error::new(ErrorKind::InvalidInput, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_cannot_be_smuggled_in() {
        for path in ["/tmp/%u", "/tmp/a\nguest ok = yes", "/tmp/a\\"] {
            assert!(plain(Path::new(path)).is_err(), "{path}");
        }
        assert!(plain(Path::new("/var/tmp/a b")).is_ok());
        for user in ["", "root", "a = b", "a\nroot", "@all", "*", &"x".repeat(21)] {
            assert!(user_map(user).is_err(), "{user}");
        }
        assert_eq!(user_map("hyper-v").unwrap(), "root = hyper-v\n");
    }

    #[test]
    fn versions_are_read_as_samba_prints_them() {
        assert_eq!(version("Version 4.17.12-Debian\n"), Some((4, 17)));
        assert_eq!(version("Version 4.9.5"), Some((4, 9)));
        assert_eq!(version("smbd"), None);
        assert!(version("Version 4.9.5").unwrap() < OLDEST);
    }
}
