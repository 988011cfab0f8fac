//! Calls of OpenSSH's programs.

use std::ffi::OsStr;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use coldrise_block::{
    Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind, create_private,
};

use crate::address::HostAddress;
use crate::cipher;
use crate::key::HostKey;

/// Longest path of a folder in which ssh can make its control socket, in bytes.
const MAX_FOLDER_BYTES: usize = 70;
const MAX_SHOWN_CHARS: usize = 400;

/// What ssh needs for a host: a private folder with its keys and its control socket.
#[derive(Clone)]
pub(crate) struct SshFolder {
    folder: Arc<ScratchFolder>,
    pub(crate) address: HostAddress,
    alias: String,
    accepts_any_key: bool,
    /// See [`cipher::preferred`].
    ciphers: Option<String>,
}

impl SshFolder {
    /// With a `key` the host must have it; without, any key is accepted and can be read by [`SshFolder::seen_key`].
    pub(crate) fn new(
        name: &str,
        address: &HostAddress,
        key: Option<&HostKey>,
        identity: &[u8],
    ) -> Result<SshFolder> {
        let temporary = std::env::temp_dir();
        let is_short = temporary.as_os_str().len() <= MAX_FOLDER_BYTES;
        let parent = if is_short { temporary } else { PathBuf::from("/tmp") };
        let folder = Arc::new(ScratchFolder::new_in(&parent, ScratchKind::Host)?);
        let alias = format!("coldrise-{name}");
        let asking = |more: &[&str]| {
            let mut command = Command::new("ssh");
            command.arg("-G").args(more);
            add_place(&mut command, address);
            command.arg(&address.host);
            command
        };
        let ciphers = cipher::preferred(asking(&[]), asking(&["-F", "none"]));
        let accepts_any_key = key.is_none();
        let ssh = SshFolder { folder, address: address.clone(), alias, accepts_any_key, ciphers };
        let write = |name: &str, content: &[u8]| {
            let path = ssh.path(name);
            let written = create_private(&path).and_then(|mut file| file.write_all(content));
            written.context(|| format!("writing {}", path.display()))
        };
        let known = key.map_or(String::new(), |key| format!("{} {key}\n", ssh.alias));
        write("known_hosts", known.as_bytes())?;
        write("key", identity)?;
        Ok(ssh)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command up to the words for the host. Input and output are chosen by the caller.
    pub(crate) fn command(&self, is_master: bool) -> Command {
        let mut command = Command::new("ssh");
        let option = |name: &str, value: &OsStr| {
            let mut text = std::ffi::OsString::from(format!("{name}="));
            text.push(value);
            text
        };
        let checking = if self.accepts_any_key { "accept-new" } else { "yes" };
        let texts = [
            ("BatchMode", "yes"),
            ("ConnectTimeout", "20"),
            ("ServerAliveInterval", "15"),
            ("ServerAliveCountMax", "3"),
            ("StrictHostKeyChecking", checking),
            ("GlobalKnownHostsFile", "/dev/null"),
            ("UpdateHostKeys", "no"),
            ("HostKeyAlias", &self.alias),
            ("CheckHostIP", "no"),
            ("HashKnownHosts", "no"),
            ("ForwardAgent", "no"),
            ("ForwardX11", "no"),
            ("PermitLocalCommand", "no"),
            ("RemoteCommand", "none"),
            ("RequestTTY", "no"),
            ("LogLevel", "ERROR"),
            ("StreamLocalBindUnlink", "yes"),
            ("ControlMaster", if is_master { "yes" } else { "no" }),
            ("ControlPersist", "no"),
        ];
        for (name, value) in texts {
            command.arg("-o").arg(option(name, OsStr::new(value)));
        }
        let paths = [
            ("UserKnownHostsFile", "known_hosts"),
            ("IdentityFile", "key"),
            ("ControlPath", "control"),
        ];
        for (name, file) in paths {
            command.arg("-o").arg(option(name, self.path(file).as_os_str()));
        }
        if let Some(ciphers) = &self.ciphers {
            command.arg("-o").arg(option("Ciphers", OsStr::new(ciphers)));
        }
        add_place(&mut command, &self.address);
        // Ctrl-C of a terminal is for us: we end what was begun on the host first.
        command.process_group(0).env("LC_ALL", "C");
        command
    }

    /// The host's name for ssh.
    pub(crate) fn destination(&self) -> &str {
        &self.address.host
    }

    /// Lets a socket of this host lead to one of the other host.
    pub(crate) fn forward(&self, local: &Path, remote: &Path) -> Result<()> {
        self.ask("forward", "-L", local, remote)
    }

    /// Lets a socket of the other host lead to one of this host.
    pub(crate) fn forward_back(&self, remote: &Path, local: &Path) -> Result<()> {
        self.ask("forward", "-R", remote, local)
    }

    /// Checks that [`SshFolder::forward_back`] works.
    pub(crate) fn try_back(&self, remote: &Path, local: &Path) -> Result<()> {
        self.forward_back(remote, local)?;
        self.ask("cancel", "-R", remote, local)
    }

    /// Lets a free TCP port of loopback here lead to one there. Returns it.
    pub(crate) fn forward_port(&self, remote: u16) -> Result<u16> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let address = listener.and_then(|listener| listener.local_addr());
        let local = address.context(|| "looking for a free port")?.port();
        let end = |port: u16| format!("127.0.0.1:{port}");
        self.ask("forward", "-L", end(local).as_ref(), end(remote).as_ref()).map(|()| local)
    }

