//! nbdkit as a child, with the plugin that serves the repository.

use std::ffi::OsString;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::PassphraseSource;
use tempfile::TempDir;

use crate::child;
use crate::invocation::{Invocation, PASSPHRASE_COMMAND};
use crate::signals::ChildSignals;

const NAME: &str = "nbdkit";

/// Name of the plugin's file.
pub(crate) const PLUGIN_FILE: &str = "nbdkit-coldrise-plugin.so";
/// nbdkit's own name for it, where it lies in nbdkit's folder of plugins.
const PLUGIN_NAME: &str = "coldrise";

/// The file by which nbdkit tells that it accepts connections.
const READY_FILE: &str = "ready";
/// An nbdkit that a signal ends sooner than this after its start would do so again.
const LIFE_WORTH_REPEATING: Duration = Duration::from_millis(500);
/// How often a starting nbdkit is looked at.
const START_INTERVAL: Duration = Duration::from_millis(2);
/// How long clients have time to leave.
const CLIENTS_PATIENCE: Duration = Duration::from_secs(5);

/// Where clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket that only this user can connect to (nbdkit sees to its mode).
    Socket(PathBuf),
}

impl Endpoint {
    /// A client that waits [`START_INTERVAL`] at most for what it reads.
    fn connect(&self) -> std::io::Result<Box<dyn Read>> {
        match self {
            Endpoint::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_read_timeout(Some(START_INTERVAL))?;
                Ok(Box::new(stream))
            }
            Endpoint::Socket(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(START_INTERVAL))?;
                Ok(Box::new(stream))
            }
        }
    }
}

/// True once the server has said anything. Where the connection ends the server ends, too.
fn is_greeted(client: &mut Box<dyn Read>) -> bool {
    client.read(&mut [0; 18]).is_ok_and(|count| count > 0)
}

/// TLS, with certificates on both sides or a shared key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Tls {
    /// Directory with ca-cert.pem, server-cert.pem and server-key.pem; clients have
    /// to show a certificate of the same CA.
    Certificates(PathBuf),
    /// File with the clients' names and keys.
    SharedKeys(PathBuf),
}

/// What is to be served, and how.
pub(crate) struct ServeOptions {
    pub(crate) endpoint: Endpoint,
    pub(crate) tls: Option<Tls>,
    /// Memory for decoded chunks.
    pub(crate) cache_bytes: u64,
    /// Sessions cannot be written either.
    pub(crate) is_read_only: bool,
    /// Clients that ask for a list see image files, too.
    pub(crate) lists_formats: bool,
}

/// A running nbdkit. Dropped, it is ended.
pub(crate) struct Nbdkit {
    child: Child,
    /// What started it, to start it again.
    command: Command,
    started: Instant,
    endpoint: Endpoint,
    has_tls: bool,
    directory: TempDir,
}

/// The plugin beside this program, or where it lies after an installation; else the
/// name by which nbdkit looks for it.
pub(crate) fn plugin() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new("."));
    let places = [folder.join(PLUGIN_FILE), folder.join("../lib/nbdkit/plugins").join(PLUGIN_FILE)];
    places.into_iter().find(|place| place.is_file()).unwrap_or_else(|| PLUGIN_NAME.into())
}

/// The error for an nbdkit that cannot be started.
pub(crate) fn missing(error: std::io::Error) -> Error {
    Error::with_source(
        ErrorKind::ToolFailed,
        "starting nbdkit, which serves the disks (Debian: apt install nbdkit)",
        error,
    )
}

impl Nbdkit {
    /// Starts nbdkit and returns when it accepts connections.
    ///
    /// # Errors
    /// `ToolFailed` where nbdkit is missing or ends, `Interrupted` where this program
    /// is asked to end meanwhile, `Busy` where somebody serves at that place.
    pub(crate) fn start(
        invocation: &Invocation,
        options: &ServeOptions,
        signals: &mut ChildSignals,
    ) -> Result<Nbdkit> {
        let directory = tempfile::Builder::new()
            .prefix("coldrise-nbdkit-")
            .tempdir()
            .context(|| "making a private folder for nbdkit")?;
        let ready = directory.path().join(READY_FILE);
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--pidfile"]).arg(&ready);
        match &options.endpoint {
            Endpoint::Tcp(address) => {
                command.arg("--ipaddr").arg(address.ip().to_string());
                command.arg("--port").arg(address.port().to_string());
            }
            Endpoint::Socket(path) => {
                clear_stale_socket(path)?;
                command.arg("--unix").arg(absolute(path)?);
            }
        }
        match &options.tls {
            None => {}
            Some(Tls::Certificates(path)) => {
                command.args(["--tls=require", "--tls-verify-peer"]);
                command.arg(option_with("--tls-certificates=", &absolute(path)?));
            }
            Some(Tls::SharedKeys(path)) => {
                command.arg("--tls=require");
                command.arg(option_with("--tls-psk=", &absolute(path)?));
            }
        }
        if options.is_read_only {
            command.arg("--readonly");
        }
        command.arg(plugin());
        command.arg(option_with("repo=", &absolute(invocation.repository_path()?)?));
        // A command is no argument, which everybody can read.
        command.env_remove(PASSPHRASE_COMMAND);
        let mut passphrase_command = None;
        match invocation.passphrase()? {
            PassphraseSource::None => {}
            PassphraseSource::File(path) => {
                command.arg(option_with("passphrase-file=", &absolute(&path)?));
            }
            PassphraseSource::Command(text) => passphrase_command = Some(text),
        }
        command.arg(format!("chunk-cache={}", options.cache_bytes));
        if options.lists_formats {
            command.arg("list-formats=true");
        }
        tracing::debug!(?command, "starting nbdkit");
        // From here on the command shows it: it is told to nobody.
        command.envs(passphrase_command.map(|text| (PASSPHRASE_COMMAND, text)));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut nbdkit = Nbdkit {
            child: command.spawn().map_err(missing)?,
            command,
            started: Instant::now(),
            endpoint: options.endpoint.clone(),
            has_tls: options.tls.is_some(),
            directory,
        };
        nbdkit.await_ready(signals)?;
        Ok(nbdkit)
    }

