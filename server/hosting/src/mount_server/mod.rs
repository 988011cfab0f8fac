//! A file or disk server as a child, over a mount of its own.
//!
//! ```text
//!   clients ─▶ smbd or tgtd ─▶ TMP/coldrise-…/mount ─▶ this process: the mount ─▶ repository
//! ```
//!
//! The child acknowledges a write when this process has it. So the child can be killed at any moment,
//! and is started again. Nothing but the child sees the mount, because its folder is private; that
//! is why the kernel may cache sessions.
//!
//! The end: the child first, so that no client writes any more; then the mount, which flushes and gives
//! back its sessions; then the folder. If this process is killed, the kernel ends the child, and the next
//! command removes the dead mount and the folder.

pub mod hyper_v;
pub mod iscsi;
mod smb_configuration;
mod smbd;
mod tgt;
mod tgtd;

pub use smb_configuration::SHARE;
pub use smbd::{SmbOptions, Smbd, check_installed as check_smbd};
pub use tgtd::{IscsiOptions, Tgtd, check_installed as check_tgtd};

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind};
use coldrise_fuse::{Mount, MountOptions};
use coldrise_store::Repository;
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};

use crate::child;
use crate::leftovers;
use crate::signals::ChildSignals;

/// A process that ends within this time after its start counts as a failed start. After this many in a
/// row the program gives up.
const SHORT_LIFE: Duration = Duration::from_millis(500);
const MOST_SHORT_LIVES: u32 = 5;
/// Interval of the checks on a starting or ending process.
const INTERVAL: Duration = Duration::from_millis(5);
/// Time limits of a start, of an orderly end, and of closing files after it.
const START_PATIENCE: Duration = Duration::from_secs(30);
const END_PATIENCE: Duration = Duration::from_secs(10);
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// For a connection to a server on this host.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);

/// The program that serves the mount.
pub trait Program {
    /// The program's name in messages.
    const NAME: &'static str;

    /// Starts it, as the leader of a process group.
    fn spawn(&self) -> Result<Child>;

    /// Called until it returns true: then clients are served.
    fn is_ready(&self) -> Result<bool>;

    /// Shows what it said, if that was kept back: it has failed.
    fn tell_messages(&self) {}

    /// Prepares its end. A signal follows.
    fn prepare_end(&self) {}
}

/// A running server. [`MountServer::finish`] ends it in order.
pub struct MountServer<P: Program> {
    program: P,
    child: Child,
    started: Instant,
    short_lives: u32,
    mount: Option<Mount>,
    has_ended: Arc<AtomicBool>,
    // Must be dropped last.
    _folder: ScratchFolder,
}

/// The options of the mount.
pub struct MountedAs {
    /// The kind of the private folder.
    pub kind: ScratchKind,
    /// Memory for decoded chunks, in bytes.
    pub cache_bytes: u64,
    /// Whether sessions are read-only, too.
    pub is_read_only: bool,
}

impl<P: Program> MountServer<P> {
    /// Mounts the repository and starts the program that `make` describes: its arguments are the mount
    /// and a private folder. Returns when clients are served.
    ///
    /// # Errors
    /// The errors of the mount and of `make`; `ToolFailed` if the program ends, `Interrupted` if this
    /// program receives a signal to end meanwhile.
    pub fn start(
        repository: &Arc<Repository>,
        mounted: &MountedAs,
        make: impl FnOnce(&Path, &Path) -> Result<P>,
        signals: &mut ChildSignals,
    ) -> Result<MountServer<P>> {
        if let Some(removed) = leftovers::remove(repository) {
            tracing::warn!("{removed}");
        }
        let folder = ScratchFolder::new(mounted.kind)?;
        let (place, state) = (folder.path().join("mount"), folder.path().join("state"));
        for made in [&place, &state] {
            std::fs::create_dir(made).context(|| format!("making {}", made.display()))?;
        }
        let program = make(&place, &state)?;
        let has_ended = Arc::new(AtomicBool::new(false));
        let options = MountOptions {
            folder: place,
            is_read_only: mounted.is_read_only,
            allows_others: false,
            caches_sessions: true,
            cache_bytes: mounted.cache_bytes,
        };
        let ended = Arc::clone(&has_ended);
        let mount = Mount::start(repository, &options, move || {
            ended.store(true, Ordering::SeqCst);
            // Wakes the thread that waits for signals. If this fails, the next signal does.
            let _ = kill_process(getpid(), Signal::CHILD);
        })?;
        let child = match program.spawn() {
            Ok(child) => child,
            Err(error) => {
                let _ = mount.unmount();
                let _ = mount.finish();
                return Err(error);
            }
        };
        let (started, mount) = (Instant::now(), Some(mount));
        let mut server = MountServer {
            program,
            child,
            started,
            short_lives: 0,
            mount,
            has_ended,
            _folder: folder,
        };
        server.await_ready(signals)?;
        Ok(server)
    }

