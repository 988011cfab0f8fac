//! nfs-ganesha as a child, with the FSAL that serves the repository.

mod claim;
mod client;
mod configuration;
mod epoch;
mod log;
mod ports;
mod rpc;
mod rpcbind;

pub use claim::is_serving;
pub use client::Client;
pub use configuration::{NfsOptions, PATH};
pub use rpcbind::check_there as check_rpcbind;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coldrise_block::{
    Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind, end_with_this_thread,
};
use coldrise_store::Claim;
use rustix::process::Signal;

use crate::caller::Caller;
use crate::child;
use crate::signals::ChildSignals;
use rpcbind::Rpcbind;

const NAME: &str = "nfs-ganesha";

/// Name of the FSAL's file, as nfs-ganesha derives it from the FSAL's name.
const FSAL_FILE: &str = "libfsalcoldrise.so";
/// The FSAL's version of nfs-ganesha, in the program's own words.
const VERSION: &str = "NFS-Ganesha Release = V4.3";
/// The exit code by which the FSAL requests a restart; see plugins/ganesha/io.c.
const START_AGAIN: i32 = 75;
/// A process that ends within this time after its start counts as a failed start. The program
/// gives up after `MOST_SHORT_LIVES` failed starts in a row.
const SHORT_LIFE: Duration = Duration::from_millis(500);
const MOST_SHORT_LIVES: u32 = 5;
/// Interval of the checks on a starting process.
const INTERVAL: Duration = Duration::from_millis(5);
/// Time limit of a start: it waits for rpcbind and opens the repository.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// Time limit of an orderly end.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// A running nfs-ganesha. Dropping it ends it.
pub struct Ganesha {
    child: Child,
    log: Option<JoinHandle<()>>,
    started: Instant,
    short_lives: u32,
    options: NfsOptions,
    repository: PathBuf,
    /// Configuration, and nfs-ganesha's records of NFSv4 clients.
    directory: ScratchFolder,
    // Must be dropped after it has ended.
    _rpcbind: Option<Rpcbind>,
    claim: Option<Claim>,
}

/// Whether rpcbind knows both programs that a client of NFSv3 needs. nfs-ganesha registers one after the other.
fn is_found(options: &NfsOptions) -> bool {
    rpc::registered_port(rpc::NFS_PROGRAM, 3) == Some(options.listen.port())
        && rpc::registered_port(rpc::MOUNT_PROGRAM, 3).is_some()
}

impl Ganesha {
    /// Starts nfs-ganesha and returns when it answers.
    ///
    /// # Errors
    /// `ToolFailed` if it or rpcbind is missing or ends, `Unsupported` for another version,
    /// `Busy` if another server uses the address, `Interrupted` if this program receives a
    /// signal to end meanwhile.
    pub fn start(
        caller: &Caller,
        options: &NfsOptions,
        signals: &mut ChildSignals,
    ) -> Result<Ganesha> {
        let repository = caller.repository_path();
        let claim = match options.is_claimed().then(|| claim::take(repository)).transpose() {
            Ok(Some(None)) => {
                ports::check(options).map_err(advise_elsewhere)?;
                return Err(advise_elsewhere(claim::taken(repository)));
            }
            // No client writes a session there.
            Err(error) if error.kind() == ErrorKind::ReadOnly => None,
            claim => claim?.flatten(),
        };
        Ganesha::start_with(caller, options, signals, claim).map_err(advise_elsewhere)
    }

    /// Starts nfs-ganesha for a machine that is recovered; `None` if another command serves the repository
    /// at the address already.
    ///
    /// # Errors
    /// Those of [`Ganesha::start`].
    pub fn find_or_start(
        caller: &Caller,
        options: &NfsOptions,
        signals: &mut ChildSignals,
    ) -> Result<Option<Ganesha>> {
        let repository = caller.repository_path();
        let asked = Instant::now();
        loop {
            if let Some(claim) = claim::take(repository)? {
                let started = Ganesha::start_with(caller, options, signals, Some(claim));
                return started
                    .map(Some)
                    .map_err(|error| advise_busy(error, "end it: ESXi uses no other port"));
            }
            if rpc::answers(options.listen, rpc::NFS_PROGRAM, 3) && is_found(options) {
                return Ok(None);
            }
            // It may have just started, or be about to end.
            if asked.elapsed() > START_PATIENCE {
                let advice = format!(
                    "end it, and this command serves; or start it again with --listen {}",
                    options.listen
                );
                return Err(claim::taken(repository)
                    .context(format!("no server answers at {}", options.listen))
                    .advise(advice));
            }
            check_not_asked_to_end(signals)?;
            std::thread::sleep(INTERVAL);
        }
    }

