//! The command line of `coldrised`. The comments here are also its help and man page.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_inventory::Inventory;
use coldrise_runs::RunsFolder;
use coldrise_store::PassphraseSource;

/// Cache of decoded chunks for clients that read disks, in bytes.
const CACHE_BYTES: u64 = 16 << 20;

/// Protect a site: run jobs, watch runs, serve the API.
///
/// The service reads one repository. It starts every backup, boot check, restore and prune as a
/// process of its own, which survives the service. Options can also come from the environment
/// (/etc/default/coldrise): COLDRISE_REPO, COLDRISE_PASSPHRASE_FILE, COLDRISE_STATE,
/// COLDRISE_RUNS, COLDRISE_SOCKET, COLDRISE_LISTEN, COLDRISE_WEB, COLDRISE_MIN_FREE.
#[derive(Debug, Parser)]
#[command(name = "coldrised", version, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) options: Options,
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
}

/// What to do in place of serving.
#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Print a one-time link for creating an administrator.
    ///
    /// It is valid for 24 hours and replaces earlier links. The service need not run.
    SetupLink {
        /// Also if there is an administrator already, such as after a lost password.
        #[arg(long)]
        force: bool,
    },
    /// Print the OpenAPI document of the API.
    Openapi,
    /// Write the man page into a directory, for packages.
    #[command(hide = true)]
    Man {
        /// The directory.
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// Where things lie.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// The repository's directory.
    #[arg(long, global = true, value_name = "DIR", env = "COLDRISE_REPO", hide_env = true)]
    pub(crate) repo: Option<PathBuf>,

    /// Read the repository's passphrase from FILE; a trailing newline is ignored.
    ///
    /// Without it, the unit's credential `coldrise_passphrase` applies, if there is one.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "COLDRISE_PASSPHRASE_FILE",
        hide_env = true
    )]
    pub(crate) passphrase_file: Option<PathBuf>,

    /// Directory of the database, certificate and settings; created if missing.
    #[arg(long, global = true, value_name = "DIR", env = "COLDRISE_STATE", hide_env = true)]
    #[arg(default_value = "/var/lib/coldrise")]
    pub(crate) state: PathBuf,

    /// Directory of the runs; without it, `runs` in the state directory.
    #[arg(long, global = true, value_name = "DIR", env = "COLDRISE_RUNS", hide_env = true)]
    pub(crate) runs: Option<PathBuf>,

    /// Path of the Unix socket. Root and the service's own user have all rights there.
    #[arg(long, global = true, value_name = "PATH", env = "COLDRISE_SOCKET", hide_env = true)]
    #[arg(default_value = "/run/coldrise/coldrised.socket")]
    pub(crate) socket: PathBuf,

    /// Address and port for HTTPS. Until the first user exists, the service listens on the
    /// loopback address with this port only.
    #[arg(long, global = true, value_name = "ADDR:PORT", env = "COLDRISE_LISTEN", hide_env = true)]
    #[arg(default_value = "127.0.0.1:8480")]
    pub(crate) listen: SocketAddr,

    /// Directory of the page (index.html and its files), as `make web` builds it.
    ///
    /// Without it, share/coldrise/web beside the program's bin; if that is missing, the service has no page.
    #[arg(long, global = true, value_name = "DIR", env = "COLDRISE_WEB", hide_env = true)]
    pub(crate) web: Option<PathBuf>,

    /// The program that runs are; without it, `coldrise` beside this program.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) program: Option<PathBuf>,

    /// Start runs as units of systemd (coldrise-run@.service), or as detached processes.
    #[arg(long, global = true, value_name = "WAY", value_enum, default_value_t = StartRuns::Auto)]
    pub(crate) start_runs: StartRuns,

    /// Warn when less than this part of the repository's drive is free, or when it will be full in
    /// 30 days, and raise a failure at a third of it or 3 days; 0: never.
    #[arg(long, global = true, value_name = "PERCENT", env = "COLDRISE_MIN_FREE", hide_env = true)]
    #[arg(default_value_t = 10, value_parser = clap::value_parser!(u8).range(0..=50))]
    pub(crate) min_free: u8,
}

/// How runs are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum StartRuns {
    /// As units if the service itself is a unit of systemd, else detached.
    Auto,
    /// As units.
    Systemd,
    /// As detached processes.
    Detached,
}

/// Depth of folders in which another name of a file is looked for: passwords and keys lie in `secrets`, `tls` and
/// the like.
const LINK_DEPTH: usize = 2;

/// Whether a file is one of `place`, or below it, by another name: a hard link.
fn is_link_into(file: &Path, place: &Path) -> bool {
    let identity =
        |path: &Path| path.symlink_metadata().ok().map(|found| (found.dev(), found.ino()));
    let found = file.symlink_metadata().ok().filter(|found| found.is_file() && found.nlink() > 1);
    let Some(found) = found.map(|found| (found.dev(), found.ino())) else { return false };
    let mut level = vec![place.to_owned()];
    for _ in 0..=LINK_DEPTH {
        if level.iter().any(|path| identity(path) == Some(found)) {
            return true;
        }
        let folders = level.iter().filter_map(|path| std::fs::read_dir(path).ok());
        level = folders.flatten().flatten().map(|entry| entry.path()).collect();
    }
    false
}

impl Options {
    /// The folder of the runs.
    pub(crate) fn runs_folder(&self) -> RunsFolder {
        RunsFolder::at(self.runs.clone().unwrap_or_else(|| self.state.join("runs")))
    }

    /// The service's own files and folders: its passphrase, its keys, its database, the repository.
    pub(crate) fn own_files(&self) -> Vec<PathBuf> {
        let own = [Some(&self.state), self.passphrase_file.as_ref(), self.repo.as_ref()];
        let credentials = std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from);
        let runs = self.runs.clone();
        own.into_iter().flatten().cloned().chain(credentials).chain(runs).collect()
    }

    /// Refuses the service's own files as sources of backups and targets of restores: its passphrase, its
    /// keys, its database. Symbolic links are followed.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub(crate) fn refuse_own_files(&self, text: &str) -> Result<()> {
        let Some(start) = text.find('/') else { return Ok(()) };
        let path = Path::new(&text[start..]);
        // A target does not exist yet; its folder does.
        let real = path.canonicalize().or_else(|_| path.parent().unwrap_or(path).canonicalize());
        let real = real.unwrap_or_else(|_| path.to_owned());
        let own = self.own_files();
        let own = own.iter().filter_map(|own| own.canonicalize().ok());
        let mut own = own.into_iter();
        let is_own = own.any(|own| real.starts_with(&own) || is_link_into(&real, &own));
        if !is_own {
            return Ok(());
        }
        let text = format!("{}: this is a file of the service itself", path.display());
        Err(Error::new(ErrorKind::InvalidInput, text))
    }

    /// The repository, not yet open; `None` if none is named.
    ///
    /// # Errors
    /// Errors of making its path absolute.
    pub(crate) fn inventory(&self) -> Result<Option<Inventory>> {
        let Some(path) = &self.repo else { return Ok(None) };
        let path = std::path::absolute(path).context(|| "finding the repository")?;
        let passphrase = match &self.passphrase_file {
            Some(path) => PassphraseSource::File(path.clone()),
            None => PassphraseSource::of_unit(),
        };
        Ok(Some(Inventory::new(&path, &passphrase, CACHE_BYTES)))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        super::Arguments::command().debug_assert();
    }
}
