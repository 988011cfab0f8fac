//! RocksDB behind a small safe face: the only `unsafe` code of this crate.
//!
//! It is unsafe because RocksDB is a C++ library with a C interface. What the
//! types here promise to keep:
//!
//! - every object of RocksDB is owned by exactly one Rust value and destroyed
//!   once, after everything that borrows from it ([`Pinned`] and [`Cursor`]
//!   borrow the [`Database`]);
//! - pointers that RocksDB hands out are read only while their owner lives;
//! - strings that RocksDB allocates are freed with `rocksdb_free`.
//!
//! A `Database` may be used from many threads at once, as RocksDB documents.
//! No lock of this crate is taken here.
#![allow(unsafe_code)]

mod batch;
mod blocks;
mod compaction;
mod cursor;
mod fatal;
mod files;
mod import;
mod internal_key;
mod manifest;
mod open;
mod options;
mod salvage;
mod scan;
mod sound;
mod sst;
pub(crate) mod table;

use std::ffi::{c_char, c_int, CStr, CString};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;

use coldrise_block::{Error, ErrorKind, Result};
use librocksdb_sys as sys;

pub(crate) use batch::Batch;
pub(crate) use blocks::BlockBuffers;
use compaction::Filter;
pub(crate) use compaction::Rule;
pub(crate) use cursor::{Cursor, Pinned};
pub(crate) use files::LiveFile;
pub(crate) use import::make_database;
pub(crate) use manifest::{
    check_listed, listed_in, open_as_listed, sound_manifest, synced_manifest, Listed,
};
use options::Options;
pub(crate) use options::{READER_BLOCK_CACHE_BYTES, WRITER_BLOCK_CACHE_BYTES};
pub(crate) use salvage::{read_what_is_left, Entry};
pub(crate) use scan::ChunkFiles;
pub(crate) use sound::{is_sound, table_files};
pub(crate) use sst::SstWriter;

/// A column family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Family {
    /// Counters of the store, in RocksDB's default family.
    State,
    /// Chunk id to chunk.
    Chunks,
    /// Page id to a page of the chunk map.
    Maps,
    /// Documents.
    Catalog,
    /// The same pages as in `Maps`, in files of their own: what damage takes from one the other has.
    MapsCopy,
    /// Keyed hash of a chunk to its id. Only a writer opens it.
    Dedup,
}

/// In the order of `Database::families`; readers leave out the last.
pub(crate) const FAMILIES: [(Family, &CStr); 6] = [
    (Family::State, c"default"),
    (Family::Chunks, c"chunks"),
    (Family::Maps, c"maps"),
    (Family::Catalog, c"catalog"),
    (Family::MapsCopy, c"maps_copy"),
    (Family::Dedup, c"dedup"),
];
const READER_FAMILIES: usize = 5;
/// Of which a gc rewrites files without what nothing refers to.
const FILTERED: [Family; 4] = [Family::Chunks, Family::Maps, Family::MapsCopy, Family::Dedup];

/// How a read treats what it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadMode {
    /// Chunks: they do not push anything out of the block cache. RocksDB's
    /// checksums stay on, though every chunk carries its own tag: the tag says
    /// nothing about the bytes around it, and RocksDB parses those first. With
    /// checksums off, damage to a block's framing ended the process in 227 of
    /// 500 trials (assertions, one segmentation fault). They cost about 1 µs of
    /// the 11 µs that a 16 KiB chunk takes.
    Payload,
    /// All chunks one after the other: as [`ReadMode::Payload`], and read ahead.
    Scan,
    /// Everything else.
    Cached,
    /// Of a walk: only what is in no file yet. Deletions do not show.
    Memory,
}

/// `ReadTier::kMemtableTier`.
const READ_TIER_MEMTABLES: c_int = 3;
/// How far a scan reads ahead, in bytes.
const SCAN_READAHEAD_BYTES: usize = 256 << 10;

/// An open RocksDB.
pub(crate) struct Database {
    path: PathBuf,
    db: *mut sys::rocksdb_t,
    families: Vec<*mut sys::rocksdb_column_family_handle_t>,
    payload_read: *mut sys::rocksdb_readoptions_t,
    scan_read: *mut sys::rocksdb_readoptions_t,
    cached_read: *mut sys::rocksdb_readoptions_t,
    memory_read: *mut sys::rocksdb_readoptions_t,
    /// Options of the families, in their order: also those that files made for
    /// ingestion are written with.
    options: Vec<Options>,
    /// Of a writer, for the families that a gc rewrites. Dropped after the database
    /// is closed, like all fields.
    filters: Vec<(Family, Filter)>,
}

// SAFETY: rocksdb_t and its column family handles may be used from any thread
// at any time; the read options are never changed after they were made; a filter's
// rule is behind a lock.
unsafe impl Send for Database {}
// SAFETY: as above.
unsafe impl Sync for Database {}

