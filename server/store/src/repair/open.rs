//! Opening a repository of which the database is damaged.

use std::path::Path;

use coldrise_block::Result;

use super::{counters, files};
use crate::description::{database_path, Description};
use crate::passphrase::ReadOnce;
use crate::rocks::Database;
use crate::{OpenOptions, PassphraseSource, RepositoryWriter};

/// What had to be done to open a repository.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reopened {
    /// Files of the database that held damage and were mended.
    pub mended_files: u64,
    /// Blocks in those that could not be put right: what they held is missing.
    pub lost_blocks: u64,
    /// Files of the database that were missing, cut short or beyond mending, and were given
    /// up: what they held is missing.
    pub dropped_files: u64,
    /// The list of the database's files could not be read, or was cut short, and was made
    /// anew from the files.
    pub is_list_new: bool,
}

impl RepositoryWriter {
    /// Opens a repository for writing, also where files of its database are damaged,
    /// missing or cut short: what is damaged is put right or left out, what is lost is
    /// given up. That begins when the passphrase is known to be right. Where anything was
    /// lost, only a repair opens the repository again before
    /// [`RepositoryWriter::find_damage`] has ended.
    ///
    /// # Errors
    /// As of [`RepositoryWriter::open`]; `Corrupt` where a file is none of this
    /// database.
    pub fn open_for_repair(
        path: &Path,
        passphrase: &PassphraseSource,
        options: &OpenOptions,
    ) -> Result<(RepositoryWriter, Reopened)> {
        let is_mended = Description::mend(path)?;
        let mut reopened = Reopened::default();
        let open = |log: &Path| {
            reopened = files::mend_all(path, log)?;
            reopened.mended_files += u64::from(is_mended);
            Database::open_for_repair(&database_path(path), log)
        };
        let (passphrase, settle) = (ReadOnce::new(passphrase), counters::settle_state);
        let writer =
            RepositoryWriter::open_with(path, &passphrase, options, || Ok(()), open, settle)?;
        Ok((writer, reopened))
    }
}
