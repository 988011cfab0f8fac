//! Compactions that leave entries out. This removes dead entries without writing a deletion for
//! each.
//!
//! RocksDB calls a filter for every entry that a compaction copies. Our filter applies the [`Rule`]
//! of the running gc, and keeps everything if there is none. RocksDB's own compactions, on its own
//! threads, call it too, so a rule must be right for every entry of the family.

use std::ffi::{c_char, c_int, c_uchar, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use librocksdb_sys as sys;
use parking_lot::RwLock;

use super::{Database, Family, lent_bytes};

/// Whether an entry is dropped, by its key and its value.
pub(crate) type Rule = Arc<dyn Fn(&[u8], &[u8]) -> bool + Send + Sync>;

/// The filter of one family.
pub(super) struct Filter {
    filter: *mut sys::rocksdb_compactionfilter_t,
    rule: Arc<RwLock<Option<Rule>>>,
}

/// `BottommostLevelCompaction::kForce`: files of the last level are copied too.
const FORCE_BOTTOMMOST: c_uchar = 2;

impl Filter {
    pub(super) fn new() -> Filter {
        let rule: Arc<RwLock<Option<Rule>>> = Arc::default();
        let state = Arc::into_raw(Arc::clone(&rule));
        // SAFETY: `state` has the type that the three functions expect; `drop_state` frees it once.
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
/// `state` is live; `key` and `value` point to as many bytes as their lengths say, which do not
/// change during the call.
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
    // A panic must not cross into RocksDB. Keeping one entry too many does no harm.
    let goes = catch_unwind(AssertUnwindSafe(|| {
        shared.read().as_ref().is_some_and(|rule| rule(key, value))
    }));
    c_uchar::from(goes.unwrap_or(false))
}

/// As long as it lives, every compaction leaves out the entries that its rule drops.
pub(crate) struct Filtering<'db> {
    filter: &'db Filter,
}

impl Drop for Filtering<'_> {
    fn drop(&mut self) {
        *self.filter.rule.write() = None;
    }
}

impl Database {
    /// Sets the rule of a family. Only one rule at a time.
    pub(crate) fn filter(&self, family: Family, rule: Rule) -> Result<Filtering<'_>> {
        let found = self.filters.iter().find(|(filtered, _)| *filtered == family);
        let Some((_, filter)) = found else {
            return Err(Error::new(ErrorKind::ReadOnly, "a reader filters nothing"));
        };
        *filter.rule.write() = Some(rule);
        Ok(Filtering { filter })
    }

    /// Rewrites the files of a family that hold keys from `from` to `to`, both included, without
    /// entries that its rule drops, deleted entries and deletions. Durable on return. Without
    /// bounds all files are rewritten. Other threads may rewrite other files at the same time.
    ///
    /// # Errors
    /// `NoSpace`, `Corrupt` or `Io` if RocksDB gave up: it may refuse writes until it is opened
    /// again. The files that it was rewriting are unchanged.
    pub(crate) fn compact(&self, family: Family, bounds: Option<(&[u8], &[u8])>) -> Result<()> {
        let opened = self.opened();
        let handle = opened.family(family)?;
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
                opened.db, handle, options, from, from_bytes, to, to_bytes,
            );
            sys::rocksdb_compactoptions_destroy(options);
        }
        if self.background_errors()? > failed_before {
            Err(self.why_compacting_failed())
        } else {
            Ok(())
        }
    }

    /// The C interface does not report how a compaction ended. If RocksDB refuses writes because of
    /// it, the next write reports that.
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