    fn start_with(
        caller: &Caller,
        options: &NfsOptions,
        signals: &mut ChildSignals,
        claim: Option<Claim>,
    ) -> Result<Ganesha> {
        let fsal = check_installed()?;
        if claim.is_some() {
            ports::wait(caller, options, signals)?;
        } else {
            ports::check(options)?;
        }
        let rpcbind = if options.serves_v3 { Rpcbind::make_sure()? } else { None };
        let directory = ScratchFolder::new(ScratchKind::Nfs)?;
        let repository = absolute(caller.repository_path())?;
        let text = configuration::text(
            options,
            &repository,
            caller.passphrase(),
            fsal.parent().unwrap_or(Path::new("/")),
            directory.path(),
        )?;
        let file = directory.path().join("ganesha.conf");
        std::fs::write(&file, text).context(|| format!("writing {}", file.display()))?;
        let (child, log) = spawn(directory.path(), &repository)?;
        let mut ganesha = Ganesha {
            child,
            log,
            started: Instant::now(),
            short_lives: 0,
            options: options.clone(),
            repository,
            directory,
            _rpcbind: rpcbind,
            claim,
        };
        ganesha.await_ready(signals)?;
        Ok(ganesha)
    }

    fn await_ready(&mut self, signals: &mut ChildSignals) -> Result<()> {
        let version = if self.options.serves_v3 { 3 } else { 4 };
        loop {
            if let Some(status) = self.ended()? {
                self.finish_log();
                return Err(advise_address(child::ended_error(NAME, status)));
            }
            check_not_asked_to_end(signals)?;
            let listen = self.options.listen;
            let answers = rpc::answers(listen, rpc::NFS_PROGRAM, version);
            // An rpcbind found earlier may have ended since.
            if answers && (!self.options.serves_v3 || is_found(&self.options)) {
                return Ok(());
            }
            if self.started.elapsed() > START_PATIENCE {
                let what = if answers {
                    "rpcbind does not know nfs-ganesha; run the command again".to_owned()
                } else {
                    format!("nfs-ganesha does not answer at {listen}")
                };
                return Err(Error::new(ErrorKind::ToolFailed, what));
            }
            std::thread::sleep(INTERVAL);
        }
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context(|| "checking nfs-ganesha")
    }

    /// Its last messages appear before ours.
    fn finish_log(&mut self) {
        if let Some(log) = self.log.take() {
            // The thread catches no panic; one was already reported on stderr.
            let _ = log.join();
        }
    }

    /// Serves until this program receives a signal to end.
    ///
    /// # Errors
    /// `ToolFailed` if nfs-ganesha ends with an error; see [`Ganesha::keep_up`].
    pub fn serve(&mut self, signals: &mut ChildSignals) -> Result<()> {
        loop {
            if signals.wait() {
                return self.stop(Some(signals));
            }
            if let Some(status) = self.keep_up()? {
                return if status.success() {
                    Ok(())
                } else {
                    Err(child::ended_error(NAME, status))
                };
            }
        }
    }

    /// Call this when nfs-ganesha may have ended. Returns the end if it is final. After a
    /// crash, or an exit code that requests it because a sync has failed, starts it again
    /// with another write verifier, unless it has ended several times soon after its start.
    /// # Errors
    /// The errors of starting a process.
    pub fn keep_up(&mut self) -> Result<Option<ExitStatus>> {
        let Some(status) = self.ended()? else { return Ok(None) };
        self.finish_log();
        let is_short = self.started.elapsed() < SHORT_LIFE;
        self.short_lives = if is_short { self.short_lives + 1 } else { 0 };
        let is_wanted = status.signal().is_some() || status.code() == Some(START_AGAIN);
        if !is_wanted || self.short_lives > MOST_SHORT_LIVES {
            return Ok(Some(status));
        }
        tracing::error!(
            "nfs-ganesha ended ({status}) and is started again. What was flushed is not lost; \
             clients connect again by themselves and send again what was not"
        );
        (self.child, self.log) = spawn(self.directory.path(), &self.repository)?;
        self.started = Instant::now();
        // Does not wait for its answer: the next call of this function notices an immediate
        // end or a signal.
        Ok(None)
    }

    /// Releases the claim if the server is unused, by what `is_needed` finds. Returns false if it has to end.
    ///
    /// # Errors
    /// Those of `is_needed`, and of the operating system.
    pub fn is_kept(&mut self, is_needed: impl FnOnce() -> Result<bool>) -> Result<bool> {
        self.claim = None;
        if !is_needed()? {
            return Ok(false);
        }
        self.claim = claim::take(&self.repository)?;
        Ok(self.claim.is_some())
    }

