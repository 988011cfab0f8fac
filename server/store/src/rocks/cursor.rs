//! Reading: values borrowed from RocksDB, and positions in a family.

use std::marker::PhantomData;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use librocksdb_sys as sys;

use super::{Database, Opened, checked, lent_bytes};

/// A value borrowed from RocksDB.
pub struct Pinned<'db> {
    pub(super) slice: *mut sys::rocksdb_pinnableslice_t,
    pub(super) _opened: Arc<Opened>,
    pub(super) database: PhantomData<&'db Database>,
}

impl std::ops::Deref for Pinned<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let mut length = 0;
        // SAFETY: the slice is live and unchanged until it is destroyed.
        unsafe {
            let bytes = sys::rocksdb_pinnableslice_value(self.slice, &mut length);
            lent_bytes(bytes, length)
        }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // SAFETY: destroyed once.
        unsafe { sys::rocksdb_pinnableslice_destroy(self.slice) }
    }
}

/// A position in one family.
pub struct Cursor<'db> {
    pub(super) iterator: *mut sys::rocksdb_iterator_t,
    pub(super) _opened: Arc<Opened>,
    pub(super) database: PhantomData<&'db Database>,
}

impl Cursor<'_> {
    /// Goes to the first key that is `key` or greater.
    pub fn seek(&mut self, key: &[u8]) -> Result<()> {
        // SAFETY: the iterator is live; the key is read within the call.
        unsafe { sys::rocksdb_iter_seek(self.iterator, key.as_ptr().cast(), key.len()) };
        self.check()
    }

    /// Goes to the last key that is `key` or less.
    pub fn seek_for_previous(&mut self, key: &[u8]) -> Result<()> {
        // SAFETY: as in `seek`.
        unsafe { sys::rocksdb_iter_seek_for_prev(self.iterator, key.as_ptr().cast(), key.len()) };
        self.check()
    }

    /// Goes to the key before; the cursor must be on one.
    pub fn previous(&mut self) -> Result<()> {
        if self.entry().is_none() {
            return Err(Error::new(ErrorKind::Internal, "a cursor was moved before its start"));
        }
        // SAFETY: the iterator is live and valid, as RocksDB asks.
        unsafe { sys::rocksdb_iter_prev(self.iterator) };
        self.check()
    }

    /// Goes to the last key.
    pub(crate) fn seek_to_last(&mut self) -> Result<()> {
        // SAFETY: the iterator is live.
        unsafe { sys::rocksdb_iter_seek_to_last(self.iterator) };
        self.check()
    }

    /// Goes to the next key; the cursor must be on one.
    pub fn next(&mut self) -> Result<()> {
        if self.entry().is_none() {
            return Err(Error::new(ErrorKind::Internal, "a cursor was moved past its end"));
        }
        // SAFETY: the iterator is live and valid, as RocksDB asks.
        unsafe { sys::rocksdb_iter_next(self.iterator) };
        self.check()
    }

    /// Key and value at the cursor; `None` past the end.
    pub fn entry(&self) -> Option<(&[u8], &[u8])> {
        let (mut key_bytes, mut value_bytes) = (0, 0);
        // SAFETY: the iterator is live; key and value are read only if it is valid, and stay
        // unchanged until it moves, which needs `&mut`.
        unsafe {
            if sys::rocksdb_iter_valid(self.iterator) == 0 {
                return None;
            }
            let key = sys::rocksdb_iter_key(self.iterator, &mut key_bytes);
            let value = sys::rocksdb_iter_value(self.iterator, &mut value_bytes);
            Some((lent_bytes(key, key_bytes), lent_bytes(value, value_bytes)))
        }
    }

    fn check(&self) -> Result<()> {
        checked("walking the database", |error| {
            // SAFETY: the iterator is live.
            unsafe { sys::rocksdb_iter_get_error(self.iterator, error) }
        })
    }
}

impl Drop for Cursor<'_> {
    fn drop(&mut self) {
        // SAFETY: destroyed once, before the database that it borrows.
        unsafe { sys::rocksdb_iter_destroy(self.iterator) }
    }
}