/// Runs one call that reports through an error string.
fn checked<T>(what: &str, call: impl FnOnce(*mut *mut c_char) -> T) -> Result<T> {
    let mut error: *mut c_char = ptr::null_mut();
    let value = call(&mut error);
    match take_error(what, error) {
        None => Ok(value),
        Some(error) => Err(error),
    }
}

fn take_error(what: &str, error: *mut c_char) -> Option<Error> {
    if error.is_null() {
        return None;
    }
    // SAFETY: a non-null error is a NUL-terminated string that now is ours.
    let text = unsafe {
        let text = CStr::from_ptr(error).to_string_lossy().into_owned();
        sys::rocksdb_free(error.cast());
        text
    };
    // The C interface carries no code, only this text: the status class in
    // front and, for a full disk, the subcode's fixed words.
    let kind = if text.contains("No space left on device") || text.contains("Disk quota exceeded") {
        ErrorKind::NoSpace
    } else if text.starts_with("Corruption") {
        ErrorKind::Corrupt
    } else {
        ErrorKind::Io
    };
    Some(Error::with_source(kind, what.to_owned(), text))
}

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| {
        Error::new(ErrorKind::InvalidInput, format!("{} holds a NUL byte", path.display()))
    })
}

impl Database {
    fn family(&self, family: Family) -> Result<*mut sys::rocksdb_column_family_handle_t> {
        let position = FAMILIES.iter().position(|(candidate, _)| *candidate == family);
        position
            .and_then(|p| self.families.get(p))
            .copied()
            .ok_or_else(|| Error::new(ErrorKind::ReadOnly, "this family is open only in a writer"))
    }

    fn family_options(&self, family: Family) -> Result<&Options> {
        let position = FAMILIES.iter().position(|(candidate, _)| *candidate == family);
        position
            .and_then(|p| self.options.get(p))
            .ok_or_else(|| Error::new(ErrorKind::ReadOnly, "this family is open only in a writer"))
    }

    fn read_options(&self, mode: ReadMode) -> *const sys::rocksdb_readoptions_t {
        match mode {
            ReadMode::Payload => self.payload_read,
            ReadMode::Scan => self.scan_read,
            ReadMode::Cached => self.cached_read,
            ReadMode::Memory => self.memory_read,
        }
    }

