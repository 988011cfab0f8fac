//! State that every command uses: the repository from the options, and the output format.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosting::{Caller, PASSPHRASE_COMMAND, PASSPHRASE_FILE};
use coldrise_session::write_before_background;
use coldrise_store::{OpenOptions, PassphraseSource, ReopenReport, Repository, RepositoryWriter};

use crate::arguments::GlobalOptions;
use crate::remote::ServerOptions;
use crate::report::print_remark;
use crate::run_record::{self, LogLines};

const REPOSITORY: &str = "COLDRISE_REPO";
const SERVER: &str = "COLDRISE_SERVER";
const TOKEN_FILE: &str = "COLDRISE_TOKEN_FILE";
const CERTIFICATE: &str = "COLDRISE_SERVER_CERTIFICATE";

/// Cache of decoded chunks, in bytes, for commands that read whole disks: such reads bypass
/// the cache anyway.
pub(crate) const READING_CACHE_BYTES: u64 = 16 << 20;

/// One run of the program.
pub(crate) struct Invocation {
    options: GlobalOptions,
    /// From the environment. Not an argument of the parser's: its usage lines would show it.
    repository: Option<PathBuf>,
    started: Instant,
    caller: OnceLock<Caller>,
}

impl Invocation {
    /// Starts the clock and the log on stderr.
    pub(crate) fn new(options: GlobalOptions) -> Invocation {
        let level = match (options.quiet, options.verbose) {
            (true, _) => tracing::Level::ERROR,
            (false, false) => tracing::Level::WARN,
            (false, true) => tracing::Level::DEBUG,
        };
        tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(LogLines)
            // It would say so on the same stream, and a stream on a full drive then ends the thread.
            .log_internal_errors(false)
            .with_ansi(false)
            .without_time()
            .with_target(options.verbose)
            .init();
        Invocation {
            options,
            repository: std::env::var_os(REPOSITORY).map(PathBuf::from),
            started: Instant::now(),
            caller: OnceLock::new(),
        }
    }

    /// Whether the command is for another host's service: an option says so, or the environment, unless
    /// an option names a repository.
    pub(crate) fn is_remote(&self) -> bool {
        self.options.repo.is_none() && self.server().is_some()
    }

    fn server(&self) -> Option<String> {
        let set = || std::env::var(SERVER).ok().filter(|url| !url.is_empty());
        self.options.server.clone().or_else(set)
    }

    /// The service that the options and the environment name.
    pub(crate) fn server_options(&self) -> ServerOptions {
        let path = |name: &str| std::env::var_os(name).filter(|p| !p.is_empty()).map(PathBuf::from);
        ServerOptions {
            url: self.server().unwrap_or_default(),
            token_file: self.options.token_file.clone().or_else(|| path(TOKEN_FILE)),
            certificate: self.options.server_certificate.clone().or_else(|| path(CERTIFICATE)),
        }
    }

    /// Whether the output is for programs.
    pub(crate) fn is_json(&self) -> bool {
        self.options.json
    }

    /// Whether only answers and errors are printed.
    pub(crate) fn is_quiet(&self) -> bool {
        self.options.quiet
    }

    /// Whether a person watches the terminal.
    pub(crate) fn is_watched(&self) -> bool {
        std::io::stderr().is_terminal()
    }

    /// Prints a remark for people on stderr.
    pub(crate) fn remark(&self, text: &str) {
        remark(self.options.quiet, text);
    }

    /// Time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Time since the start, in milliseconds.
    pub(crate) fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The directory of the repository.
    ///
    /// # Errors
    /// `InvalidInput` if none was named.
    pub(crate) fn repository_path(&self) -> Result<&Path> {
        match self.options.repo.as_ref().or(self.repository.as_ref()) {
            Some(path) if !path.as_os_str().is_empty() => Ok(path),
            _ => Err(Error::new(
                ErrorKind::InvalidInput,
                "no repository is named: give --repo DIR, or set COLDRISE_REPO",
            )),
        }
    }

