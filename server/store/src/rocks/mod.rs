//! RocksDB behind a small safe interface: the only `unsafe` code of this crate.
//!
//! It is unsafe because RocksDB is a C++ library with a C interface. The types here guarantee:
//!
//! - every object of RocksDB is owned by exactly one Rust value and destroyed
//!   once, after everything that borrows from it ([`Pinned`] and [`Cursor`]
//!   borrow the [`Database`]);
//! - pointers that RocksDB hands out are read only while their owner lives;
//! - strings that RocksDB allocates are freed with `rocksdb_free`.
//!
//! A `Database` may be used from many threads at once, as RocksDB documents. The only locks are
//! those of a reader that catches up (`reader.rs`).
#![allow(unsafe_code)]

mod batch;
mod compaction;
mod cursor;
mod files;
mod import;
mod internal_key;
mod log_check;
mod manifest;
mod open;
mod opening_lock;
mod options;
mod other_file;
mod preopen_check;
mod reader;
mod salvage;
mod scan;
mod sound;
mod sst;
mod sst_reader;
pub(crate) mod table;

#[cfg(test)]
mod fuzz_tests;

use std::ffi::{CStr, CString, c_char, c_int};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, OPEN_FILES_ADVICE, Result};

use crate::advice::REPAIR;
use librocksdb_sys as sys;
use parking_lot::RwLock;

use crate::descriptors::open_tables;

pub use batch::Batch;
use compaction::Filter;
pub(crate) use compaction::Rule;
pub(crate) use cursor::{Cursor, Pinned};
pub(crate) use files::LiveFile;
pub(crate) use import::{Above, make_database};
pub(crate) use log_check::usable_logs;
pub(crate) use manifest::{
    Listed, ManifestEnd, check_listed, listed_in, open_as_checked, open_as_listed, sound_manifest,
    synced_manifest,
};
use options::Options;
pub(crate) use options::{READER_BLOCK_CACHE_BYTES, WRITER_BLOCK_CACHE_BYTES};
use reader::Reader;
pub(crate) use salvage::{Entry, read_what_is_left};
pub(crate) use scan::ChunkFiles;
pub(crate) use sound::{is_sound, table_files};
pub(crate) use sst::SstWriter;
pub(crate) use sst_reader::BlockBuffers;

/// A column family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Counters of the store, in RocksDB's default family.
    State,
    /// Chunk id to chunk.
    Chunks,
    /// Page id to a page of the chunk map.
    Maps,
    /// Documents: points, machines and files of points.
    Catalog,
    /// The same pages as in `Maps`, in separate files: a page damaged in one family is read from
    /// the other.
    MapsCopy,
    /// Keyed hash of a chunk to its id. Only a writer opens it.
    Dedup,
}

impl Family {
    /// Its name in the database.
    pub(crate) fn name(self) -> &'static str {
        let named = FAMILIES.iter().find(|(family, _)| *family == self);
        named.and_then(|(_, name)| name.to_str().ok()).unwrap_or_default()
    }
}

/// In the order of `Database::families`; readers omit the last.
pub(crate) const FAMILIES: [(Family, &CStr); 6] = [
    (Family::State, c"default"),
    (Family::Chunks, c"chunks"),
    (Family::Maps, c"maps"),
    (Family::Catalog, c"catalog"),
    (Family::MapsCopy, c"maps_copy"),
    (Family::Dedup, c"dedup"),
];
const READER_FAMILIES: usize = 5;
/// Families whose files a gc rewrites without unreferenced entries.
const FILTERED: [Family; 4] = [Family::Chunks, Family::Maps, Family::MapsCopy, Family::Dedup];

/// How a read uses caches and checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMode {
    /// Chunks: they evict nothing from the block cache. RocksDB's checksums stay on, although every
    /// chunk carries its own tag: the tag does not cover the bytes around it, and RocksDB parses
    /// those first. With checksums off, damage to a block's framing ended the process in 227 of 500
    /// trials (assertions, one segmentation fault). They cost about 1 µs of the 11 µs that a 16 KiB
    /// chunk takes.
    Payload,
    /// All chunks in order: as [`ReadMode::Payload`], with read-ahead.
    Scan,
    /// Everything else.
    Cached,
    /// For a walk over entries that are in no file yet. Deletions do not show.
    Memory,
}

