//! Opens a repository whose database is damaged.

use std::collections::HashSet;
use std::path::Path;

use coldrise_block::{Error, ErrorKind, Result};

use super::fresh::leave_out_uncommitted;
use super::{fresh, redundancy};
use crate::advice::advise_repair;
use crate::high_water::{Mark, refuse_rolled_back};
use crate::passphrase::ReadOnce;
use crate::repair_flag::refuse_unfinished;
use crate::repository_config::RepositoryConfig;
use crate::rocks::Database;
use crate::{OpenOptions, PassphraseSource, Repository, RepositoryWriter};

/// The work that was necessary to open a repository.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReopenReport {
    /// Damaged database files whose readable entries were written again.
    pub mended_files: u64,
    /// Unreadable stretches in those files: their entries are missing, unless they are stored
    /// elsewhere too.
    pub lost_blocks: u64,
    /// Database files that were missing or had no readable entry.
    pub dropped_files: u64,
    /// The database's manifest could not be read, or was older than the last commit.
    pub is_list_new: bool,
    /// Points missing from the catalog that were restored from their markers.
    pub restored_points: u64,
}

/// Names (`MACHINE/POINT`) of points that are not in the catalog yet, but in sessions' documents.
pub(crate) type WaitingPoints<'a> = &'a dyn Fn(&Repository) -> Result<HashSet<String>>;

impl RepositoryWriter {
    /// Opens a repository for writing and removes the remains of an interrupted writer.
    ///
    /// # Errors
    /// `Busy` if another writer has it open; otherwise as [`Repository::open`].
    pub fn open(
        path: &Path,
        passphrase: &PassphraseSource,
        options: &OpenOptions,
    ) -> Result<RepositoryWriter> {
        RepositoryWriter::open_after(path, passphrase, options, || Ok(()))
            .map(|((), writer)| writer)
    }

    /// [`RepositoryWriter::open`] that calls `first` when the passphrase is known to be right and
    /// nothing has changed yet. Drop the result of `first` after the writer; binding the pair with
    /// one `let` does that.
    ///
    /// # Errors
    /// Those of `first`; as [`RepositoryWriter::open`].
    pub fn open_after<T>(
        path: &Path,
        passphrase: &PassphraseSource,
        options: &OpenOptions,
        first: impl FnOnce() -> Result<T>,
    ) -> Result<(T, RepositoryWriter)> {
        let passphrase = ReadOnce::new(passphrase);
        let (mut first, mut done) = (Some(first), None);
        let mut begin = || {
            done = first.take().map_or(Ok(done.take()), |first| first().map(Some))?;
            Ok(())
        };
        let open = |folder: &Path, log: &Path, mark: Option<Mark>| {
            refuse_unfinished(path)?;
            // Opening deletes files that the manifest does not name, and drops the log.
            let opened = match mark {
                Some(mark) => refuse_rolled_back(folder, &mark, log)
                    .and_then(|()| Database::open_looked_at(folder, log)),
                None => Database::open_primary(folder, log, false),
            };
            opened.map_err(advise_repair)
        };
        let prepare = |_: &Repository| Ok(());
        let mut open_with =
            || RepositoryWriter::open_with(path, &passphrase, options, &mut begin, open, prepare);
        let writer = match open_with() {
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
                if leave_out_uncommitted(path, &passphrase)? {
                    open_with()?
                } else {
                    return Err(error);
                }
            }
            opened => opened?,
        };
        let never = || Error::new(ErrorKind::Internal, "opened without its beginning");
        Ok((done.ok_or_else(never)?, writer))
    }

    /// Opens a repository for writing, even if files of its database are damaged, missing or cut
    /// short: then a fresh database is made from the readable parts, see `fresh`. This begins when
    /// the passphrase is known to be right. If anything was lost, only a repair can open the
    /// repository until [`RepositoryWriter::find_damage`] has ended.
    ///
    /// # Errors
    /// As [`RepositoryWriter::open`]; `Corrupt` if a file does not belong to this database.
    pub fn open_for_repair(
        path: &Path,
        passphrase: &PassphraseSource,
        options: &OpenOptions,
    ) -> Result<(RepositoryWriter, ReopenReport)> {
        let nothing_waits = |_: &Repository| Ok(HashSet::new());
        RepositoryWriter::open_for_repair_beside(path, passphrase, options, &nothing_waits)
    }

    /// [`RepositoryWriter::open_for_repair`] that does not restore points from their markers if
    /// they are `waiting` for a writer.
    ///
    /// # Errors
    /// As [`RepositoryWriter::open_for_repair`]; those of `waiting`.
    pub fn open_for_repair_beside(
        path: &Path,
        passphrase: &PassphraseSource,
        options: &OpenOptions,
        waiting: WaitingPoints<'_>,
    ) -> Result<(RepositoryWriter, ReopenReport)> {
        let is_mended = RepositoryConfig::mend(path)?;
        let passphrase = ReadOnce::new(passphrase);
        let mut reopened = fresh::make_where_needed(path, &passphrase)?;
        reopened.mended_files += u64::from(is_mended);
        let open = |folder: &Path, log: &Path, _| Database::open_for_repair(folder, log);
        let mut restored_points = 0;
        let prepare = |repository: &Repository| {
            restored_points = redundancy::restore(repository, waiting)?;
            Ok(())
        };
        let writer =
            RepositoryWriter::open_with(path, &passphrase, options, || Ok(()), open, prepare)?;
        reopened.restored_points = restored_points;
        Ok((writer, reopened))
    }
}