    /// Ends it in order: sessions are flushed and closed. Kills it after a time limit or a
    /// second signal; flushed writes survive that.
    ///
    /// # Errors
    /// `ToolFailed` if it ends with an error.
    pub fn stop(&mut self, signals: Option<&mut ChildSignals>) -> Result<()> {
        self.claim = None;
        let ended = child::end(&mut self.child, NAME, END_PATIENCE, signals)?;
        if ended.was_killed {
            tracing::warn!("nfs-ganesha did not end by itself");
        }
        self.finish_log();
        if ended.status.success() || ended.status.signal().is_some() {
            Ok(())
        } else {
            Err(child::ended_error(NAME, ended.status))
        }
    }
}

impl Drop for Ganesha {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // If the signal fails, it ends together with its parent.
            let _ = self.stop(None);
        }
    }
}

/// Starts the process, with a new epoch.
fn spawn(directory: &Path, repository: &Path) -> Result<(Child, Option<JoinHandle<()>>)> {
    let epoch = epoch::next(repository)?;
    let mut command = Command::new("ganesha.nfsd");
    end_with_this_thread(&mut command, Signal::TERM);
    command.args(["-F", "-L", "STDERR"]);
    command.arg("-f").arg(directory.join("ganesha.conf"));
    command.arg("-p").arg(directory.join("pid"));
    command.arg("-E").arg(epoch.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    tracing::debug!(?command, "starting nfs-ganesha");
    let mut child = command.spawn().map_err(missing)?;
    let log = child.stderr.take().map(log::pass_on).transpose()?;
    Ok((child, log))
}

/// Checks that nfs-ganesha and the FSAL are installed and match; returns the FSAL's file.
///
/// # Errors
/// `ToolFailed` if one is missing, `Unsupported` for another nfs-ganesha.
pub fn check_installed() -> Result<PathBuf> {
    check_version()?;
    fsal()
}

/// Checks that the installed nfs-ganesha is the FSAL's version.
///
/// # Errors
/// `ToolFailed` if it is missing, `Unsupported` for another version.
pub fn check_version() -> Result<()> {
    let output = Command::new("ganesha.nfsd").arg("-v").output().map_err(missing)?;
    let output = String::from_utf8_lossy(&output.stdout);
    if output.lines().any(|line| line.trim() == VERSION) {
        return Ok(());
    }
    let found = output.lines().next().unwrap_or("nothing").trim().to_owned();
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "the FSAL is built for \"{VERSION}\" and ganesha.nfsd says \"{found}\": install \
             Debian 12's nfs-ganesha"
        ),
    ))
}

fn missing(error: std::io::Error) -> Error {
    Error::with_source(
        ErrorKind::ToolFailed,
        "starting ganesha.nfsd, which serves NFS (Debian: apt install nfs-ganesha)",
        error,
    )
}

/// The FSAL next to this program, or in its installed location.
///
/// # Errors
/// `ToolFailed` if it is in neither place.
pub fn fsal() -> Result<PathBuf> {
    crate::installed::library("ganesha", FSAL_FILE).ok_or_else(|| {
        let text = format!("{FSAL_FILE} is neither beside this program nor among its libraries");
        Error::new(ErrorKind::ToolFailed, text).advise("build it: make ganesha-fsal")
    })
}

fn advise_elsewhere(error: Error) -> Error {
    advise_busy(
        error,
        "end that server, or use other ports; beside a server of NFSv3 also --versions 4",
    )
}

fn advise_busy(error: Error, advice: &'static str) -> Error {
    match error.kind() {
        ErrorKind::Busy => error.advise(advice),
        _ => error,
    }
}

fn check_not_asked_to_end(signals: &mut ChildSignals) -> Result<()> {
    if signals.was_asked_to_end() {
        let what = "interrupted while nfs-ganesha started";
        return Err(Error::new(ErrorKind::Interrupted, what));
    }
    Ok(())
}

/// nfs-ganesha looks up its listen address with AI_ADDRCONFIG: the C library then finds no
/// address, not even 127.0.0.1, while loopback's are the only ones.
fn advise_address(error: Error) -> Error {
    // One line of headings, then the routes. Other interfaces with an address have routes.
    let routes = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
    if routes.lines().count() != 1 {
        return error;
    }
    error.advise(
        "if they say \"No IP address found\": this network has only the interface lo, and \
         nfs-ganesha needs one more address; add one: ip address add 192.0.2.1/32 dev lo",
    )
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).context(|| format!("finding the path of {}", path.display()))
}