    /// The value of `key`, without a copy where RocksDB can lend it.
    pub(crate) fn get(
        &self,
        family: Family,
        key: &[u8],
        mode: ReadMode,
    ) -> Result<Option<Pinned<'_>>> {
        let handle = self.family(family)?;
        let slice = checked("reading the database", |error| {
            // SAFETY: the database and the handle are live; the key is read
            // within the call.
            unsafe {
                sys::rocksdb_get_pinned_cf(
                    self.db,
                    self.read_options(mode),
                    handle,
                    key.as_ptr().cast(),
                    key.len(),
                    error,
                )
            }
        })?;
        Ok((!slice.is_null()).then_some(Pinned { slice, database: PhantomData }))
    }

    /// Applies a batch whole; with `sync` it is durable on return.
    pub(crate) fn write(&self, batch: Batch<'_>, sync: bool) -> Result<()> {
        self.write_with(batch, sync, true)
    }

    /// The same past the log: durable once its families are flushed.
    pub(crate) fn write_unlogged(&self, batch: Batch<'_>) -> Result<()> {
        self.write_with(batch, false, false)
    }

    fn write_with(&self, batch: Batch<'_>, sync: bool, is_logged: bool) -> Result<()> {
        checked("writing the database", |error| {
            // SAFETY: all objects are live; the write options are destroyed
            // once, after their only use.
            unsafe {
                let options = sys::rocksdb_writeoptions_create();
                sys::rocksdb_writeoptions_set_sync(options, u8::from(sync));
                sys::rocksdb_writeoptions_disable_WAL(options, c_int::from(!is_logged));
                sys::rocksdb_write(self.db, options, batch.batch, error);
                sys::rocksdb_writeoptions_destroy(options);
            }
        })
    }

    /// The sequence number of the last change that it holds. Grows with every change, and
    /// says how far the log and the list of files reach.
    pub(crate) fn sequence(&self) -> u64 {
        // SAFETY: the database is live.
        unsafe { sys::rocksdb_get_latest_sequence_number(self.db) }
    }

    /// The folder it lies in.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// An empty batch.
    pub(crate) fn batch(&self) -> Batch<'_> {
        // SAFETY: no preconditions.
        Batch { batch: unsafe { sys::rocksdb_writebatch_create() }, database: self, bytes: 0 }
    }

    /// A cursor over one family; it sees the family as it is now.
    pub(crate) fn cursor(&self, family: Family, mode: ReadMode) -> Result<Cursor<'_>> {
        let handle = self.family(family)?;
        // SAFETY: the database and the handle are live; the options are copied.
        let iterator =
            unsafe { sys::rocksdb_create_iterator_cf(self.db, self.read_options(mode), handle) };
        Ok(Cursor { iterator, database: PhantomData })
    }

    /// Takes a finished file of chunks over, moving it where possible. Durable
    /// on return.
    pub(crate) fn ingest_chunks(&self, file: &Path) -> Result<()> {
        let file = c_path(file)?;
        let handle = self.family(Family::Chunks)?;
        let files = [file.as_ptr()];
        checked("handing a file over to the database", |error| {
            // SAFETY: one path in an array of one; options destroyed once.
            unsafe {
                let options = sys::rocksdb_ingestexternalfileoptions_create();
                sys::rocksdb_ingestexternalfileoptions_set_move_files(options, 1);
                sys::rocksdb_ingest_external_file_cf(
                    self.db,
                    handle,
                    files.as_ptr(),
                    files.len(),
                    options,
                    error,
                );
                sys::rocksdb_ingestexternalfileoptions_destroy(options);
            }
        })
        // A folder that cannot be synced RocksDB does not name.
        .map_err(|error| error.context(self.path.display().to_string()))
    }

    /// Writes the memtables of every family to files, so that whoever opens
    /// the database next has no log to replay.
    pub(crate) fn flush(&self) -> Result<()> {
        self.families.iter().try_for_each(|handle| self.flush_one(*handle))
    }

    /// Writes what a family has in memory to a file, if there is anything.
    pub(crate) fn flush_family(&self, family: Family) -> Result<()> {
        self.flush_one(self.family(family)?)
    }

    fn flush_one(&self, handle: *mut sys::rocksdb_column_family_handle_t) -> Result<()> {
        checked("flushing the database", |error| {
            // SAFETY: all objects are live; options destroyed once.
            unsafe {
                let options = sys::rocksdb_flushoptions_create();
                sys::rocksdb_flushoptions_set_wait(options, 1);
                sys::rocksdb_flush_cf(self.db, options, handle, error);
                sys::rocksdb_flushoptions_destroy(options);
            }
        })
    }

    /// Drops the files that lie wholly within `from..=to`, at once.
    pub(crate) fn delete_files_in_range(
        &self,
        family: Family,
        from: &[u8],
        to: &[u8],
    ) -> Result<()> {
        let handle = self.family(family)?;
        checked("dropping files of the database", |error| {
            // SAFETY: all objects are live; the keys are read within the call.
            unsafe {
                sys::rocksdb_delete_file_in_range_cf(
                    self.db,
                    handle,
                    from.as_ptr().cast(),
                    from.len(),
                    to.as_ptr().cast(),
                    to.len(),
                    error,
                );
            }
        })
    }

    /// Lets a reader see what the writer has committed since.
    pub(crate) fn catch_up(&self) -> Result<()> {
        checked("catching up with the writer", |error| {
            // SAFETY: the database is live and was opened as a secondary.
            unsafe { sys::rocksdb_try_catch_up_with_primary(self.db, error) }
        })
    }

    /// Bytes in the files of one family.
    pub(crate) fn family_bytes(&self, family: Family) -> Result<u64> {
        self.property(family, c"rocksdb.total-sst-files-size")
    }

    /// Bytes of indexes and filters of one family's files that are held in memory
    /// beside the block cache: an estimate of RocksDB's.
    pub(crate) fn family_index_memory_bytes(&self, family: Family) -> Result<u64> {
        self.property(family, c"rocksdb.estimate-table-readers-mem")
    }

    fn property(&self, family: Family, name: &CStr) -> Result<u64> {
        let handle = self.family(family)?;
        let mut number = 0;
        // SAFETY: all objects are live; `number` is written on success.
        let failed =
            unsafe { sys::rocksdb_property_int_cf(self.db, handle, name.as_ptr(), &mut number) };
        if failed != 0 {
            let message = format!("the database does not know its {}", name.to_string_lossy());
            return Err(Error::new(ErrorKind::Internal, message));
        }
        Ok(number)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // SAFETY: nothing borrows the database any more; handles are destroyed
        // before it is closed, as RocksDB asks.
        unsafe {
            for handle in &self.families {
                sys::rocksdb_column_family_handle_destroy(*handle);
            }
            sys::rocksdb_close(self.db);
            sys::rocksdb_readoptions_destroy(self.payload_read);
            sys::rocksdb_readoptions_destroy(self.scan_read);
            sys::rocksdb_readoptions_destroy(self.cached_read);
            sys::rocksdb_readoptions_destroy(self.memory_read);
        }
    }
}

/// # Safety
/// `bytes` points to `length` bytes that stay unchanged for `'a`, or is null.
unsafe fn lent_bytes<'a>(bytes: *const c_char, length: usize) -> &'a [u8] {
    if bytes.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(bytes.cast(), length) }
}
