//! A connection to a host: one SSH session in which `coldrise-host` runs, and ways to sockets of the host beside it.
//!
//! ```text
//!   ssh (master) ── session: coldrise-host serve      requests and replies
//!        ├───────── forwarding: a socket here ─▶ a socket there
//!        └───────── where the host forbids that: a session for each connection, coldrise-host connect SOCKET
//! ```
//!
//! A command has to run in the connection's session: without one OpenSSH waits for more data before it sends small packets.

use std::collections::HashMap;
use std::env::consts::ARCH;
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use coldrise_block::{
    Context, Error, ErrorKind, PeriodicThread, Result, now_ms, remove_abandoned_folders,
};
use coldrise_host::{
    Answer, Channel, Envelope, Host, Outcome, PROTOCOL_VERSION, Reply, Request, SILENCE, greets,
    read_frame, write_frame,
};
use coldrise_store::{MachineName, Repository};

use crate::address::HostAddress;
use crate::documents::{Hosts, KnownHost};
use crate::key::HostKey;
use crate::program::{Program, Step};
use crate::ssh::{SESSIONS_ADVICE, SshFolder, is_session_refused, login_error, shown};

/// How long a connection, with a copy of the program, may take.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long an answer may take beyond the task's own limit.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// How long the program there may take for its end.
const END_LIMIT: Duration = Duration::from_secs(5);
/// Maximum of what a login shell may say, in bytes.
const MAX_BANNER_BYTES: usize = 64 << 10;
const MAX_MESSAGES_BYTES: u64 = 16 << 10;

/// Connects to a host of the repository.
///
/// # Errors
/// `Forbidden` if its key has changed, `Unauthorized` if it refuses ours, `ToolFailed` if it cannot be reached; `Unsupported` if the program
/// cannot run there.
pub fn connect(hosts: &Hosts, host: &KnownHost) -> Result<Host> {
    connection(hosts, host).map(|connection| Host::over(connection))
}

/// As [`connect`].
pub(crate) fn connection(hosts: &Hosts, host: &KnownHost) -> Result<Arc<Connection>> {
    let connection = log_in(hosts, host);
    hosts.record_login(&host.name, connection.as_ref().err().map(Error::full_message));
    connection
}

