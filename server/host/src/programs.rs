//! Programs that run in a private folder, and end with it, with the connection, or with this process.
//!
//! ```text
//!   thread ─▶ program      the kernel ends the program with the thread, and so with this process
//!      ├◀── its output     the beginning is kept
//!      └◀── its messages   the end is kept
//! ```
//!
//! A thread with [`Bounds`] restricts itself before it starts the program, which inherits that.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result, end_with_this_thread};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::confinement::{Reach, confine_this_thread};
use crate::image_confinement::Bounds;
use crate::limits::Limits;

/// Bytes kept of the beginning of a program's output.
const MAX_OUTPUT_BYTES: usize = 2 << 20;
/// Bytes kept of the end of its messages.
pub const MAX_MESSAGES_BYTES: usize = 16 << 10;
/// How often an ending program is looked at.
const REAP_INTERVAL: Duration = Duration::from_millis(5);
/// The one environment variable that a program inherits: where programs are.
const SEARCH_PATH: &str = "PATH";
/// Makes stdin the listening socket that the program expects as descriptor 3. The shell never parses the words.
const LISTEN_SCRIPT: &str = "exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\"";

/// A program to start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramStart {
    /// Its name or path.
    pub program: String,
    /// Its arguments. Relative paths are in the private folder.
    pub words: Vec<String>,
    /// The name of a socket in the private folder, at which the program listens: it gets it as descriptor 3
    /// (systemd's socket activation). A connection made right after the start waits until the program is ready.
    pub socket: Option<String>,
    /// What it may open; `None`: anything. For QEMU.
    pub reach: Option<Reach>,
    /// What a program may use that reads a foreign image; `None`: anything.
    pub bounds: Option<Bounds>,
}

/// What is known of a program that was started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramState {
    /// How it ended; `None` while it runs.
    pub end: Option<ProgramEnd>,
    /// The beginning of its standard output.
    pub output: String,
    /// The end of its messages.
    pub messages: String,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramEnd {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// The system does not tell.
    Unknown,
}

impl ProgramEnd {
    /// The message if the program exceeded its processor time; `None` if it did not.
    pub fn limit_reached(self, limits: &Limits) -> Option<String> {
        (self == ProgramEnd::Signal(libc::SIGXCPU)).then(|| {
            format!(
                "it was stopped after {} s of processor time, more than an image of this size \
                 can need: it is damaged, or crafted to keep its reader busy",
                limits.processor_seconds
            )
        })
    }
}

/// A program that was started. Dropping it ends it.
pub(crate) struct Program {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    child: Mutex<Option<Child>>,
    kept: Mutex<Kept>,
    ended: Condvar,
}

#[derive(Default)]
struct Kept {
    end: Option<ProgramEnd>,
    output: Vec<u8>,
    messages: Vec<u8>,
}

impl Shared {
    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Program {
    /// Starts a program in the private folder `folder`.
    ///
    /// # Errors
    /// `ToolFailed` if it cannot be started; errors of making the socket.
    pub(crate) fn start(start: &ProgramStart, folder: &Path) -> Result<Program> {
        let mut command = command(start, folder)?;
        let (name, bounds) = (start.program.clone(), start.bounds.clone());
        let shared = Arc::new(Shared::default());
        let (kept, reach) = (Arc::clone(&shared), start.reach.clone());
        let (started, result) = sync_channel(1);
        let keeper = std::thread::Builder::new()
            .name(name.clone())
            .spawn(move || {
                reach.iter().for_each(confine_this_thread);
                let confined = bounds.map_or(Ok(()), |bounds| bounds.confine_this_thread());
                let spawned = confined.and_then(|()| {
                    let what = || format!("starting {name}");
                    let failed = |error| Error::with_source(ErrorKind::ToolFailed, what(), error);
                    command.spawn().map_err(failed)
                });
                // With our copy of its socket: a client notices the program's end.
                drop(command);
                keep(spawned, &kept, &started);
            })
            .context(|| format!("starting a thread for {}", start.program))?;
        let what = || format!("starting {}", start.program);
        result.recv().map_err(|error| Error::with_source(ErrorKind::Internal, what(), error))??;
        Ok(Program { shared, keeper: Some(keeper) })
    }

    /// Its state, after its end or after `patience`.
    pub(crate) fn state(&self, patience: Duration) -> ProgramState {
        let waited = self
            .shared
            .ended
            .wait_timeout_while(self.shared.kept(), patience, |kept| kept.end.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let kept = waited.0;
        ProgramState { end: kept.end, output: text(&kept.output), messages: text(&kept.messages) }
    }

    /// Ends it.
    pub(crate) fn kill(&self) {
        if let Some(child) = self.shared.child().as_mut() {
            // Fails only if it has ended already.
            let _ = child.kill();
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
        if let Some(keeper) = self.keeper.take() {
            // It does not panic; if it did, there would be no program to end.
            let _ = keeper.join();
        }
    }
}

fn command(start: &ProgramStart, folder: &Path) -> Result<Command> {
    let mut words = Vec::new();
    let mut input = Stdio::null();
    if let Some(socket) = &start.socket {
        let path = folder.join(socket);
        let listener =
            UnixListener::bind(&path).context(|| format!("making {}", path.display()))?;
        input = OwnedFd::from(listener).into();
        words.extend(["/bin/sh", "-c", LISTEN_SCRIPT, "sh"].map(str::to_owned));
    }
    if let Some(bounds) = &start.bounds {
        words.push("prlimit".to_owned());
        words.extend(bounds.limits.arguments());
        words.push("--".to_owned());
    }
    words.push(start.program.clone());
    words.extend_from_slice(&start.words);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).current_dir(folder);
    command.env_clear().env("LC_ALL", "C");
    if let Some(path) = std::env::var_os(SEARCH_PATH) {
        command.env(SEARCH_PATH, path);
    }
    end_with_this_thread(&mut command, Signal::KILL);
    // Ctrl-C on a terminal is for us: we end the program in an orderly way.
    command.process_group(0).stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// Keeps what the program writes, until it has ended.
fn keep(spawned: Result<Child>, shared: &Arc<Shared>, started: &SyncSender<Result<()>>) {
    let (output, messages) = match spawned {
        Ok(mut child) => {
            let pipes = (child.stdout.take(), child.stderr.take());
            *shared.child() = Some(child);
            // The receiver always waits for this message.
            let _ = started.send(Ok(()));
            pipes
        }
        Err(error) => return drop(started.send(Err(error))),
    };
    std::thread::scope(|scope| {
        scope.spawn(move || output.map(|output| keep_output(output, shared)));
        if let Some(messages) = messages {
            keep_messages(messages, shared);
        }
    });
    let end = reap(&shared.child).map_or(ProgramEnd::Unknown, |status| {
        let code = status.code().map(ProgramEnd::Code);
        code.or(status.signal().map(ProgramEnd::Signal)).unwrap_or(ProgramEnd::Unknown)
    });
    shared.kept().end = Some(end);
    shared.ended.notify_all();
}

fn keep_output(mut from: ChildStdout, shared: &Shared) {
    let mut bytes = [0; 8192];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let mut kept = shared.kept();
        let room = MAX_OUTPUT_BYTES - kept.output.len();
        kept.output.extend_from_slice(&bytes[..count.min(room)]);
    }
}

fn keep_messages(mut from: ChildStderr, shared: &Shared) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let mut kept = shared.kept();
        kept.messages.extend_from_slice(&bytes[..count]);
        let surplus = kept.messages.len().saturating_sub(MAX_MESSAGES_BYTES);
        kept.messages.drain(..surplus);
    }
}

