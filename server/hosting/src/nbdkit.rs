//! nbdkit as a child, with the repository's plugin.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use coldrise_block::{
    Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind, end_with_this_thread,
    path_exists,
};
use coldrise_store::PassphraseSource;
use rustix::process::Signal;

use crate::caller::{Caller, PASSPHRASE_COMMAND};
use crate::child;
use crate::installed;
use crate::signals::ChildSignals;
use coldrise_host::SocketAccess;

const NAME: &str = "nbdkit";

/// Name of the plugin's file.
pub const PLUGIN_FILE: &str = "nbdkit-coldrise-plugin.so";
/// nbdkit's own name for the plugin in nbdkit's folder of plugins.
const PLUGIN_NAME: &str = "coldrise";
/// Next to the plugin: the library that keeps clients from ending nbdkit.
const PRELOAD_FILE: &str = "nbdkit-coldrise-preload.so";
/// The environment variable with the loader's additional libraries.
const PRELOAD: &str = "LD_PRELOAD";
/// Read by the preloaded library.
const DISCONNECT: &str = "COLDRISE_DISCONNECT_AT_END";

/// nbdkit creates this file when it accepts connections.
const READY_FILE: &str = "ready";
/// After a crash nbdkit is restarted at once, or after this pause if it crashes again
/// within [`STEADY_LIFE`]. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const STEADY_LIFE: Duration = Duration::from_secs(30);
/// Interval of the checks on a starting nbdkit.
const START_INTERVAL: Duration = Duration::from_millis(2);
/// Time for sessions to be flushed; without the preloaded library, for clients to leave.
const STOP_PATIENCE: Duration = Duration::from_secs(5);
/// Time for the last messages of an ended nbdkit to be printed.
const MESSAGES_PATIENCE: Duration = Duration::from_secs(1);

/// The server's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket and its access rights.
    Socket(PathBuf, SocketAccess),
}

impl Endpoint {
    /// A client that waits at most [`START_INTERVAL`] per read.
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

/// True once the server has sent anything. The connection ends together with the server.
fn is_greeted(client: &mut Box<dyn Read>) -> bool {
    client.read(&mut [0; 18]).is_ok_and(|count| count > 0)
}

/// TLS, with certificates on both sides or a shared key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Directory with ca-cert.pem, server-cert.pem and server-key.pem; clients must present
    /// a certificate of the same CA.
    Certificates(PathBuf),
    /// File with the clients' names and keys.
    SharedKeys(PathBuf),
}

/// The parameters of the server.
pub struct ServeOptions {
    /// Where it listens.
    pub endpoint: Endpoint,
    /// TLS, if it is required.
    pub tls: Option<Tls>,
    /// Memory for decoded chunks.
    pub cache_bytes: u64,
    /// Whether sessions are read-only, too.
    pub is_read_only: bool,
    /// Whether the list of exports includes image files.
    pub lists_formats: bool,
    /// Whether nbdkit disconnects its clients when it ends, instead of answering them with errors.
    pub disconnects_at_end: bool,
    /// The exports that clients can open; all, if it is empty.
    pub only: Vec<String>,
}

/// A running nbdkit. Dropping it ends it.
pub struct Nbdkit {
    child: Child,
    /// Disconnected when all its messages are printed.
    printed: Receiver<()>,
    /// Its command, for a restart.
    command: Command,
    started: Instant,
    /// The pause before the next start; `None` before the first restart.
    pause: Option<Duration>,
    endpoint: Endpoint,
    has_tls: bool,
    directory: ScratchFolder,
}

/// The plugin next to this program, or in its installed location; otherwise the name by
/// which nbdkit searches for it.
pub fn plugin() -> PathBuf {
    installed::library("nbdkit/plugins", PLUGIN_FILE).unwrap_or_else(|| PLUGIN_NAME.into())
}

