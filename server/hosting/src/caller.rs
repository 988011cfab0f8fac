//! What the programs need of the command that starts them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::Result;
use coldrise_store::{OpenOptions, PassphraseSource, Repository};

/// The environment variable with a command that prints the passphrase.
pub const PASSPHRASE_COMMAND: &str = "COLDRISE_PASSPHRASE_COMMAND";
/// The environment variable with the path of the passphrase's file.
pub const PASSPHRASE_FILE: &str = "COLDRISE_PASSPHRASE_FILE";

/// The command that starts programs: its repository, and how it prints.
pub struct Caller {
    /// The directory of the repository.
    pub repository: PathBuf,
    /// Where the passphrase comes from.
    pub passphrase: PassphraseSource,
    /// Prints a remark for people.
    pub remark: Box<dyn Fn(&str) + Send + Sync>,
    /// Prints a message of a program that was started.
    pub print_message: fn(&str),
}

impl Caller {
    pub(crate) fn repository_path(&self) -> &Path {
        &self.repository
    }

    pub(crate) fn passphrase(&self) -> &PassphraseSource {
        &self.passphrase
    }

    pub(crate) fn remark(&self, text: &str) {
        (self.remark)(text);
    }

    /// Opens the repository for documents.
    ///
    /// # Errors
    /// The errors of [`Repository::open`].
    pub(crate) fn open(&self) -> Result<Arc<Repository>> {
        Repository::open(&self.repository, &self.passphrase, &OpenOptions { cache_bytes: 0 })
    }
}
