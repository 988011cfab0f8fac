//! A confined child process, and the thread that owns it.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use coldrise_block::{end_with_this_thread, Context, Error, ErrorKind, Result};
use rustix::process::Signal;

use super::confinement::confine_this_thread;
use super::limits::Limits;
use super::{missing_tool, QemuImage};

/// Bytes kept of a child's messages.
const MAX_MESSAGE_BYTES: u64 = 16 << 10;
/// How often an ending child is polled.
const REAP_INTERVAL: Duration = Duration::from_millis(5);
/// The one environment variable that a child inherits: where its programs are.
const SEARCH_PATH: &str = "PATH";

/// A child that can open one image and no other file. Dropping it ends the child.
pub(super) struct ConfinedChild {
    shared: Arc<Shared>,
    /// The thread that started the child. The kernel ends the child when this thread
    /// ends, and so also when our process dies in any way.
    keeper: Option<JoinHandle<()>>,
    limits: Limits,
}

/// The end of a child.
#[derive(Clone, Debug)]
pub(super) struct End {
    /// `None` if it is unknown.
    pub(super) status: Option<ExitStatus>,
    /// The child's messages.
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
    /// Starts `command`, which runs `tool`, confined to the files of `image`. Returns
    /// the reading end if the command's output is piped.
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
        end_with_this_thread(&mut command, Signal::KILL);
        // Ctrl-C on a terminal is for us: we end the child in an orderly way.
        command.process_group(0).stderr(Stdio::piped());
        let shared = Arc::new(Shared::default());
        let kept = Arc::clone(&shared);
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let keeper = std::thread::Builder::new()
            .name(tool.to_string())
            .spawn(move || {
                let spawned = confine_this_thread(&files)
                    .and_then(|_| command.spawn().map_err(|error| missing_tool(tool, error)));
                // Drops our copies of the child's descriptors with the command, so that
                // a client that waits on the child's socket notices the child's end.
                drop(command);
                let child = match spawned {
                    Ok(mut child) => {
                        let stderr = child.stderr.take();
                        let stdout = child.stdout.take();
                        *kept.child() = Some(child);
                        // The receiver always waits for this message.
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
            // Fails only if the child has ended already.
            let _ = child.kill();
        }
    }

    /// How the child ended; waits for the end up to `patience`.
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

    /// The message if the child exceeded its limits; `None` if it did not.
    pub(super) fn limit_reached(&self, end: &End) -> Option<String> {
        let signal = end.status?.signal()?;
        (signal == libc::SIGXCPU).then(|| {
            format!(
                "it was stopped after {} s of processor time, more than an image of this size \
                 can need: it is damaged, or crafted to keep its reader busy",
                self.limits.processor_seconds
            )
        })
    }
}

impl Drop for ConfinedChild {
    fn drop(&mut self) {
        self.kill();
        if let Some(keeper) = self.keeper.take() {
            // The keeper does not panic; if it did, there would not be a child left to
            // end.
            let _ = keeper.join();
        }
    }
}

/// Reads to the end, but keeps only the first `limit` bytes.
pub(super) fn read_bounded(mut from: impl Read, limit: u64) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut head = from.by_ref().take(limit);
    // Output that cannot be read is only missing from a message.
    if head.read_to_end(&mut kept).is_ok() {
        let _ = std::io::copy(&mut from, &mut std::io::sink());
    }
    kept
}

/// Waits for a child that has closed its messages. Does not hold the lock meanwhile, so
/// that the child can still be killed.
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
