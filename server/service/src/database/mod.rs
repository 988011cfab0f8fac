//! The service's database: an index, and what only the service knows.
//!
//! Users, tokens, logins, jobs, the queue and the audit log live here; runs and restore points do not:
//! their folders and the repository are the truth. SQLite in WAL mode with `synchronous=FULL`: a
//! committed change survives a power cut, an unfinished one leaves no trace.
//!
//! One connection behind a lock serves everything. Calls take microseconds to some milliseconds (a
//! commit syncs), so callers are blocking threads. No call is made while holding the lock.

mod migrations;
mod settings;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rusqlite::{Connection, Transaction, TransactionBehavior};

/// The open database. Clones share it.
#[derive(Clone)]
pub(crate) struct Database(Arc<OpenDatabase>);

struct OpenDatabase {
    connection: Mutex<Connection>,
    /// The service's folder: errors name it.
    folder: PathBuf,
}

impl Database {
    /// Opens `coldrised.db` in `state`, and creates or migrates it.
    ///
    /// # Errors
    /// `Corrupt` if the file is damaged; `Unsupported` if a newer version wrote it.
    pub(crate) fn open(state: &Path) -> Result<Database> {
        let path = state.join("coldrised.db");
        let opened = Connection::open(&path).and_then(|mut connection| {
            connection.busy_timeout(std::time::Duration::from_secs(10))?;
            connection.pragma_update(None, "journal_mode", "WAL")?;
            connection.pragma_update(None, "synchronous", "FULL")?;
            connection.pragma_update(None, "foreign_keys", true)?;
            connection.pragma_update(None, "trusted_schema", false)?;
            // In KiB: the index is small.
            connection.pragma_update(None, "cache_size", -4096)?;
            let found = migrations::apply(&mut connection)?;
            Ok((connection, found))
        });
        let (connection, found) = opened.map_err(|error| {
            failed(error, state)
                .context(format!("opening the service's database {}", path.display()))
        })?;
        if let Some(version) = found {
            let text = format!(
                "{}: a newer version of coldrised wrote this database (its version is {version})",
                path.display()
            );
            return Err(
                Error::new(ErrorKind::Unsupported, text).advise("install the newer version again")
            );
        }
        let folder = state.to_owned();
        Ok(Database(Arc::new(OpenDatabase { connection: Mutex::new(connection), folder })))
    }

    /// Reads.
    ///
    /// # Errors
    /// Those of `work`, and of SQLite.
    pub(crate) fn read<T>(&self, work: impl FnOnce(&Connection) -> SqlResult<T>) -> Result<T> {
        work(&self.0.connection.lock()).map_err(|error| failed(error, &self.0.folder))
    }

    /// Changes in one transaction, which is committed if `work` succeeds.
    ///
    /// # Errors
    /// Those of `work`, and of SQLite; `NoSpace` on a full drive.
    pub(crate) fn change<T>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> SqlResult<T>,
    ) -> Result<T> {
        let mut connection = self.0.connection.lock();
        let done = (|| {
            let transaction =
                connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let done = work(&transaction)?;
            transaction.commit()?;
            Ok(done)
        })();
        done.map_err(|error| failed(error, &self.0.folder))
    }
}

/// What to do when the drive of the service's folder is full.
pub(crate) const FREE_SPACE: &str = "free some space on it; the service then continues";

/// The result of statements.
pub(crate) type SqlResult<T> = rusqlite::Result<T>;

/// An error of SQLite in our words. `folder` is the service's.
fn failed(error: rusqlite::Error, folder: &Path) -> Error {
    use rusqlite::ErrorCode;
    let (kind, what) = match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => {
            let text = format!("the drive of the service's folder {} is full", folder.display());
            return Error::new(ErrorKind::NoSpace, text).advise(FREE_SPACE);
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            (ErrorKind::Busy, "another process holds the service's database")
        }
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            (ErrorKind::Corrupt, "the service's database is damaged")
        }
        Some(ErrorCode::ReadOnly) => (ErrorKind::ReadOnly, "the service's database is read-only"),
        Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen) => {
            (ErrorKind::Io, "reading or writing the service's database failed")
        }
        _ => (ErrorKind::Internal, "the service's database refused a statement"),
    };
    Error::with_source(kind, what, error)
}