/// `ReadTier::kMemtableTier`.
const READ_TIER_MEMTABLES: c_int = 3;
/// Read-ahead of a scan, in bytes.
const SCAN_READAHEAD_BYTES: usize = 256 << 10;

/// How often a read catches up with a writer that deletes files.
const GET_ATTEMPTS: u32 = 5;

/// RocksDB's database and its families.
struct Opened {
    db: *mut sys::rocksdb_t,
    families: Vec<*mut sys::rocksdb_column_family_handle_t>,
}

// SAFETY: rocksdb_t and its column family handles may be used from any thread at any time.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Opened {
    fn family(&self, family: Family) -> Result<*mut sys::rocksdb_column_family_handle_t> {
        let position = FAMILIES.iter().position(|(candidate, _)| *candidate == family);
        position
            .and_then(|p| self.families.get(p))
            .copied()
            .ok_or_else(|| Error::new(ErrorKind::ReadOnly, "this family is open only in a writer"))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: values and cursors hold the last reference, so nothing borrows the database any
        // more; handles are destroyed before it is closed, as RocksDB asks.
        unsafe {
            for handle in &self.families {
                sys::rocksdb_column_family_handle_destroy(*handle);
            }
            sys::rocksdb_close(self.db);
        }
    }
}

/// An open RocksDB.
pub struct Database {
    path: PathBuf,
    /// `None` in a writer.
    reader: Option<Reader>,
    /// A reader may open the database again, see [`Reader`]; values and cursors keep theirs.
    opened: RwLock<Arc<Opened>>,
    payload_read: *mut sys::rocksdb_readoptions_t,
    scan_read: *mut sys::rocksdb_readoptions_t,
    cached_read: *mut sys::rocksdb_readoptions_t,
    memory_read: *mut sys::rocksdb_readoptions_t,
    /// Options of the families, in their order. Files made for ingestion are written with them too.
    options: Vec<Options>,
    /// A writer's filters, for the families that a gc rewrites. Dropped after the database is
    /// closed, like all fields.
    filters: Vec<(Family, Filter)>,
}

// SAFETY: the read options never change after they were made; a filter's rule is behind a lock.
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
    // SAFETY: a non-null error is a NUL-terminated string that is now ours.
    let text = unsafe {
        let text = CStr::from_ptr(error).to_string_lossy().into_owned();
        sys::rocksdb_free(error.cast());
        text
    };
    // The C interface returns no code, only this text: the status class first, then the operating
    // system's fixed words.
    let (kind, advice) =
        if text.contains("No space left on device") || text.contains("Disk quota exceeded") {
            (ErrorKind::NoSpace, ROOM)
        } else if text.starts_with("Corruption") || text.contains("No such file or directory") {
            (ErrorKind::Corrupt, REPAIR)
        } else if text.contains("Read-only file system") {
            (ErrorKind::ReadOnly, WRITABLE)
        } else if text.contains("Too many open files") {
            (ErrorKind::Io, OPEN_FILES_ADVICE)
        } else {
            (ErrorKind::Io, DRIVE)
        };
    Some(Error::with_source(kind, format!("{what} failed"), text).advise(advice))
}

const ROOM: &str = "make room on the drive and try again";
const WRITABLE: &str = "mount the file system of the repository writable";
const DRIVE: &str = "the system refused it: look at the drive, the permissions and the kernel's log, \
                     and try again; if a file of the database is damaged, run coldrise repair";

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| {
        Error::new(ErrorKind::InvalidInput, format!("{} holds a NUL byte", path.display()))
    })
}