    /// Asks the connection's ssh for a change of its ways.
    fn ask(&self, change: &str, kind: &str, from: &Path, to: &Path) -> Result<()> {
        let mut way = from.as_os_str().to_owned();
        way.push(":");
        way.push(to);
        let mut command = self.command(false);
        command.args(["-O", change, kind]).arg(way).arg(self.destination());
        text_of(&mut command).map(drop)
    }

    /// The private key is needed for the login only.
    pub(crate) fn forget_identity(&self) -> Result<()> {
        coldrise_block::remove_if_present(&self.path("key")).map(drop)
    }

    /// The key that the host has shown.
    pub(crate) fn seen_key(&self) -> Option<HostKey> {
        let text = std::fs::read_to_string(self.path("known_hosts")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(&self.alias))?;
        HostKey::parse(line).ok()
    }
}

/// The options for an address beside its host.
fn add_place(command: &mut Command, address: &HostAddress) {
    if let Some(user) = &address.user {
        command.args(["-l", user]);
    }
    if let Some(port) = address.port {
        command.args(["-p", &port.to_string()]);
    }
}

/// Runs a program that ends soon, and returns what it writes.
pub(crate) fn text_of(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| {
        let text = format!("starting {program} (Debian: apt install openssh-client)");
        Error::with_source(ErrorKind::ToolFailed, text, error)
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = format!("{program} failed: {}", shown(&String::from_utf8_lossy(&output.stderr)));
    Err(Error::new(ErrorKind::ToolFailed, text))
}

/// The last lines of a program's messages on one line, without control characters.
pub(crate) fn shown(messages: &str) -> String {
    let lines: Vec<&str> = messages
        .lines()
        .map(|line| line.trim().trim_end_matches('.'))
        .filter(|line| !line.is_empty())
        .collect();
    let text = lines[lines.len().saturating_sub(3)..].join("; ");
    text.chars().filter(|c| !c.is_control()).take(MAX_SHOWN_CHARS).collect()
}

pub(crate) const SESSIONS_ADVICE: &str = "sshd there does not allow another session in one connection: raise MaxSessions in its sshd_config (10 is enough), or allow \
     AllowStreamLocalForwarding";

/// Whether ssh says that MaxSessions is reached.
pub(crate) fn is_session_refused(messages: &str) -> bool {
    messages.contains("Session open refused by peer")
}

/// The error for ssh's messages when a login fails. `said` is the login shell's last line, `code` ssh's exit code.
pub(crate) fn login_error(
    name: &str,
    address: &HostAddress,
    messages: &str,
    said: &str,
    code: Option<i32>,
) -> Error {
    let error = |kind, text: &str| Error::new(kind, format!("host {name}: {text}"));
    if messages.contains("IDENTIFICATION HAS CHANGED")
        || messages.contains("Host key verification failed")
    {
        return error(ErrorKind::Forbidden, "its SSH key differs from the one at host add: nothing was sent to it").advise(
            "if the host was reinstalled, remove and add it: coldrise host remove, coldrise host add; otherwise the connection may be intercepted",
        );
    }
    if messages.contains("Permission denied") {
        return error(ErrorKind::Unauthorized, "it does not accept this repository's key").advise(
            "append the line that coldrise host key shows to ~/.ssh/authorized_keys of its user",
        );
    }
    if messages.contains("kex_exchange_identification") {
        return error(ErrorKind::ToolFailed, &format!("it ended the connection before the login: {}", shown(messages))).advise(
            "its sshd may have too many connections before their login: wait, or raise MaxStartups in its sshd_config; see its log",
        );
    }
    let said = Some(said).filter(|said| !said.is_empty());
    let said = said.map(|said| format!("its login shell says: {said}"));
    let said: Vec<String> = [Some(shown(messages)), said]
        .into_iter()
        .flatten()
        .filter(|text| !text.is_empty())
        .collect();
    let text = match (said.is_empty(), code) {
        (false, _) => said.join("; "),
        // ssh's own code, after a login.
        (true, Some(255)) => "it opens no session (MaxSessions 0 in its sshd_config?)".to_owned(),
        (true, _) => "ssh ended without a message".to_owned(),
    };
    error(ErrorKind::ToolFailed, &text).advise(format!("try it by hand: ssh -v {address}"))
}
