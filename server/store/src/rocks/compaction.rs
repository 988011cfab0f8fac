//! Compactions that leave entries out: how dead entries go without a deletion being
//! written for each of them.
//!
//! RocksDB asks a filter about every entry that a compaction copies. Ours says what
//! the [`Rule`] of the gc under way says, and keeps everything while there is none.
//! RocksDB's own compactions, on its own threads, ask it too: a rule has to be right
//! for every entry of the family.

use std::ffi::{c_char, c_int, c_uchar, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use librocksdb_sys as sys;
use parking_lot::RwLock;

use super::{lent_bytes, Database, Family};

/// Whether an entry goes: its key and its value.
pub(crate) type Rule = Arc<dyn Fn(&[u8], &[u8]) -> bool + Send + Sync>;

/// The filter of one family.
pub(super) struct Filter {
    filter: *mut sys::rocksdb_compactionfilter_t,
    rule: Arc<RwLock<Option<Rule>>>,
}

/// `BottommostLevelCompaction::kForce`: files of the last level are copied, too.
const FORCE_BOTTOMMOST: c_uchar = 2;

impl Filter {
    pub(super) fn new() -> Filter {
        let rule: Arc<RwLock<Option<Rule>>> = Arc::default();
        let state = Arc::into_raw(Arc::clone(&rule));
        // SAFETY: `state` is what the three functions take it for; it is given back
        // once, by `drop_state`.
        let filter = unsafe {
            sys::rocksdb_compactionfilter_create(
                state.cast_mut().cast(),
                Some(drop_state),
                Some(is_dropped),
                Some(name),
            )
        };
        Filter { filter, rule }
    }

    pub(super) fn as_ptr(&self) -> *mut sys::rocksdb_compactionfilter_t {
        self.filter
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once, after the database was closed.
        unsafe { sys::rocksdb_compactionfilter_destroy(self.filter) }
    }
}

type Shared = RwLock<Option<Rule>>;

/// # Safety
/// `state` came from `Arc::into_raw` in [`Filter::new`], and is not used afterwards.
unsafe extern "C" fn drop_state(state: *mut c_void) {
    // SAFETY: as the caller promises.
    drop(unsafe { Arc::from_raw(state.cast_const().cast::<Shared>()) });
}

/// # Safety
/// RocksDB only hands the pointer on.
unsafe extern "C" fn name(_state: *mut c_void) -> *const c_char {
    c"coldrise gc".as_ptr()
}

/// # Safety
/// `state` is live; `key` and `value` point to as many bytes as is said, which stay
/// unchanged meanwhile.
unsafe extern "C" fn is_dropped(
    state: *mut c_void,
    _level: c_int,
    key: *const c_char,
    key_bytes: usize,
    value: *const c_char,
    value_bytes: usize,
    _new_value: *mut *mut c_char,
    _new_value_bytes: *mut usize,
    _is_changed: *mut c_uchar,
) -> c_uchar {
    // SAFETY: as the caller promises.
    let (shared, key, value) = unsafe {
        let shared = &*state.cast_const().cast::<Shared>();
        (shared, lent_bytes(key, key_bytes), lent_bytes(value, value_bytes))
    };
    // A panic must not cross into RocksDB; an entry too many does no harm.
    let goes = catch_unwind(AssertUnwindSafe(|| {
        shared.read().as_ref().is_some_and(|rule| rule(key, value))
    }));
    c_uchar::from(goes.unwrap_or(false))
}

/// While it lives, what its rule lets go is left out of every compaction.
pub(crate) struct Filtering<'db> {
    filter: &'db Filter,
}

impl Drop for Filtering<'_> {
    fn drop(&mut self) {
        *self.filter.rule.write() = None;
    }
}

impl Database {
    /// Sets the rule of a family. One at a time.
    pub(crate) fn filter(&self, family: Family, rule: Rule) -> Result<Filtering<'_>> {
        let found = self.filters.iter().find(|(filtered, _)| *filtered == family);
        let Some((_, filter)) = found else {
            return Err(Error::new(ErrorKind::ReadOnly, "a reader filters nothing"));
        };
        *filter.rule.write() = Some(rule);
        Ok(Filtering { filter })
    }

    /// Rewrites the files of a family that hold keys from `from` to `to`, both
    /// included: without what its rule lets go, without deleted entries and
    /// deletions. Durable on return. Without bounds all files are rewritten. Other
    /// files may be rewritten from other threads at the same time.
    ///
    /// # Errors
    /// `NoSpace`, `Corrupt` or `Io` where RocksDB gave up: it may take no more writes
    /// then until it is opened again. What it was rewriting is as it was.
    pub(crate) fn compact(&self, family: Family, bounds: Option<(&[u8], &[u8])>) -> Result<()> {
        let handle = self.family(family)?;
        let failed_before = self.background_errors()?;
        let pointers = |key: Option<&[u8]>| match key {
            Some(key) => (key.as_ptr().cast(), key.len()),
            None => (ptr::null(), 0),
        };
        let (from, from_bytes) = pointers(bounds.map(|(from, _)| from));
        let (to, to_bytes) = pointers(bounds.map(|(_, to)| to));
        // SAFETY: all objects are live; the keys are read within the call, null
        // stands for no bound; the options are destroyed once.
        unsafe {
            let options = sys::rocksdb_compactoptions_create();
            sys::rocksdb_compactoptions_set_bottommost_level_compaction(options, FORCE_BOTTOMMOST);
            sys::rocksdb_compactoptions_set_exclusive_manual_compaction(options, 0);
            sys::rocksdb_compact_range_cf_opt(
                self.db, handle, options, from, from_bytes, to, to_bytes,
            );
            sys::rocksdb_compactoptions_destroy(options);
        }
        match self.background_errors()? > failed_before {
            false => Ok(()),
            true => Err(self.why_compacting_failed()),
        }
    }

    /// The C interface does not tell how a compaction ended. Where RocksDB takes no
    /// more writes because of it, the next write tells.
    fn why_compacting_failed(&self) -> Error {
        let what = format!(
            "{}: rewriting files failed, and nothing that is in use is lost; make room on the \
             disk if it is full, else run coldrise verify",
            self.path.display()
        );
        match self.write(self.batch(), false) {
            Err(error) => error.context(what),
            Ok(()) => Error::new(ErrorKind::Io, what),
        }
    }

    /// Failures of flushes and compactions since the database was opened.
    fn background_errors(&self) -> Result<u64> {
        self.property(Family::State, c"rocksdb.background-errors")
    }
}