    /// The source of the passphrase: an option, else the environment, else the unit's credential.
    ///
    /// # Errors
    /// `InvalidInput` if the environment names two sources.
    pub(crate) fn passphrase(&self) -> Result<PassphraseSource> {
        if let Some(path) = &self.options.passphrase_file {
            return Ok(PassphraseSource::File(path.clone()));
        }
        if let Some(command) = &self.options.passphrase_command {
            return Ok(PassphraseSource::Command(command.clone()));
        }
        let file = std::env::var_os(PASSPHRASE_FILE).filter(|text| !text.is_empty());
        let command = std::env::var_os(PASSPHRASE_COMMAND).filter(|text| !text.is_empty());
        match (file, command) {
            (None, None) => Ok(PassphraseSource::of_unit()),
            (Some(path), None) => Ok(PassphraseSource::File(PathBuf::from(path))),
            (None, Some(command)) => {
                command.into_string().map(PassphraseSource::Command).map_err(|_| {
                    let text = format!("{PASSPHRASE_COMMAND} is not UTF-8 text");
                    Error::new(ErrorKind::InvalidInput, text)
                })
            }
            (Some(_), Some(_)) => Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{PASSPHRASE_FILE} and {PASSPHRASE_COMMAND} are both set: keep one"),
            )),
        }
    }

    /// What programs need that the command starts.
    ///
    /// # Errors
    /// `InvalidInput` if no repository was named, or two sources of the passphrase.
    pub(crate) fn caller(&self) -> Result<&Caller> {
        if let Some(caller) = self.caller.get() {
            return Ok(caller);
        }
        let is_quiet = self.options.quiet;
        let caller = Caller {
            repository: self.repository_path()?.to_owned(),
            passphrase: self.passphrase()?,
            remark: Box::new(move |text| remark(is_quiet, text)),
            print_message: print_remark,
        };
        Ok(self.caller.get_or_init(|| caller))
    }

    /// Opens the repository for documents: lists, publishing, sealing.
    ///
    /// # Errors
    /// The errors of `Repository::open`.
    pub(crate) fn open(&self) -> Result<Arc<Repository>> {
        self.open_with(0)
    }

    /// Opens the repository for reading disks.
    ///
    /// # Errors
    /// The errors of `Repository::open`.
    pub(crate) fn open_for_disks(&self) -> Result<Arc<Repository>> {
        self.open_with(READING_CACHE_BYTES)
    }

    /// Opens the repository for serving disks, with a cache of decoded chunks.
    ///
    /// # Errors
    /// The errors of `Repository::open`.
    pub(crate) fn open_for_serving(&self, cache_bytes: u64) -> Result<Arc<Repository>> {
        self.open_with(cache_bytes)
    }

    /// Lets only this user read the files that this process makes from now on.
    pub(crate) fn keep_files_private(&self) {
        keep_files_private();
    }

    fn open_with(&self, cache_bytes: u64) -> Result<Arc<Repository>> {
        let options = OpenOptions { cache_bytes };
        Repository::open(self.repository_path()?, &self.passphrase()?, &options)
    }

    /// Opens the repository for writing, but asks no other process to yield. It is for a
    /// caller that holds the background lock or takes it in `first`, whose result is
    /// returned.
    ///
    /// # Errors
    /// The errors of [`Invocation::open_for_writing`].
    pub(crate) fn open_in_background<T>(
        &self,
        first: impl FnOnce() -> Result<T>,
    ) -> Result<(T, RepositoryWriter)> {
        open_in_background(self.repository_path()?, &self.passphrase()?, first)
    }

    /// Opens the repository for writing even if parts of its database are lost. Reports the
    /// lost parts and the number of recreated markers.
    ///
    /// # Errors
    /// The errors of `coldrise_session::open_for_repair`.
    pub(crate) fn open_for_repair(&self) -> Result<(RepositoryWriter, ReopenReport, u64)> {
        self.keep_files_private();
        let options = OpenOptions { cache_bytes: 0 };
        let (path, passphrase) = (self.repository_path()?, self.passphrase()?);
        let (writer, reopened, entered) = write_before_background(path, || {
            coldrise_session::open_for_repair(path, &passphrase, &options)
        })?;
        Ok((writer, reopened, entered.markers))
    }

    /// Opens the repository for writing, and first enters sealed points of sessions into the
    /// catalog, as every writer does.
    ///
    /// # Errors
    /// `Busy` if another process is writing; otherwise the errors of `Repository::open`.
    pub(crate) fn open_for_writing(&self) -> Result<RepositoryWriter> {
        open_for_writing(self.repository_path()?, &self.passphrase()?)
    }
}

/// Opens a repository for writing: see [`Invocation::open_for_writing`].
///
/// # Errors
/// As for [`Invocation::open_for_writing`].
pub(crate) fn open_for_writing(
    path: &Path,
    passphrase: &PassphraseSource,
) -> Result<RepositoryWriter> {
    let ((), writer) =
        write_before_background(path, || open_in_background(path, passphrase, || Ok(())))?;
    let entered = coldrise_session::enter_sealed_points(&writer)?;
    tracing::debug!(entered = entered.points, "sealed points were entered into the catalog");
    Ok(writer)
}

fn open_in_background<T>(
    path: &Path,
    passphrase: &PassphraseSource,
    first: impl FnOnce() -> Result<T>,
) -> Result<(T, RepositoryWriter)> {
    keep_files_private();
    let options = OpenOptions { cache_bytes: 0 };
    RepositoryWriter::open_after(path, passphrase, &options, first)
}

/// Lets only this user read the files that this process makes from now on. RocksDB makes its
/// files with the mode that the umask leaves. Commands that write the repository make no
/// other files for users.
fn keep_files_private() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
}

fn remark(is_quiet: bool, text: &str) {
    if is_quiet {
        run_record::log("info", text);
    } else {
        print_remark(text);
    }
}
