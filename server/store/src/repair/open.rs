//! Opening a repository of which the database is damaged.

use std::path::Path;

use coldrise_block::Result;

use super::{fresh, redundancy};
use crate::description::Description;
use crate::passphrase::ReadOnce;
use crate::rocks::Database;
use crate::{OpenOptions, PassphraseSource, RepositoryWriter};

/// What had to be done to open a repository.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reopened {
    /// Damaged files of the database of which what can be read was written once more.
    pub mended_files: u64,
    /// Stretches in those that cannot be read: what they held is missing, unless it is stored
    /// elsewhere, too.
    pub lost_blocks: u64,
    /// Files of the database that were missing, or of which nothing can be read.
    pub dropped_files: u64,
    /// The list of the database's files could not be read, or was older than the last commit.
    pub is_list_new: bool,
}

impl RepositoryWriter {
    /// Opens a repository for writing, also where files of its database are damaged,
    /// missing or cut short: then it is made anew from what can be read, see `fresh`. That begins when the passphrase is known to be right. Where anything was
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
        let passphrase = ReadOnce::new(passphrase);
        let mut reopened = fresh::make_where_needed(path, &passphrase)?;
        reopened.mended_files += u64::from(is_mended);
        let open = |folder: &Path, log: &Path, _| Database::open_for_repair(folder, log);
        let settle = redundancy::restore;
        let writer =
            RepositoryWriter::open_with(path, &passphrase, options, || Ok(()), open, settle)?;
        Ok((writer, reopened))
    }
}