fn log_in(hosts: &Hosts, host: &KnownHost) -> Result<Arc<Connection>> {
    // Of killed processes.
    remove_abandoned_folders();
    let identity = hosts.identity()?;
    let ssh = SshFolder::new(host.name.as_str(), &host.address, Some(&host.key), &identity)?;
    let connection = Connection::start(host.name.as_str(), ssh)?;
    connection.ssh.forget_identity()?;
    let version = Host::over(connection.clone()).facts()?.version;
    if version != PROTOCOL_VERSION {
        let text =
            format!("the program on the host speaks version {version} and not {PROTOCOL_VERSION}");
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    Ok(connection)
}

/// A host of the repository by its name; `None` for this host.
///
/// # Errors
/// `NotFound` if there is none of that name; those of [`connect`].
pub fn host_of(repository: &Arc<Repository>, name: Option<&MachineName>) -> Result<Host> {
    let Some(name) = name else { return Ok(Host::here()) };
    let hosts = Hosts::of(repository);
    connect(&hosts, &hosts.find(name)?)
}

/// Adds a host, with the key that it shows now, which must have the `fingerprint` if that is given. Also returns why the login
/// fails, if it does.
///
/// # Errors
/// `AlreadyExists` if the name is taken, `Forbidden` for another fingerprint, `ToolFailed` if the host cannot be reached.
pub fn add_host(
    hosts: &Hosts,
    name: &MachineName,
    address: &HostAddress,
    fingerprint: Option<&str>,
) -> Result<(KnownHost, Option<Error>)> {
    hosts.check_free(name)?;
    let (key, refused) = first_contact(hosts, name, address)?;
    let shown = key.fingerprint();
    if let Some(wanted) = fingerprint.filter(|wanted| *wanted != shown) {
        let text = format!("{address} has the SSH key {shown} and not {wanted}: it was not added");
        return Err(Error::new(ErrorKind::Forbidden, text));
    }
    let added_at_ms = now_ms();
    let host = KnownHost { name: name.clone(), address: address.clone(), key, added_at_ms };
    hosts.add(&host)?;
    Ok((host, refused))
}

fn first_contact(
    hosts: &Hosts,
    name: &MachineName,
    address: &HostAddress,
) -> Result<(HostKey, Option<Error>)> {
    let ssh = SshFolder::new(name.as_str(), address, None, &hosts.identity()?)?;
    let started = Connection::start(name.as_str(), ssh.clone());
    match (ssh.seen_key(), started) {
        (Some(key), Ok(_)) => Ok((key, None)),
        (Some(key), Err(error)) => Ok((key, Some(error))),
        (None, Err(error)) => Err(error),
        (None, Ok(_)) => {
            Err(Error::new(ErrorKind::ToolFailed, "ssh did not report the host's key"))
        }
    }
}

/// The requests that wait for a reply; `None` after the end of the connection.
type Waiting = Option<HashMap<u64, Sender<Outcome>>>;

#[derive(Default)]
struct Replies {
    waiting: Mutex<Waiting>,
    messages: Mutex<String>,
}

/// A connection. Dropping it ends the program there.
pub(crate) struct Connection {
    own: Weak<Connection>,
    name: String,
    /// The path of the program there.
    program: String,
    pub(crate) ssh: SshFolder,
    child: Mutex<Child>,
    input: Mutex<Option<ChildStdin>>,
    replies: Arc<Replies>,
    next: AtomicU64,
    /// Sockets here, by those there.
    ways: Mutex<HashMap<PathBuf, PathBuf>>,
    alive: Mutex<Option<PeriodicThread>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    pub(crate) fn start(name: &str, ssh: SshFolder) -> Result<Arc<Connection>> {
        let program = Program::find()?;
        let mut command = ssh.command(true);
        command.arg(ssh.destination()).arg(program.words());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| {
            let text = "starting ssh (Debian: apt install openssh-client)";
            Error::with_source(ErrorKind::ToolFailed, text, error)
        })?;
        let replies = Arc::new(Replies::default());
        let (Some(mut input), Some(mut output), Some(messages)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(Error::new(ErrorKind::Internal, "ssh has no pipes"));
        };
        let told = Arc::clone(&replies);
        let reader = std::thread::spawn(move || keep_messages(messages, &told.messages));
        let (limit, began) = (Limit::new(child.id()), Instant::now());
        let mut said = String::new();
        let greeted = greet(&program, &mut input, &mut output, &mut said);
        drop(limit);
        let path = match greeted {
            Ok(Some(path)) => path,
            Ok(None) => {
                let code = child.wait().ok().and_then(|status| status.code());
                let _ = reader.join();
                let limit_s = START_LIMIT.as_secs();
                return Err(match began.elapsed() < START_LIMIT {
                    true => {
                        login_error(name, &ssh.address, &locked(&replies.messages), &said, code)
                    }
                    false => {
                        let text = format!(
                            "host {name}: coldrise-host has not started within {limit_s} s"
                        );
                        Error::new(ErrorKind::ToolFailed, text)
                    }
                });
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error.context(format!("host {name}")));
            }
        };
        *locked(&replies.waiting) = Some(HashMap::new());
        let for_reader = Arc::clone(&replies);
        std::thread::spawn(move || read_replies(output, &for_reader));
        let connection = Arc::new_cyclic(|own| Connection {
            own: own.clone(),
            name: name.to_owned(),
            program: path,
            ssh,
            child: Mutex::new(child),
            input: Mutex::new(Some(input)),
            replies,
            next: AtomicU64::new(1),
            ways: Mutex::default(),
            alive: Mutex::default(),
        });
        let weak = Arc::downgrade(&connection);
        let turn = move || match weak.upgrade().map(|connection| connection.call(Request::Facts)) {
            Some(Ok(_)) => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        };
        let thread = PeriodicThread::start("host", SILENCE / 4, turn);
        *locked(&connection.alive) = Some(thread.context(|| "starting a thread")?);
        Ok(connection)
    }

    fn lost(&self) -> Error {
        let messages = shown(&locked(&self.replies.messages));
        let text = match messages.is_empty() {
            true => format!("the connection to host {} is lost", self.name),
            false => format!("the connection to host {} is lost: {messages}", self.name),
        };
        Error::new(ErrorKind::Io, text)
    }

    /// Listens here, and starts a session for each connection.
    fn bridge(&self, local: &Path, remote: &Path) -> Result<()> {
        let listener =
            UnixListener::bind(local).context(|| format!("making {}", local.display()))?;
        let remote = remote.to_owned();
        let own = self.own.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // The end of the connection connects, too.
                let (Ok(stream), Some(connection)) = (stream, own.upgrade()) else { break };
                connection.start_session(stream, &remote);
            }
        });
        Ok(())
    }

    /// Joins a stream with a socket there, by a session of its own.
    fn start_session(&self, stream: UnixStream, remote: &Path) {
        let quoted = |text: &str| format!("'{}'", text.replace('\'', "'\\''"));
        let words =
            format!("exec {} connect {}", quoted(&self.program), quoted(&remote.to_string_lossy()));
        // The other end of the stream sees its end after ssh's messages are kept.
        let held = stream.try_clone();
        let started = stream.try_clone().and_then(|output| {
            let mut command = self.ssh.command(false);
            command.arg(self.ssh.destination()).arg(&words);
            command.stdin(OwnedFd::from(stream)).stdout(OwnedFd::from(output));
            command.stderr(Stdio::piped()).spawn()
        });
        match started {
            Ok(child) => {
                let replies = Arc::clone(&self.replies);
                std::thread::spawn(move || {
                    wait_for(child, &replies.messages);
                    drop(held);
                });
            }
            Err(error) => tracing::warn!("starting ssh: {error}"),
        }
    }

    /// The program there listens, and a session is started for each connection.
    fn relay(&self, local: &Path, there: &Path) -> Result<()> {
        self.call(Request::Listen { path: there.to_owned() })?;
        let (own, local, there) = (self.own.clone(), local.to_owned(), there.to_owned());
        std::thread::spawn(move || {
            // Until the connection ends.
            while let Some(connection) = own.upgrade() {
                match connection.call(Request::NextConnection { path: there.clone() }) {
                    Ok(Answer::Path(private)) => match UnixStream::connect(&local) {
                        Ok(stream) => connection.start_session(stream, &private),
                        Err(error) => tracing::warn!("connecting to the disks: {error}"),
                    },
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
        });
        Ok(())
    }
}

impl Channel for Connection {
    fn call(&self, request: Request) -> Result<Answer> {
        let limit = match &request {
            Request::Virsh { patience_ms, .. } => {
                ANSWER_LIMIT + Duration::from_millis(*patience_ms)
            }
            // Together, and then each by itself.
            Request::AskVirsh { patience_ms, commands, .. } => {
                let count = u32::try_from(commands.len() + 1).unwrap_or(u32::MAX);
                ANSWER_LIMIT + Duration::from_millis(*patience_ms).saturating_mul(count)
            }
            _ => ANSWER_LIMIT,
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = channel();
        match &mut *locked(&self.replies.waiting) {
            Some(waiting) => drop(waiting.insert(number, sender)),
            None => return Err(self.lost()),
        }
        let sent = match &mut *locked(&self.input) {
            Some(input) => write_frame(input, &Envelope { number, request }),
            None => return Err(self.lost()),
        };
        if sent.is_err() {
            return Err(self.lost());
        }
        match receiver.recv_timeout(limit) {
            Ok(outcome) => {
                Result::from(outcome).map_err(|error| match error.message().contains(&self.name) {
                    true => error,
                    false => error.context(format!("host {}", self.name)),
                })
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.lost()),
            Err(RecvTimeoutError::Timeout) => {
                let text = format!("host {} has not answered for {} s", self.name, limit.as_secs());
                Err(Error::new(ErrorKind::Io, text))
            }
        }
    }

    fn reach(&self, socket: &Path) -> Result<PathBuf> {
        let mut ways = locked(&self.ways);
        if let Some(local) = ways.get(socket) {
            return Ok(local.clone());
        }
        let name = |kind: &str, number: usize| self.ssh.path(&format!("{kind}{number}"));
        let mut local = name("to", ways.len());
        let forwarded = self.ssh.forward(&local, socket).and_then(|()| greets(&local));
        if let Err(error) = forwarded {
            tracing::debug!("no forwarding: {}", error.full_message());
            local = name("by", ways.len());
            self.bridge(&local, socket)?;
            greets(&local).map_err(|error| {
                let text = format!(
                    "host {}: its socket {} cannot be reached",
                    self.name,
                    socket.display()
                );
                match is_session_refused(&locked(&self.replies.messages)) {
                    true => error.context(text).advise(SESSIONS_ADVICE),
                    false => error.context(text),
                }
            })?;
        }
        ways.insert(socket.to_owned(), local.clone());
        Ok(local)
    }

    fn reach_port(&self, port: u16) -> Result<u16> {
        self.ssh.forward_port(port).map_err(|error| {
            let text = format!("host {}: its sshd leads to no port of it", self.name);
            error
                .context(text)
                .advise("allow it in its sshd_config: AllowTcpForwarding yes, DisableForwarding no")
        })
    }

    fn offer(&self, local: &Path, there: &Path) -> Result<()> {
        self.ssh.forward_back(there, local).or_else(|error| {
            tracing::debug!("no forwarding: {}", error.full_message());
            self.relay(local, there)
        })
    }

    fn is_lost(&self) -> bool {
        locked(&self.replies.waiting).is_none()
    }

    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The program there sees the end, removes its folders and ends; with it, ssh.
        drop(locked(&self.input).take());
        let mut child = locked(&self.child);
        let limit = Limit::with(child.id(), END_LIMIT);
        let _ = child.wait();
        drop(limit);
        drop(locked(&self.alive).take());
        for local in locked(&self.ways).values() {
            drop(UnixStream::connect(local));
        }
    }
}

/// Waits for the end of a session's ssh, and keeps its messages.
fn wait_for(mut child: Child, messages: &Mutex<String>) {
    if let Some(from) = child.stderr.take() {
        keep_messages(from, messages);
    }
    let _ = child.wait();
}

/// Sends the program if it is asked for. Returns its path there, or `None` if ssh has ended. `said` gets the login shell's last line.
fn greet(
    program: &Program,
    input: &mut ChildStdin,
    output: &mut ChildStdout,
    said: &mut String,
) -> Result<Option<String>> {
    let (mut line, mut bytes) = (Vec::new(), 0);
    let mut byte = [0];
    loop {
        match output.read(&mut byte) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => {
                keep_line(said, &line);
                return Ok(None);
            }
            Ok(_) => line.push(byte[0]),
        }
        bytes += 1;
        if bytes > MAX_BANNER_BYTES {
            let text = "its login shell prints too much before the program starts";
            return Err(Error::new(ErrorKind::ToolFailed, text));
        }
        if byte[0] != b'\n' {
            continue;
        }
        let whole = std::mem::take(&mut line);
        match Step::parse(&String::from_utf8_lossy(&whole)) {
            None => keep_line(said, &whole),
            Some(Step::Absent(processor)) if processor != ARCH => {
                let own = ARCH;
                let text = format!(
                    "its processor is {processor}, but this server has the program for {own} only"
                );
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            Some(Step::Absent(_)) => {
                // If ssh ends meanwhile, it has said why.
                let _ = input.write_all(&program.content).and_then(|()| input.flush());
            }
            Some(Step::Ready(path)) => return Ok(Some(path)),
            Some(Step::Failed(what, path)) => {
                let text = format!("it cannot {what} {path}");
                return Err(Error::new(ErrorKind::Unsupported, text).advise(
                    "the home folder of its user needs 2 MiB free, must not be mounted noexec, and must be writable only by that user; to use another folder, set XDG_CACHE_HOME there",
                ));
            }
        }
    }
}

fn keep_line(kept: &mut String, line: &[u8]) {
    let line = shown(&String::from_utf8_lossy(line));
    if !line.is_empty() {
        *kept = line;
    }
}

fn read_replies(mut from: ChildStdout, replies: &Replies) {
    while let Ok(Some(Reply { number, outcome })) = read_frame(&mut from) {
        let sender = locked(&replies.waiting).as_mut().and_then(|waiting| waiting.remove(&number));
        // Its caller may have given up.
        sender.map(|sender| sender.send(outcome));
    }
    // All callers see the end.
    drop(locked(&replies.waiting).take());
}

/// Keeps the end of ssh's messages.
fn keep_messages(mut from: impl Read, kept: &Mutex<String>) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let mut kept = locked(kept);
        if (kept.len() + count) as u64 > MAX_MESSAGES_BYTES {
            kept.clear();
        }
        kept.push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
}

/// Ends a process after a time. Dropping it lets the process live.
struct Limit(Option<Sender<()>>);

impl Limit {
    fn new(process: u32) -> Limit {
        Limit::with(process, START_LIMIT)
    }

    fn with(process: u32, limit: Duration) -> Limit {
        let (sender, receiver) = channel::<()>();
        std::thread::spawn(move || {
            if receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let process = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw);
                let _ = process.map(|process| {
                    rustix::process::kill_process(process, rustix::process::Signal::KILL)
                });
            }
        });
        Limit(Some(sender))
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}
