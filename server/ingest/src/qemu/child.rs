//! A confined child, and the thread that keeps it.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::confinement::confine_this_thread;
use super::limits::Limits;
use super::{missing_tool, QemuImage};

/// What is kept of a child's messages, in bytes.
const MAX_MESSAGE_BYTES: u64 = 16 << 10;
/// How often a child that is about to end is looked at.
const REAP_INTERVAL: Duration = Duration::from_millis(5);
/// Variables of ours that a child sees: where its programs are.
const SEARCH_PATH: &str = "PATH";

/// A child that can open one image and nothing else. Dropping it ends the child.
pub(super) struct ConfinedChild {
    shared: Arc<Shared>,
    /// Started the child: the kernel ends the child when this thread ends, and with it
    /// when our process dies, however it dies.
    keeper: Option<JoinHandle<()>>,
    limits: Limits,
}

/// How a child ended.
#[derive(Clone, Debug)]
pub(super) struct End {
    /// `None`: nobody knows.
    pub(super) status: Option<ExitStatus>,
    /// What it said.
    pub(super) messages: Vec<u8>,
}

#[derive(Default)]
struct Shared {
    child: Mutex<Option<Child>>,
    end: Mutex<Option<End>>,
    ended: Condvar,
}

impl Shared {
    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) -> MutexGuard<'_, Option<End>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConfinedChild {
    /// Starts `command`, which runs `tool`, confined to the files of `image`. Where the
    /// command's output is piped, its end is returned.
    pub(super) fn start(
        tool: &'static str,
        mut command: Command,
        image: &QemuImage,
        limits: Limits,
    ) -> Result<(ConfinedChild, Option<ChildStdout>)> {
        let files = image.files.clone();
        command.env_clear().env("LC_ALL", "C");
        if let Some(path) = std::env::var_os(SEARCH_PATH) {
            command.env(SEARCH_PATH, path);
        }
        // Ctrl-C on a terminal is for us: we end the child in order.
        command.process_group(0).stderr(Stdio::piped());
        let shared = Arc::new(Shared::default());
        let kept = Arc::clone(&shared);
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let keeper = std::thread::Builder::new()
            .name(tool.to_string())
            .spawn(move || {
                let spawned = confine_this_thread(&files)
                    .and_then(|_| command.spawn().map_err(|error| missing_tool(tool, error)));
                // Our copies of what the child was given go away with the command: who
                // waits for the child at a socket learns when it ends.
                drop(command);
                let child = match spawned {
                    Ok(mut child) => {
                        let stderr = child.stderr.take();
                        let stdout = child.stdout.take();
                        *kept.child() = Some(child);
                        // Nobody who waits for this gives up.
                        let sent = started.send(Ok(stdout));
                        drop(sent);
                        stderr
                    }
                    Err(error) => {
                        let sent = started.send(Err(error));
                        drop(sent);
                        return;
                    }
                };
                let messages =
                    child.map(|stderr| read_bounded(stderr, MAX_MESSAGE_BYTES)).unwrap_or_default();
                let status = reap(&kept.child);
                *kept.end() = Some(End { status, messages });
                kept.ended.notify_all();
            })
            .context(|| format!("starting a thread for {tool}"))?;
        let stdout = start.recv().map_err(|error| {
            Error::with_source(ErrorKind::Internal, format!("starting {tool}"), error)
        })??;
        Ok((ConfinedChild { shared, keeper: Some(keeper), limits }, stdout))
    }

    /// Ends the child.
    pub(super) fn kill(&self) {
        if let Some(child) = self.shared.child().as_mut() {
            // Refused only when the child is gone already.
            let _ = child.kill();
        }
    }

    /// How the child ended, once it has; waits so long for that.
    pub(super) fn end_within(&self, patience: Duration) -> Option<End> {
        let waited = self
            .shared
            .ended
            .wait_timeout_while(self.shared.end(), patience, |end| end.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        waited.0.clone()
    }

    /// Waits until the child has ended by itself.
    pub(super) fn wait(&self) -> End {
        let end = self
            .shared
            .ended
            .wait_while(self.shared.end(), |end| end.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        end.clone().unwrap_or(End { status: None, messages: Vec::new() })
    }

    /// What to say of a child that was ended by its limits; `None`: it was not.
    pub(super) fn limit_reached(&self, end: &End) -> Option<String> {
        let signal = end.status?.signal()?;
        (signal == libc::SIGXCPU).then(|| {
            format!(
                "it was given up after {} s of processor time, more than an image of this size \
                 can need: it is damaged, or made to keep its reader busy",
                self.limits.processor_seconds
            )
        })
    }
}

impl Drop for ConfinedChild {
    fn drop(&mut self) {
        self.kill();
        if let Some(keeper) = self.keeper.take() {
            // It does not panic; had it, there would be nothing left to end.
            let _ = keeper.join();
        }
    }
}

/// Reads to the end, keeps the first `limit` bytes.
pub(super) fn read_bounded(mut from: impl Read, limit: u64) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut head = from.by_ref().take(limit);
    // What cannot be read of a child's output is missing from a message, no more.
    if head.read_to_end(&mut kept).is_ok() {
        let _ = std::io::copy(&mut from, &mut std::io::sink());
    }
    kept
}

/// Waits for a child that has closed its messages, without keeping the lock, so that it
/// can still be killed.
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
