//! The interface to the command that starts the programs.

use std::path::Path;
use std::sync::Arc;

use coldrise_block::Result;
use coldrise_session::RepositoryAccess;
use coldrise_store::{PassphraseSource, Repository};

/// The environment variable with a command that prints the passphrase.
pub const PASSPHRASE_COMMAND: &str = "COLDRISE_PASSPHRASE_COMMAND";
/// The environment variable with the path of the passphrase's file.
pub const PASSPHRASE_FILE: &str = "COLDRISE_PASSPHRASE_FILE";

/// The command that starts programs: its repository, and how it prints.
pub struct Caller {
    /// The repository.
    pub repository: RepositoryAccess,
    /// Prints a remark for people.
    pub remark: Box<dyn Fn(&str) + Send + Sync>,
    /// Prints a message of a program that was started.
    pub print_message: fn(&str),
}

impl Caller {
    pub(crate) fn repository_path(&self) -> &Path {
        self.repository.path()
    }

    pub(crate) fn passphrase(&self) -> &PassphraseSource {
        self.repository.passphrase()
    }

    /// Prints a remark for people.
    pub fn remark(&self, text: &str) {
        (self.remark)(text);
    }

    /// Opens the repository for documents.
    ///
    /// # Errors
    /// The errors of [`Repository::open`].
    pub(crate) fn open(&self) -> Result<Arc<Repository>> {
        self.repository.open(0)
    }
}
