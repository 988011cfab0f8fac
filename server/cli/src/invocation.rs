//! State that every command uses: the repository from the options, and the output format.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosting::{Caller, PASSPHRASE_COMMAND, PASSPHRASE_FILE};
use coldrise_session::{PointOfMark, RepositoryAccess};
use coldrise_store::{Address, PassphraseSource, Repository};

use crate::arguments::GlobalOptions;
use crate::remote::ServerOptions;
use crate::report::print_remark;
use crate::run_record::LogLines;
use coldrise_runs::process_run;

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
            // It would log its errors to the same stream, and a stream on a full drive then ends the thread.
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

    /// Whether the command is for another host's service: set by an option or by the environment, unless
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

    /// The point of an address with a time mark. Says which mark an age means. Any other address stays as it is.
    ///
    /// # Errors
    /// Those of [`PointOfMark::of`].
    pub(crate) fn point_of_mark(
        &self,
        repository: &Arc<Repository>,
        address: &Address,
    ) -> Result<PointOfMark> {
        let point = PointOfMark::of(repository, address)?;
        if point.shown != *address {
            self.remark(&format!("{address} is {}", point.shown));
        }
        Ok(point)
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

    /// The caller for programs that the command starts.
    ///
    /// # Errors
    /// `InvalidInput` if no repository was named, or two sources of the passphrase.
    pub(crate) fn caller(&self) -> Result<&Caller> {
        if let Some(caller) = self.caller.get() {
            return Ok(caller);
        }
        let is_quiet = self.options.quiet;
        let caller = Caller {
            repository: RepositoryAccess::new(self.repository_path()?, self.passphrase()?),
            remark: Box::new(move |text| remark(is_quiet, text)),
            print_message: print_remark,
        };
        Ok(self.caller.get_or_init(|| caller))
    }

    /// The repository and its passphrase.
    ///
    /// # Errors
    /// `InvalidInput` if no repository was named, or two sources of the passphrase.
    pub(crate) fn access(&self) -> Result<&RepositoryAccess> {
        self.caller().map(|caller| &caller.repository)
    }

    /// Opens the repository for documents: lists, publishing, sealing.
    ///
    /// # Errors
    /// The errors of `Repository::open`.
    pub(crate) fn open(&self) -> Result<Arc<Repository>> {
        self.access()?.open(0)
    }

    /// Opens the repository for reading disks.
    ///
    /// # Errors
    /// The errors of `Repository::open`.
    pub(crate) fn open_for_disks(&self) -> Result<Arc<Repository>> {
        self.access()?.open(READING_CACHE_BYTES)
    }
}

fn remark(is_quiet: bool, text: &str) {
    if is_quiet {
        process_run::log("info", text);
    } else {
        print_remark(text);
    }
}
