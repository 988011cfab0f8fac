//! `coldrise init`: a new repository.

use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::keep_files_private;
use coldrise_store::{
    Compression, InitOptions, MAX_CHUNK_SIZE_BYTES, MIN_CHUNK_SIZE_BYTES, PassphraseSource,
    Repository,
};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::{parse_size, show_size};

/// Create a repository.
///
/// Creates the directory if it is missing; an existing one must be empty. The repository is
/// encrypted: give a passphrase with --passphrase-file or --passphrase-command, and keep a copy
/// of it elsewhere. Nothing can be read without it.
#[derive(Debug, Args)]
pub(crate) struct InitArguments {
    #[command(flatten)]
    new: NewRepository,
}

/// The parameters of a new repository.
#[derive(Debug, Args)]
pub(crate) struct NewRepository {
    /// Size of the chunks that disks are divided into: a power of two from 4K to 256K. Small
    /// chunks find more duplicates; large chunks need less memory and a smaller index. The size
    /// cannot be changed later.
    #[arg(long, value_name = "SIZE", default_value = "16K", value_parser = parse_size)]
    chunk_size: u64,

    /// Compression of chunks: zstd, zstd:LEVEL (1 to 19), lz4 or none.
    #[arg(long, value_name = "KIND", default_value = "zstd:1")]
    compression: Compression,

    /// Create an unencrypted repository.
    #[arg(long)]
    no_encryption: bool,

    /// Milliseconds that one passphrase guess takes on this machine. Opening the repository
    /// takes as long. Default: about 25, enough for a generated passphrase, little for one that
    /// a person chose.
    #[arg(long, value_name = "MS", conflicts_with = "no_encryption")]
    #[arg(value_parser = clap::value_parser!(u64).range(25..=10_000))]
    guess_ms: Option<u64>,
}

impl NewRepository {
    /// Calls `make` with the parameters, and the time that one guess at the passphrase takes.
    ///
    /// # Errors
    /// `InvalidInput` for an impossible chunk size, without a passphrase, and with one that is not wanted; the errors of `make`.
    pub(crate) fn make(
        &self,
        invocation: &Invocation,
        make: impl FnOnce(&InitOptions<'_>, Option<Duration>) -> Result<()>,
    ) -> Result<()> {
        let chunk_size_bytes = u32::try_from(self.chunk_size)
            .ok()
            .filter(|size| size.is_power_of_two())
            .filter(|size| (MIN_CHUNK_SIZE_BYTES..=MAX_CHUNK_SIZE_BYTES).contains(size))
            .ok_or_else(|| {
                let text = format!(
                    "a chunk size of {} is not possible: use a power of two from 4K to 256K",
                    self.chunk_size
                );
                Error::new(ErrorKind::InvalidInput, text)
            })?;
        let source = invocation.passphrase()?;
        if self.no_encryption && source != PassphraseSource::None {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "--no-encryption and a passphrase are both given: leave out one of them (the \
                 passphrase may come from the environment)",
            ));
        }
        let passphrase = source.read()?;
        if passphrase.is_none() && !self.no_encryption {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "a repository is encrypted, so give a passphrase: --passphrase-file FILE or \
                 --passphrase-command COMMAND; or give --no-encryption",
            ));
        }
        let options = InitOptions {
            chunk_size_bytes,
            compression: self.compression,
            passphrase: passphrase.as_ref(),
        };
        make(&options, self.guess_ms.map(Duration::from_millis))
    }
}

#[derive(Serialize)]
struct Made {
    repository: String,
    id: String,
    chunk_size_bytes: u32,
    compression: String,
    is_encrypted: bool,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &InitArguments) -> Result<Report> {
    let path = invocation.repository_path()?;
    arguments.new.make(invocation, |options, guess_time| {
        keep_files_private();
        Repository::init_with_guess_time(path, options, guess_time)
    })?;
    let repository = invocation.open()?;
    let made = Made {
        repository: path.display().to_string(),
        id: repository.id().to_string(),
        chunk_size_bytes: repository.chunk_size_bytes(),
        compression: repository.compression().to_string(),
        is_encrypted: repository.is_encrypted(),
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = format!(
        "made the repository {}\n  chunks of {}, compression {}\n  {}",
        made.repository,
        show_size(u64::from(made.chunk_size_bytes)),
        made.compression,
        secrecy(made.is_encrypted),
    );
    Ok(Report::done(&made, text))
}

/// The consequence of encryption, or of its absence.
pub(crate) fn secrecy(is_encrypted: bool) -> &'static str {
    if is_encrypted {
        "encrypted: nothing can be read without the passphrase, so keep a copy of it"
    } else {
        "not encrypted: anyone with access to the files can read the data"
    }
}
