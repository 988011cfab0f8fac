//! Files of chunks that are written outside the database and then ingested.

use std::path::{Path, PathBuf};

use coldrise_block::Result;
use librocksdb_sys as sys;

use super::{Database, Family, c_path, checked};

/// A sorted file of chunks that is being written.
pub(crate) struct SstWriter<'db> {
    writer: *mut sys::rocksdb_sstfilewriter_t,
    environment: *mut sys::rocksdb_envoptions_t,
    path: PathBuf,
    /// Owns the options.
    _database: &'db Database,
}

impl<'db> SstWriter<'db> {
    /// Starts a file for the chunks family.
    pub(crate) fn create(database: &'db Database, path: &Path) -> Result<Self> {
        let name = c_path(path)?;
        let options = database.family_options(Family::Chunks)?.as_ptr();
        // SAFETY: the options outlive the writer, which borrows the database.
        let writer = unsafe {
            let environment = sys::rocksdb_envoptions_create();
            SstWriter {
                writer: sys::rocksdb_sstfilewriter_create(environment, options),
                environment,
                path: path.to_owned(),
                _database: database,
            }
        };
        checked("starting a file of chunks for the database", |error| {
            // SAFETY: the writer is live; the name is read within the call.
            unsafe { sys::rocksdb_sstfilewriter_open(writer.writer, name.as_ptr(), error) }
        })?;
        Ok(writer)
    }

    /// Appends an entry; keys must ascend.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        checked("writing a file of chunks for the database", |error| {
            // SAFETY: the writer is live; key and value are copied.
            unsafe {
                sys::rocksdb_sstfilewriter_put(
                    self.writer,
                    key.as_ptr().cast(),
                    key.len(),
                    value.as_ptr().cast(),
                    value.len(),
                    error,
                );
            }
        })
    }

    /// Completes and syncs the file; it holds at least one key.
    pub(crate) fn finish(self) -> Result<PathBuf> {
        checked("completing a file of chunks for the database", |error| {
            // SAFETY: the writer is live and open.
            unsafe { sys::rocksdb_sstfilewriter_finish(self.writer, error) }
        })?;
        Ok(self.path.clone())
    }
}

impl Drop for SstWriter<'_> {
    fn drop(&mut self) {
        // SAFETY: each destroyed once; the writer first.
        unsafe {
            sys::rocksdb_sstfilewriter_destroy(self.writer);
            sys::rocksdb_envoptions_destroy(self.environment);
        }
    }
}