/// The loader's libraries for nbdkit, in addition to the environment's.
fn preloaded(plugin: &Path) -> Option<OsString> {
    let library = plugin.with_file_name(PRELOAD_FILE);
    // The loader splits names at blanks and colons.
    let is_loadable = library.is_file() && !library.to_string_lossy().contains([' ', ':']);
    if !is_loadable {
        tracing::warn!(
            "{} cannot be loaded with nbdkit: with Debian 12's nbdkit a client that breaks off \
             disconnects all others, and a stop gives clients errors; put it beside the plugin",
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

/// The error if nbdkit cannot be started.
pub fn missing(error: std::io::Error) -> Error {
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
    /// `ToolFailed` if nbdkit is missing or ends, `Interrupted` if this program receives a
    /// signal to end meanwhile, `Busy` if another server uses the address.
    pub fn start(
        caller: &Caller,
        options: &ServeOptions,
        signals: &mut ChildSignals,
    ) -> Result<Nbdkit> {
        let directory = ScratchFolder::new(ScratchKind::Nbdkit)?;
        let ready = directory.path().join(READY_FILE);
        let mut command = Command::new("nbdkit");
        end_with_this_thread(&mut command, Signal::TERM);
        command.args(["--foreground", "--pidfile"]).arg(&ready);
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
        if let Some(Tls::Certificates(path) | Tls::SharedKeys(path)) = &options.tls {
            check_exists(path)?;
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
        command.envs(options.disconnects_at_end.then_some((DISCONNECT, "1")));
        if !options.only.is_empty() {
            command.arg("--filter=exportname");
        }
        command.arg(plugin);
        if !options.only.is_empty() {
            command.args(["exportname-strict=true", "exportname-list=explicit"]);
            command.args(options.only.iter().map(|export| format!("exportname={export}")));
        }
        command.arg(option_with("repo=", &absolute(caller.repository_path())?));
        // Not as an argument: every user can read those.
        command.env_remove(PASSPHRASE_COMMAND);
        let mut passphrase_command = None;
        match caller.passphrase() {
            PassphraseSource::None => {}
            PassphraseSource::File(path) => {
                command.arg(option_with("passphrase-file=", &absolute(path)?));
            }
            PassphraseSource::Command(text) => passphrase_command = Some(text),
        }
        command.arg(format!("chunk-cache={}", options.cache_bytes));
        if options.lists_formats {
            command.arg("list-formats=true");
        }
        tracing::debug!(?command, "starting nbdkit");
        // From here on the command contains it: never print the command.
        command.envs(passphrase_command.map(|text| (PASSPHRASE_COMMAND, text)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(missing)?;
        let mut nbdkit = Nbdkit {
            printed: print_messages(child.stderr.take()),
            child,
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
    /// repository; after that it greets clients. Returns its end if it ends first.
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

    /// The URI of an export; with an empty name, that of the server.
    pub fn uri(&self, export: &str) -> String {
        let tls = if self.has_tls { "s" } else { "" };
        match &self.endpoint {
            Endpoint::Tcp(address) => format!("nbd{tls}://{address}/{export}"),
            Endpoint::Socket(path, _) => {
                format!("nbd{tls}+unix:///{export}?socket={}", path.display())
            }
        }
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let ended = self.child.try_wait().context(|| "looking after nbdkit")?;
        if ended.is_some() {
            let _ = self.printed.recv_timeout(MESSAGES_PATIENCE);
        }
        Ok(ended)
    }

    /// Serves until this program or nbdkit itself receives a signal to end.
    ///
    /// # Errors
    /// As [`Nbdkit::keep_up`].
    pub fn serve(&mut self, caller: &Caller, signals: &mut ChildSignals) -> Result<()> {
        loop {
            if signals.wait() {
                return self.stop(Some(signals));
            }
            match self.keep_up(caller, signals) {
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

    /// Call this when nbdkit may have ended. Returns its end if a signal asked for it.
    /// Otherwise starts it again, any number of times: machines depend on it.
    ///
    /// # Errors
    /// `ToolFailed` if the first nbdkit ends with an error by itself. A later one is final
    /// only if another try cannot help: the repository is gone, it has another passphrase,
    /// another server uses the socket. `Interrupted` if this program receives a signal to
    /// end meanwhile.
    pub fn keep_up(
        &mut self,
        caller: &Caller,
        signals: &mut ChildSignals,
    ) -> Result<Option<ExitStatus>> {
        while let Some(status) = self.ended()? {
            if status.success() {
                return Ok(Some(status));
            }
            if status.signal().is_none() {
                self.check_that_it_can_serve(caller, status)?;
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
                Ok(mut child) => {
                    self.printed = print_messages(child.stderr.take());
                    self.child = child;
                }
                // If it has ended again, the next call notices that and tries again.
                Err(error) => tracing::error!("{}", missing(error).full_message()),
            }
            self.started = Instant::now();
            self.await_ready(signals)?;
        }
        Ok(None)
    }

    /// Whether it has ended by itself and was started again.
    pub(crate) fn has_restarted(&self) -> bool {
        self.pause.is_some()
    }

    /// After an end with an error, which nbdkit has reported itself.
    fn check_that_it_can_serve(&self, caller: &Caller, status: ExitStatus) -> Result<()> {
        if self.pause.is_none() {
            return Err(child::ended_error(NAME, status));
        }
        match caller.open() {
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
                let what = "interrupted while nbdkit restarted";
                return Err(Error::new(ErrorKind::Interrupted, what));
            }
            std::thread::sleep(START_INTERVAL);
        }
        Ok(())
    }

    /// Ends nbdkit in order: the preloaded library disconnects the clients, then sessions are
    /// flushed and closed. After a time limit or a second signal it is killed; its writes
    /// survive that.
    ///
    /// # Errors
    /// `ToolFailed` if it ends with an error.
    pub fn stop(&mut self, signals: Option<&mut ChildSignals>) -> Result<()> {
        let ended = child::end(&mut self.child, NAME, STOP_PATIENCE, signals)?;
        let _ = self.printed.recv_timeout(MESSAGES_PATIENCE);
        self.clear();
        if ended.was_killed {
            tracing::warn!("nbdkit did not end in time and was killed; captured writes are kept");
            return Ok(());
        }
        if ended.status.success() { Ok(()) } else { Err(child::ended_error(NAME, ended.status)) }
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
            // If the signal fails, it ends together with its parent.
            let _ = self.stop(None);
        }
    }
}

/// Prints nbdkit's messages to standard error until it closes them. Those about clients that are gone are for the log only.
fn print_messages(messages: Option<ChildStderr>) -> Receiver<()> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let _sender = sender;
        let Some(messages) = messages else { return };
        let (mut messages, mut line) = (BufReader::new(messages), Vec::new());
        while let Ok(1..) = messages.read_until(b'\n', &mut line) {
            match is_lost_client(&line) {
                true => tracing::debug!("{}", String::from_utf8_lossy(line.trim_ascii_end())),
                false => drop(std::io::stderr().write_all(&line)),
            }
            line.clear();
        }
    });
    receiver
}

/// Whether nbdkit says that it could not write to a client, because that has disconnected.
fn is_lost_client(line: &[u8]) -> bool {
    let line = String::from_utf8_lossy(line);
    let writes = ["error: write: ", "error: write reply: ", "error: write data: "];
    let ends = [": Broken pipe", ": Connection reset by peer"];
    writes.iter().any(|text| line.contains(text))
        && ends.iter().any(|end| line.trim_end().ends_with(end))
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

fn check_exists(path: &Path) -> Result<()> {
    if path_exists(path)? {
        return Ok(());
    }
    Err(Error::new(ErrorKind::NotFound, format!("{} does not exist", path.display())))
}

/// Removes a socket without a listener.
fn clear_stale_socket(path: &Path) -> Result<()> {
    check_exists(absolute(path)?.parent().unwrap_or(Path::new("/")))?;
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !metadata.file_type().is_socket() {
        return Err(Error::new(
            ErrorKind::AlreadyExists,
            format!("{} exists and is not a socket: give another path", path.display()),
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

#[cfg(test)]
mod tests {
    use super::is_lost_client;

    #[test]
    fn messages_about_lost_clients_are_recognized() {
        for line in [
            "nbdkit: coldrise[3]: error: write: sending newstyle handshake: Broken pipe\n",
            "nbdkit: coldrise[3]: error: write reply: NBD_CMD_WRITE: Broken pipe\n",
        ] {
            assert!(is_lost_client(line.as_bytes()), "{line}");
        }
        for line in [
            "nbdkit: error: unix socket: write: No space left on device\n",
            "nbdkit: coldrise[3]: error: the disk is away: Broken pipe\n",
        ] {
            assert!(!is_lost_client(line.as_bytes()), "{line}");
        }
    }
}