    /// nbdkit writes its process id, and listens, before the plugin has opened the
    /// repository; after that it greets clients.
    fn await_ready(&mut self, signals: &mut ChildSignals) -> Result<()> {
        let mut client = None;
        while !client.as_mut().is_some_and(is_greeted) {
            if client.is_none() && self.ready_file().exists() {
                client = self.endpoint.connect().ok();
            }
            if let Some(status) = self.ended()? {
                return Err(child::ended_error(NAME, status));
            }
            if signals.was_asked_to_end() {
                return Err(Error::new(ErrorKind::Interrupted, "interrupted while nbdkit started"));
            }
            std::thread::sleep(START_INTERVAL);
        }
        Ok(())
    }

    fn ready_file(&self) -> PathBuf {
        self.directory.path().join(READY_FILE)
    }

    /// Starts it once more after it was ended by a signal.
    fn start_again(&mut self, status: ExitStatus, signals: &mut ChildSignals) -> Result<()> {
        tracing::error!(
            "nbdkit ended ({status}) and is started again. What was written is not lost; clients \
             have to connect again, which QEMU does by itself with reconnect-delay"
        );
        if let Endpoint::Socket(path) = &self.endpoint {
            clear_stale_socket(path)?;
        }
        let ready = self.ready_file();
        std::fs::remove_file(&ready).context(|| format!("removing {}", ready.display()))?;
        self.child = self.command.spawn().map_err(missing)?;
        self.started = Instant::now();
        self.await_ready(signals)
    }

    /// The URI of an export; an empty name for the server as a whole.
    pub(crate) fn uri(&self, export: &str) -> String {
        let tls = if self.has_tls { "s" } else { "" };
        match &self.endpoint {
            Endpoint::Tcp(address) => format!("nbd{tls}://{address}/{export}"),
            Endpoint::Socket(path) => {
                format!("nbd{tls}+unix:///{export}?socket={}", path.display())
            }
        }
    }

    /// Whether it has ended, and how.
    ///
    /// # Errors
    /// `Io` where the system does not say.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context(|| "looking after nbdkit")
    }

    /// Serves until nbdkit ends by itself or this program is asked to end. Where a
    /// signal ends nbdkit it is started again: it serves many machines, and the
    /// nbdkit of Debian 12 aborts when one client goes away with requests under way.
    ///
    /// # Errors
    /// `ToolFailed` where nbdkit ends with an error, or by a signal soon after its start.
    pub(crate) fn serve(&mut self, signals: &mut ChildSignals) -> Result<()> {
        loop {
            if signals.wait() {
                return self.stop(Some(signals));
            }
            if let Some(status) = self.ended()? {
                if status.signal().is_some() && self.started.elapsed() > LIFE_WORTH_REPEATING {
                    self.start_again(status, signals)?;
                    continue;
                }
                self.clear();
                return if status.success() {
                    Ok(())
                } else {
                    Err(child::ended_error(NAME, status))
                };
            }
        }
    }

    /// Ends nbdkit in good order: sessions are flushed and closed. It waits for its
    /// clients to leave; where they do not it is killed, after a while or when this
    /// program is asked again. What it has written is not lost by that.
    ///
    /// # Errors
    /// `ToolFailed` where it ends with an error.
    pub(crate) fn stop(&mut self, signals: Option<&mut ChildSignals>) -> Result<()> {
        let ended = child::end(&mut self.child, NAME, CLIENTS_PATIENCE, signals)?;
        self.clear();
        if ended.was_killed {
            tracing::warn!("clients were still connected when nbdkit was ended");
            return Ok(());
        }
        match ended.status.success() {
            true => Ok(()),
            false => Err(child::ended_error(NAME, ended.status)),
        }
    }

    /// Removes the socket.
    fn clear(&self) {
        if let Endpoint::Socket(path) = &self.endpoint {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // Where it cannot be asked it ends with its parent.
            let _ = self.stop(None);
        }
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).context(|| format!("finding the path of {}", path.display()))
}

/// `option` and a path in one word.
fn option_with(option: &str, path: &Path) -> OsString {
    let mut word = OsString::from(option);
    word.push(path);
    word
}

/// Removes a socket that nobody listens on any more.
fn clear_stale_socket(path: &Path) -> Result<()> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !metadata.file_type().is_socket() {
        return Err(Error::new(
            ErrorKind::AlreadyExists,
            format!("{} is there and is no socket: give another path", path.display()),
        ));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(Error::new(
            ErrorKind::Busy,
            format!("another server listens on {}: use that one, or end it", path.display()),
        )),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).context(|| format!("removing the socket {}", path.display()))
        }
        Err(error) => Err(error).context(|| format!("looking at the socket {}", path.display())),
    }
}