impl Database {
    fn opened(&self) -> Arc<Opened> {
        Arc::clone(&self.opened.read())
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

    /// The value of `key`, without a copy if RocksDB can lend it. A reader that cannot keep all
    /// files open may find that the writer has deleted one; then it catches up and reads again.
    pub fn get(&self, family: Family, key: &[u8], mode: ReadMode) -> Result<Option<Pinned<'_>>> {
        let mut read = self.try_get(family, key, mode);
        if self.reader.is_some() && open_tables().is_some() {
            for _ in 0..GET_ATTEMPTS {
                match read {
                    Err(error) if error.kind() == ErrorKind::Io => self.catch_up()?,
                    read => return read,
                }
                read = self.try_get(family, key, mode);
            }
        }
        read
    }

    fn try_get(&self, family: Family, key: &[u8], mode: ReadMode) -> Result<Option<Pinned<'_>>> {
        let opened = self.opened();
        let handle = opened.family(family)?;
        let slice = checked("reading the database", |error| {
            // SAFETY: the database and the handle are live; the key is read
            // within the call.
            unsafe {
                sys::rocksdb_get_pinned_cf(
                    opened.db,
                    self.read_options(mode),
                    handle,
                    key.as_ptr().cast(),
                    key.len(),
                    error,
                )
            }
        })?;
        Ok((!slice.is_null()).then_some(Pinned { slice, _opened: opened, database: PhantomData }))
    }

    /// Applies a batch atomically; with `sync` it is durable on return.
    pub fn write(&self, batch: Batch<'_>, sync: bool) -> Result<()> {
        self.write_with(batch, sync, true)
    }

    /// [`Database::write`] without the log: durable once its families are flushed.
    pub(crate) fn write_unlogged(&self, batch: Batch<'_>) -> Result<()> {
        self.write_with(batch, false, false)
    }

    fn write_with(&self, batch: Batch<'_>, sync: bool, is_logged: bool) -> Result<()> {
        let opened = self.opened();
        checked("writing the database", |error| {
            // SAFETY: all objects are live; the write options are destroyed
            // once, after their only use.
            unsafe {
                let options = sys::rocksdb_writeoptions_create();
                sys::rocksdb_writeoptions_set_sync(options, u8::from(sync));
                sys::rocksdb_writeoptions_disable_WAL(options, c_int::from(!is_logged));
                sys::rocksdb_write(opened.db, options, batch.batch, error);
                sys::rocksdb_writeoptions_destroy(options);
            }
        })
    }

    /// The sequence number of the database's last change. It grows with every change and shows how
    /// far the log and the manifest reach.
    pub(crate) fn sequence(&self) -> u64 {
        // SAFETY: the database is live.
        unsafe { sys::rocksdb_get_latest_sequence_number(self.opened().db) }
    }

    /// The folder of the database.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// An empty batch.
    pub fn batch(&self) -> Batch<'_> {
        // SAFETY: no preconditions.
        Batch { batch: unsafe { sys::rocksdb_writebatch_create() }, database: self, bytes: 0 }
    }

    /// A cursor over one family; it sees the family as it is now.
    pub fn cursor(&self, family: Family, mode: ReadMode) -> Result<Cursor<'_>> {
        let opened = self.opened();
        let handle = opened.family(family)?;
        // SAFETY: the database and the handle are live; the options are copied.
        let iterator =
            unsafe { sys::rocksdb_create_iterator_cf(opened.db, self.read_options(mode), handle) };
        Ok(Cursor { iterator, _opened: opened, database: PhantomData })
    }

    /// Ingests a finished file of chunks, moving it if possible. Durable on return.
    pub(crate) fn ingest_chunks(&self, file: &Path) -> Result<()> {
        let file = c_path(file)?;
        let opened = self.opened();
        let handle = opened.family(Family::Chunks)?;
        let files = [file.as_ptr()];
        checked("handing a file over to the database", |error| {
            // SAFETY: one path in an array of one; options destroyed once.
            unsafe {
                let options = sys::rocksdb_ingestexternalfileoptions_create();
                sys::rocksdb_ingestexternalfileoptions_set_move_files(options, 1);
                sys::rocksdb_ingest_external_file_cf(
                    opened.db,
                    handle,
                    files.as_ptr(),
                    files.len(),
                    options,
                    error,
                );
                sys::rocksdb_ingestexternalfileoptions_destroy(options);
            }
        })
        // RocksDB does not name a folder that cannot be synced.
        .map_err(|error| error.context(self.path.display().to_string()))
    }

    /// Flushes the memtables of every family to files, so that the next open has no log to replay.
    pub(crate) fn flush(&self) -> Result<()> {
        let opened = self.opened();
        opened.families.iter().try_for_each(|handle| flush(&opened, *handle))
    }

    /// Flushes a family's memtable to a file, unless it is empty.
    pub(crate) fn flush_family(&self, family: Family) -> Result<()> {
        let opened = self.opened();
        flush(&opened, opened.family(family)?)
    }

    /// Drops the files that lie entirely within `from..=to`, immediately.
    pub(crate) fn delete_files_in_range(
        &self,
        family: Family,
        from: &[u8],
        to: &[u8],
    ) -> Result<()> {
        let opened = self.opened();
        let handle = opened.family(family)?;
        checked("dropping files of the database", |error| {
            // SAFETY: all objects are live; the keys are read within the call.
            unsafe {
                sys::rocksdb_delete_file_in_range_cf(
                    opened.db,
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

    /// Bytes in the files of one family.
    pub(crate) fn family_bytes(&self, family: Family) -> Result<u64> {
        self.property(family, c"rocksdb.total-sst-files-size")
    }

    /// RocksDB's estimate of the bytes of one family's indexes and filters that are in memory
    /// outside the block cache.
    pub(crate) fn family_index_memory_bytes(&self, family: Family) -> Result<u64> {
        self.property(family, c"rocksdb.estimate-table-readers-mem")
    }

    /// Bytes that are in no file yet, for all families together.
    pub(crate) fn unflushed_bytes(&self) -> Result<u64> {
        let name = c"rocksdb.cur-size-all-mem-tables";
        let open = FAMILIES.iter().take(self.options.len());
        open.map(|(family, _)| self.property(*family, name)).sum()
    }

    /// The entries of a family that are in no file yet: in the memory table that takes writes, and
    /// in those that are being flushed.
    pub(crate) fn unflushed_entries(&self, family: Family) -> Result<[u64; 2]> {
        Ok([
            self.property(family, c"rocksdb.num-entries-active-mem-table")?,
            self.property(family, c"rocksdb.num-entries-imm-mem-tables")?,
        ])
    }

    fn property(&self, family: Family, name: &CStr) -> Result<u64> {
        let opened = self.opened();
        let handle = opened.family(family)?;
        let mut number = 0;
        // SAFETY: all objects are live; `number` is written on success.
        let failed =
            unsafe { sys::rocksdb_property_int_cf(opened.db, handle, name.as_ptr(), &mut number) };
        if failed != 0 {
            let message = format!("the database does not know its {}", name.to_string_lossy());
            return Err(Error::new(ErrorKind::Internal, message));
        }
        Ok(number)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // SAFETY: nothing borrows the database any more; each is destroyed once.
        unsafe {
            sys::rocksdb_readoptions_destroy(self.payload_read);
            sys::rocksdb_readoptions_destroy(self.scan_read);
            sys::rocksdb_readoptions_destroy(self.cached_read);
            sys::rocksdb_readoptions_destroy(self.memory_read);
        }
    }
}

fn flush(opened: &Opened, handle: *mut sys::rocksdb_column_family_handle_t) -> Result<()> {
    checked("flushing the database", |error| {
        // SAFETY: all objects are live; options destroyed once.
        unsafe {
            let options = sys::rocksdb_flushoptions_create();
            sys::rocksdb_flushoptions_set_wait(options, 1);
            sys::rocksdb_flush_cf(opened.db, options, handle, error);
            sys::rocksdb_flushoptions_destroy(options);
        }
    })
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