/// Waits for a program that has closed its messages. Does not hold the lock meanwhile, so that it can still be killed.
fn reap(child: &Mutex<Option<Child>>) -> Option<ExitStatus> {
    loop {
        let state = child.lock().unwrap_or_else(PoisonError::into_inner).as_mut()?.try_wait();
        match state {
            Ok(Some(status)) => return Some(status),
            Ok(None) => std::thread::sleep(REAP_INTERVAL),
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::confinement::{NetworkReach, can_confine};

    const LONG: Duration = Duration::from_secs(60);

    fn started(program: &str, words: &[&str], socket: Option<&str>, folder: &Path) -> Program {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        let (program, socket) = (program.to_owned(), socket.map(str::to_owned));
        let start = ProgramStart { program, words, socket, ..Default::default() };
        Program::start(&start, folder).unwrap()
    }

    #[test]
    fn output_and_exit_status_of_a_program_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let run = |script| started("sh", &["-c", script], None, folder.path()).state(LONG);
        let state = run("pwd; echo a b >&2; exit 7");
        assert_eq!(state.end, Some(ProgramEnd::Code(7)));
        assert_eq!(Path::new(state.output.trim()), folder.path().canonicalize().unwrap());
        assert_eq!(state.messages, "a b\n");
        assert_eq!(run("kill -9 $$").end, Some(ProgramEnd::Signal(9)));
        let state = run("seq 1000000; seq 1000000 >&2");
        assert!(state.output.starts_with("1\n2\n") && state.output.len() == MAX_OUTPUT_BYTES);
        assert!(
            state.messages.ends_with("1000000\n") && state.messages.len() == MAX_MESSAGES_BYTES
        );
        let absent = ProgramStart { program: "no-such-program".to_owned(), ..Default::default() };
        let error = Program::start(&absent, folder.path()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::ToolFailed);
    }

    #[test]
    fn a_confined_program_reaches_its_folder_only() {
        assert!(can_confine(), "this test needs Landlock");
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let script = "echo x >own && cat own && ! echo x >$0/own && ! ls $0";
        let start = ProgramStart {
            program: "sh".to_owned(),
            words: ["-c", script, other.path().to_str().unwrap()].map(str::to_owned).to_vec(),
            reach: Some(Reach {
                program: None,
                files: Vec::new(),
                folders: vec![folder.path().to_owned()],
                network: NetworkReach::Port(None),
            }),
            ..Default::default()
        };
        let state = Program::start(&start, folder.path()).unwrap().state(LONG);
        assert_eq!((state.end, &*state.output), (Some(ProgramEnd::Code(0)), "x\n"), "{state:?}");
        // This process stays as it is.
        std::fs::write(other.path().join("own"), "x").unwrap();
    }

    #[test]
    fn a_program_listens_at_once_and_ends_when_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let script = "import os, socket, sys, time\n\
            assert os.environ['LISTEN_PID'] == str(os.getpid())\n\
            near, _ = socket.socket(fileno=3).accept()\n\
            near.send(sys.argv[1].encode())\n\
            time.sleep(1000)";
        let words = ["-c", script, "$(x) '"];
        let program = started("/usr/bin/python3", &words, Some("way"), folder.path());
        let mut stream =
            std::os::unix::net::UnixStream::connect(folder.path().join("way")).unwrap();
        let mut text = [0; 6];
        stream.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"$(x) '");
        assert_eq!(program.state(Duration::ZERO).end, None);
        drop(program);
        assert_eq!(stream.read(&mut text).unwrap(), 0);
    }
}