    fn await_ready(&mut self, signals: &mut ChildSignals) -> Result<()> {
        self.look_until_ready(signals).inspect_err(|_| self.program.tell_messages())
    }

    fn look_until_ready(&mut self, signals: &mut ChildSignals) -> Result<()> {
        while !self.program.is_ready()? {
            if let Some(status) = self.ended()? {
                return Err(child::ended_error(P::NAME, status));
            }
            if signals.was_asked_to_end() {
                let text = format!("interrupted while {} started", P::NAME);
                return Err(Error::new(ErrorKind::Interrupted, text));
            }
            if self.started.elapsed() > START_PATIENCE {
                let text = format!("{} does not answer", P::NAME);
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context(|| format!("checking {}", P::NAME))
    }

    /// Serves until this program receives a signal to end.
    ///
    /// # Errors
    /// `ToolFailed` if the program ends again and again right after its start, or the mount is gone.
    pub fn serve(&mut self, signals: &mut ChildSignals) -> Result<()> {
        loop {
            if signals.wait() {
                return Ok(());
            }
            if self.has_ended.load(Ordering::SeqCst) {
                let text = "the mount that is served was unmounted; run the command again";
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
            if let Some(status) = self.ended()? {
                self.restart(status, signals)?;
            }
        }
    }

    fn restart(&mut self, status: ExitStatus, signals: &mut ChildSignals) -> Result<()> {
        // Its children served clients: they end before others serve the same disks.
        self.kill_group();
        self.short_lives =
            if self.started.elapsed() < SHORT_LIFE { self.short_lives + 1 } else { 0 };
        if self.short_lives > MOST_SHORT_LIVES {
            return Err(child::ended_error(P::NAME, status));
        }
        self.program.tell_messages();
        tracing::error!(
            "{} ended ({status}) and is started again. No acknowledged write is lost; clients connect \
             again by themselves",
            P::NAME
        );
        self.child = self.program.spawn()?;
        self.started = Instant::now();
        match self.await_ready(signals) {
            // Its end is noticed by the next round.
            Err(error) if error.kind() == ErrorKind::ToolFailed && self.ended()?.is_some() => {
                // The signal of its end was taken by then.
                let _ = kill_process(getpid(), Signal::CHILD);
                Ok(())
            }
            ready => ready,
        }
    }

    fn kill_group(&self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // Usually the group is empty by then.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    /// Ends the program, then the mount: all writes are durable when this returns.
    ///
    /// # Errors
    /// The error of a flush.
    pub fn finish(mut self, signals: Option<&mut ChildSignals>) -> Result<()> {
        self.end(signals)
    }

    fn end(&mut self, signals: Option<&mut ChildSignals>) -> Result<()> {
        let Some(mount) = self.mount.take() else { return Ok(()) };
        if matches!(self.child.try_wait(), Ok(None)) {
            self.program.prepare_end();
        }
        let ended = child::end(&mut self.child, P::NAME, END_PATIENCE, signals);
        if ended.as_ref().is_ok_and(|ended| ended.was_killed) {
            tracing::warn!("{} did not end by itself and was killed; no write is lost", P::NAME);
        }
        self.kill_group();
        let unmounted = mount.unmount();
        let began = Instant::now();
        while !self.has_ended.load(Ordering::SeqCst) && began.elapsed() < CLOSE_PATIENCE {
            std::thread::sleep(INTERVAL);
        }
        // After every outcome: make all writes durable.
        let finished = mount.finish();
        ended?;
        unmounted?;
        finished
    }
}

impl<P: Program> Drop for MountServer<P> {
    fn drop(&mut self) {
        if let Err(error) = self.end(None) {
            tracing::error!("{}", error.full_message());
        }
    }
}

/// Whether a server listens there.
fn is_listening(address: SocketAddr) -> bool {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    TcpStream::connect_timeout(&SocketAddr::new(ip, address.port()), CONNECT_PATIENCE).is_ok()
}

/// Refuses an address that another server has, that is none of this host, or that this user may not take.
fn check_free(address: SocketAddr) -> Result<()> {
    let taken = || {
        let text = format!("another server listens on {address}: end it, or give another --listen");
        Error::new(ErrorKind::Busy, text)
    };
    if is_listening(address) {
        return Err(taken());
    }
    let bound = TcpListener::bind(address).map(drop);
    bound.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => taken(),
        std::io::ErrorKind::AddrNotAvailable => {
            let text = format!("{} is not an address of this host", address.ip());
            Error::new(ErrorKind::InvalidInput, text).advise("ip address shows them")
        }
        _ => Error::io(format!("listening on {address}"), error),
    })
}
