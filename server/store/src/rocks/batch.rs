//! Writes that are applied together.

use coldrise_block::Result;
use librocksdb_sys as sys;

use super::{Database, Family};

/// Writes that are applied together.
pub struct Batch<'db> {
    pub(super) batch: *mut sys::rocksdb_writebatch_t,
    pub(super) database: &'db Database,
    pub(super) bytes: usize,
}

impl Batch<'_> {
    /// Adds an entry.
    pub fn put(&mut self, family: Family, key: &[u8], value: &[u8]) -> Result<()> {
        let opened = self.database.opened();
        let handle = opened.family(family)?;
        self.bytes += key.len() + value.len();
        // SAFETY: all objects are live; key and value are copied.
        unsafe {
            sys::rocksdb_writebatch_put_cf(
                self.batch,
                handle,
                key.as_ptr().cast(),
                key.len(),
                value.as_ptr().cast(),
                value.len(),
            );
        }
        Ok(())
    }

    /// Deletes a key, which may be absent.
    pub fn delete(&mut self, family: Family, key: &[u8]) -> Result<()> {
        let opened = self.database.opened();
        let handle = opened.family(family)?;
        self.bytes += key.len();
        // SAFETY: all objects are live; the key is copied.
        unsafe {
            sys::rocksdb_writebatch_delete_cf(self.batch, handle, key.as_ptr().cast(), key.len());
        }
        Ok(())
    }

    /// Number of changes so far.
    pub(crate) fn count(&self) -> u64 {
        // SAFETY: the batch is live.
        u64::try_from(unsafe { sys::rocksdb_writebatch_count(self.batch) }).unwrap_or(0)
    }

    /// Bytes of keys and values so far.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        // SAFETY: destroyed once.
        unsafe { sys::rocksdb_writebatch_destroy(self.batch) }
    }
}
