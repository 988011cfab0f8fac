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
use crate::socket_access::SocketAccess;

const NAME: &str = "nbdkit";

/// Name of the plugin's file.
pub(crate) const PLUGIN_FILE: &str = "nbdkit-coldrise-plugin.so";
/// nbdkit's own name for it, where it lies in nbdkit's folder of plugins.
const PLUGIN_NAME: &str = "coldrise";
/// Beside the plugin: the library that keeps clients from ending nbdkit.
const PRELOAD_FILE: &str = "nbdkit-coldrise-preload.so";
/// Where the loader looks for such libraries.
const PRELOAD: &str = "LD_PRELOAD";

/// The file by which nbdkit tells that it accepts connections.
const READY_FILE: &str = "ready";
/// An nbdkit that crashes is started again at once, and after this pause if it crashes
/// again within [`STEADY_LIFE`]. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const STEADY_LIFE: Duration = Duration::from_secs(30);
/// How often a starting nbdkit is looked at.
const START_INTERVAL: Duration = Duration::from_millis(2);
/// How long clients have time to leave.
const CLIENTS_PATIENCE: Duration = Duration::from_secs(5);

/// Where clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket, and who can connect to it.
    Socket(PathBuf, SocketAccess),
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
            Endpoint::Socket(path, _) => {
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
    /// Before the next start; `None` until it was started again.
    pause: Option<Duration>,
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

/// What the loader has to load with nbdkit, beside what it loads anyway.
fn preloaded(plugin: &Path) -> Option<OsString> {
    let library = plugin.with_file_name(PRELOAD_FILE);
    // The loader takes a blank or a colon for the end of a name.
    let is_loadable = library.is_file() && !library.to_string_lossy().contains([' ', ':']);
    if !is_loadable {
        tracing::warn!(
            "{} cannot be loaded with nbdkit: with Debian 12's nbdkit a client that breaks off \
             disconnects all others; put it beside the plugin",
            library.display()
        );
        return None;
    }
    let mut libraries = std::env::var_os(PRELOAD).unwrap_or_default();
    if !libraries.is_empty() {
        libraries.push(":");
    }
    libraries.push(library);
    Some(libraries)
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
            Endpoint::Socket(path, _) => {
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
        let plugin = plugin();
        command.envs(preloaded(&plugin).map(|libraries| (PRELOAD, libraries)));
        command.arg(plugin);
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
            pause: None,
            endpoint: options.endpoint.clone(),
            has_tls: options.tls.is_some(),
            directory,
        };
        match nbdkit.await_ready(signals)? {
            None => Ok(nbdkit),
            Some(status) => Err(child::ended_error(NAME, status)),
        }
    }

    /// nbdkit writes its process id, and listens, before the plugin has opened the
    /// repository; after that it greets clients. Tells how it ended where it does not come to
    /// that.
    fn await_ready(&mut self, signals: &mut ChildSignals) -> Result<Option<ExitStatus>> {
        let mut client = None;
        while !client.as_mut().is_some_and(is_greeted) {
            if client.is_none() && self.ready_file().exists() {
                client = self.endpoint.connect().ok();
            }
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            if signals.was_asked_to_end() {
                return Err(Error::new(ErrorKind::Interrupted, "interrupted while nbdkit started"));
            }
            std::thread::sleep(START_INTERVAL);
        }
        if let Endpoint::Socket(path, access) = &self.endpoint {
            access.apply(path)?;
        }
        Ok(None)
    }

    fn ready_file(&self) -> PathBuf {
        self.directory.path().join(READY_FILE)
    }

    /// The URI of an export; an empty name for the server as a whole.
    pub(crate) fn uri(&self, export: &str) -> String {
        let tls = if self.has_tls { "s" } else { "" };
        match &self.endpoint {
            Endpoint::Tcp(address) => format!("nbd{tls}://{address}/{export}"),
            Endpoint::Socket(path, _) => {
                format!("nbd{tls}+unix:///{export}?socket={}", path.display())
            }
        }
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context(|| "looking after nbdkit")
    }

    /// Serves until this program is asked to end, or somebody asks nbdkit itself to.
    ///
    /// # Errors
    /// As [`Nbdkit::keep_up`].
    pub(crate) fn serve(
        &mut self,
        invocation: &Invocation,
        signals: &mut ChildSignals,
    ) -> Result<()> {
        loop {
            if signals.wait() {
                return self.stop(Some(signals));
            }
            match self.keep_up(invocation, signals) {
                Ok(None) => {}
                Ok(Some(_)) => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => break,
                Err(error) => {
                    self.clear();
                    return Err(error);
                }
            }
        }
        self.clear();
        Ok(())
    }

    /// To be called when it may have ended: tells how, where it was asked to. Otherwise it
    /// is started again, however often that takes: machines run on it.
    ///
    /// # Errors
    /// `ToolFailed` where the first one ends with an error by itself. Later ones fail for
    /// good only where another try cannot help: the repository is gone, it has another
    /// passphrase, another server has taken the socket. `Interrupted` where this program
    /// is asked to end meanwhile.
    pub(crate) fn keep_up(
        &mut self,
        invocation: &Invocation,
        signals: &mut ChildSignals,
    ) -> Result<Option<ExitStatus>> {
        while let Some(status) = self.ended()? {
            if status.success() {
                return Ok(Some(status));
            }
            if status.signal().is_none() {
                self.check_that_it_can_serve(invocation, status)?;
            }
            tracing::error!(
                "nbdkit ended ({status}) and is started again. What was flushed is not lost; \
                 clients have to connect again, which QEMU does by itself with reconnect-delay"
            );
            self.wait_before_start(signals)?;
            if let Endpoint::Socket(path, _) = &self.endpoint {
                clear_stale_socket(path)?;
            }
            let _ = std::fs::remove_file(self.ready_file());
            match self.command.spawn() {
                Ok(child) => self.child = child,
                // It has ended still: that is found at once, and tried again.
                Err(error) => tracing::error!("{}", missing(error).full_message()),
            }
            self.started = Instant::now();
            self.await_ready(signals)?;
        }
        Ok(None)
    }

    /// After an end with an error, which nbdkit has said itself.
    fn check_that_it_can_serve(&self, invocation: &Invocation, status: ExitStatus) -> Result<()> {
        if self.pause.is_none() {
            return Err(child::ended_error(NAME, status));
        }
        match invocation.open() {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NoRepository
                        | ErrorKind::WrongPassphrase
                        | ErrorKind::InvalidInput
                        | ErrorKind::Unsupported
                ) =>
            {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    fn wait_before_start(&mut self, signals: &mut ChildSignals) -> Result<()> {
        let is_steady = self.started.elapsed() >= STEADY_LIFE;
        let pause = self.pause.filter(|_| !is_steady).unwrap_or_default();
        self.pause = Some((pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE));
        let began = Instant::now();
        while began.elapsed() < pause {
            if signals.was_asked_to_end() {
                let what = "interrupted while nbdkit was to be started again";
                return Err(Error::new(ErrorKind::Interrupted, what));
            }
            std::thread::sleep(START_INTERVAL);
        }
        Ok(())
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
        if let Endpoint::Socket(path, _) = &self.endpoint {
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
