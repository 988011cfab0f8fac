//! Samba's smbd.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use coldrise_block::{Context, Error, ErrorKind, Result, end_with_this_thread};
use rustix::process::Signal;

use super::smb_configuration::{self, ACCOUNT, OLDEST, SmbConfiguration};
use super::{Program, check_free, is_listening};

const PROGRAM: &str = "smbd";
const SET_PASSWORD: &str = "smbpasswd";

/// The parameters of the server.
pub struct SmbOptions {
    /// The address and port.
    pub listen: SocketAddr,
    /// The name of the user.
    pub user: String,
    /// The password of the user.
    pub password: String,
    /// As `hosts allow` has them.
    pub allowed: Vec<String>,
    /// Whether sessions are read-only, too.
    pub is_read_only: bool,
}

/// smbd with a configuration of its own.
pub struct Smbd {
    listen: SocketAddr,
    configuration: PathBuf,
}

/// Checks that a Samba that fits is installed.
///
/// # Errors
/// `ToolFailed` if it is missing, `Unsupported` if it is too old.
pub fn check_installed() -> Result<()> {
    let output = Command::new(PROGRAM).arg("--version").output().map_err(missing)?;
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    match smb_configuration::version(&output) {
        Some(found) if found >= OLDEST => Ok(()),
        _ => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "smbd says \"{}\", and Samba {}.{} or newer is needed: install Debian 12's samba",
                output.trim(),
                OLDEST.0,
                OLDEST.1
            ),
        )),
    }
}

fn missing(error: std::io::Error) -> Error {
    let text = "starting smbd, which serves SMB (Debian: apt install samba)";
    Error::with_source(ErrorKind::ToolFailed, text, error)
}

impl Smbd {
    /// Writes the configuration and the password into the folder `state`.
    ///
    /// # Errors
    /// `InvalidInput` for a user, password or path that Samba does not take, `Busy` if another server
    /// has the address, `ToolFailed` if Samba is missing.
    pub fn new(options: &SmbOptions, mount: &Path, state: &Path) -> Result<Smbd> {
        let users = smb_configuration::user_map(&options.user)?;
        check_free(options.listen)?;
        let text = SmbConfiguration {
            listen: options.listen,
            mount,
            state,
            allowed: &options.allowed,
            is_read_only: options.is_read_only,
        }
        .text()?;
        let configuration = state.join("smb.conf");
        for (file, text) in [(&configuration, text), (&state.join("users"), users)] {
            std::fs::write(file, text).context(|| format!("writing {}", file.display()))?;
        }
        set_password(&configuration, &options.password)?;
        Ok(Smbd { listen: options.listen, configuration })
    }
}

/// The password travels through a pipe: arguments are seen by all users of the host.
fn set_password(configuration: &Path, password: &str) -> Result<()> {
    let what = || "setting the share's password with smbpasswd";
    let mut command = Command::new(SET_PASSWORD);
    command.arg("-c").arg(configuration).args(["-s", "-a", ACCOUNT]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(missing)?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(format!("{password}\n{password}\n").as_bytes()).context(what)?;
    }
    let done = child.wait_with_output().context(what)?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(Error::new(ErrorKind::ToolFailed, format!("{}: {}", what(), said.trim())))
}

impl Program for Smbd {
    const NAME: &'static str = PROGRAM;

    fn spawn(&self) -> Result<Child> {
        let mut command = Command::new(PROGRAM);
        end_with_this_thread(&mut command, Signal::TERM);
        command.args(["--foreground", "--debug-stdout"]);
        command.arg("--configfile").arg(&self.configuration);
        // It makes a process group of its own.
        command.stdin(Stdio::null()).stdout(std::io::stderr());
        tracing::debug!(?command, "starting smbd");
        command.spawn().map_err(missing)
    }

    fn is_ready(&self) -> Result<bool> {
        Ok(is_listening(self.listen))
    }
}
