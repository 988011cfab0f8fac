//! The layout of each column family on disk, with reasons.

use std::ffi::{CStr, c_char, c_int};

use librocksdb_sys as sys;

use super::compaction::Filter;
use super::{Family, checked};
use crate::descriptors::open_tables;

/// Size of one memtable before it is flushed, in bytes of memory.
const WRITE_BUFFER_BYTES: usize = 16 << 20;
/// Large files keep their number small, and with it the time to open them all, at tens of TB.
const CHUNK_FILE_BYTES: u64 = 256 << 20;
const INDEX_FILE_BYTES: u64 = 64 << 20;
/// Memory for blocks of map pages, of the dedup index and of the catalog, in bytes.
pub(crate) const READER_BLOCK_CACHE_BYTES: usize = 8 << 20;
pub(crate) const WRITER_BLOCK_CACHE_BYTES: usize = 64 << 20;
/// Limit of RocksDB's info log, in bytes.
const INFO_LOG_BYTES: usize = 256 << 10;
const INFO_LOG_FILES: usize = 2;
/// A log line that meets a full disk would end the process; the log is removed with the process
/// anyway.
const INFO_LOG_LEVEL_FATAL: c_int = 4;
const NO_COMPRESSION: c_int = 0;
const CHECKSUM_XXH3: c_char = 4;
const BLOOM_BITS_PER_KEY: f64 = 10.0;
/// Files are synced in steps of this many bytes while they grow, so that the final sync is short.
const BYTES_PER_SYNC: u64 = 8 << 20;
/// By default a compaction reads block by block.
const COMPACTION_READAHEAD_BYTES: usize = 2 << 20;

/// RocksDB would reserve 18 MiB of the drive for its log, 4 MiB for its manifest, and a whole
/// file's length for each file that a compaction writes, however little is written. On a nearly
/// full drive, ext4 allocates the rest, reports that it is too little, and keeps it allocated: then
/// a small backup finds no space, and no gc can free any. The option has no function of its own in
/// the C interface.
///
/// A file is opened only if its unique id is the one in the manifest. A different or older file in
/// its place is an error.
///
/// Closing the database flushes nothing: the log keeps the content of the memtables. A flush would
/// delete the log before readers have seen it. A secondary of RocksDB 7.8 reads its memory first,
/// so an entry there would hide the newer one in the file.
const NO_RESERVATIONS: &CStr =
    c"allow_fallocate=false;verify_sst_unique_id_in_manifest=true;avoid_flush_during_shutdown=true";
/// [`NO_RESERVATIONS`], and opening leaves the log as it is, instead of using the same space again
/// in files before the log's space is free.
const FULL_DRIVE: &CStr =
    c"allow_fallocate=false;verify_sst_unique_id_in_manifest=true;avoid_flush_during_recovery=true;avoid_flush_during_shutdown=true";
/// `WALRecoveryMode::kSkipAnyCorruptedRecords`.
const SKIP_DAMAGED_RECORDS: c_int = 3;

/// Memory for blocks, shared by all families of a database.
pub(super) struct BlockCache(*mut sys::rocksdb_cache_t);

impl BlockCache {
    pub(super) fn new(writer: bool) -> BlockCache {
        let bytes = if writer { WRITER_BLOCK_CACHE_BYTES } else { READER_BLOCK_CACHE_BYTES };
        // SAFETY: no preconditions.
        BlockCache(unsafe { sys::rocksdb_cache_create_lru(bytes) })
    }
}

impl Drop for BlockCache {
    fn drop(&mut self) {
        // SAFETY: destroyed once; options that use it count their own
        // references.
        unsafe { sys::rocksdb_cache_destroy(self.0) }
    }
}

/// Options of the database or of one family.
pub(super) struct Options(*mut sys::rocksdb_options_t);

impl Options {
    pub(super) fn as_ptr(&self) -> *const sys::rocksdb_options_t {
        self.0
    }

    /// Options of the database as a whole.
    pub(super) fn database(create: bool) -> Options {
        Options::database_with(create, NO_RESERVATIONS)
    }

    /// Options for opening on a drive without space.
    pub(super) fn on_full_drive() -> Options {
        Options::database_with(false, FULL_DRIVE)
    }

    fn database_with(create: bool, settings: &CStr) -> Options {
        let options = Options::parsed(settings);
        let raw = options.0;
        // SAFETY: `raw` is a live options object; the calls only set fields.
        unsafe {
            sys::rocksdb_options_set_create_if_missing(raw, u8::from(create));
            sys::rocksdb_options_set_create_missing_column_families(raw, u8::from(create));
            // With all files open a secondary still reads those that the primary has deleted. If
            // the limit is too low for that, see `Database::get`.
            let files = open_tables().and_then(|files| c_int::try_from(files).ok()).unwrap_or(-1);
            sys::rocksdb_options_set_max_open_files(raw, files);
            // By default, every open and catch-up starts 16 threads for this.
            sys::rocksdb_options_set_max_file_opening_threads(raw, 2);
            sys::rocksdb_options_set_skip_stats_update_on_db_open(raw, 1);
            sys::rocksdb_options_set_stats_dump_period_sec(raw, 0);
            sys::rocksdb_options_set_stats_persist_period_sec(raw, 0);
            sys::rocksdb_options_set_info_log_level(raw, INFO_LOG_LEVEL_FATAL);
            sys::rocksdb_options_set_max_log_file_size(raw, INFO_LOG_BYTES);
            sys::rocksdb_options_set_keep_log_file_num(raw, INFO_LOG_FILES);
            sys::rocksdb_options_set_bytes_per_sync(raw, BYTES_PER_SYNC);
            // One flush and three compactions at once: a gc has two.
            sys::rocksdb_options_set_max_background_jobs(raw, 4);
            sys::rocksdb_options_compaction_readahead_size(raw, COMPACTION_READAHEAD_BYTES);
        }
        options
    }

    /// Options for listing the files of a database: no file has to exist.
    pub(super) fn listing() -> Options {
        let options = Options::database(false);
        // SAFETY: a live options object; the calls only set fields.
        unsafe {
            sys::rocksdb_options_set_paranoid_checks(options.0, 0);
            sys::rocksdb_options_set_max_open_files(options.0, 16);
        }
        options
    }

    /// Skips damaged records of the log, but keeps the records after them.
    pub(super) fn with_what_is_left_of_the_log(self) -> Options {
        // SAFETY: a live options object; the call only sets a field.
        unsafe { sys::rocksdb_options_set_wal_recovery_mode(self.0, SKIP_DAMAGED_RECORDS) };
        self
    }

    /// Puts RocksDB's own log into `directory`.
    pub(super) fn with_log_directory(self, directory: &CStr) -> Options {
        // SAFETY: the options are live; RocksDB copies the path.
        unsafe { sys::rocksdb_options_set_db_log_dir(self.0, directory.as_ptr()) };
        self
    }

    /// Options of one family. The filter must live as long as they are used.
    pub(super) fn family(family: Family, cache: &BlockCache, filter: Option<&Filter>) -> Options {
        let options = Options::new();
        let raw = options.0;
        let file_bytes = match family {
            Family::Chunks => CHUNK_FILE_BYTES,
            _ => INDEX_FILE_BYTES,
        };
        // SAFETY: `raw` and `table` are live objects; the factory copies the
        // table options, so `table` is destroyed here; it counts a reference to
        // the live cache and owns the filter policy.
        unsafe {
            // Values are compressed, then encrypted, by this crate.
            sys::rocksdb_options_set_compression(raw, NO_COMPRESSION);
            sys::rocksdb_options_set_write_buffer_size(raw, WRITE_BUFFER_BYTES);
            sys::rocksdb_options_set_target_file_size_base(raw, file_bytes);
            sys::rocksdb_options_set_max_bytes_for_level_base(raw, 4 * file_bytes);
            sys::rocksdb_options_set_level_compaction_dynamic_level_bytes(raw, 1);
            if let Some(filter) = filter {
                sys::rocksdb_options_set_compaction_filter(raw, filter.as_ptr());
            }

            let table = sys::rocksdb_block_based_options_create();
            sys::rocksdb_block_based_options_set_format_version(table, 5);
            sys::rocksdb_block_based_options_set_checksum(table, CHECKSUM_XXH3);
            match family {
                Family::Chunks => {
                    // A block closes as soon as it holds this many bytes: one chunk.
                    sys::rocksdb_block_based_options_set_block_size(table, 2048);
                    sys::rocksdb_block_based_options_set_block_restart_interval(table, 1);
                    // Only the top of the index is held in memory; its partitions are read on
                    // demand. A flat index would make a read 3 µs faster and take 27 MB of every
                    // reader's memory per million chunks. (Reads by mmap would be 1 to 2 µs faster,
                    // but a read error of the drive would end the process.)
                    sys::rocksdb_block_based_options_set_index_type(
                        table,
                        sys::rocksdb_block_based_table_index_type_two_level_index_search as c_int,
                    );
                    sys::rocksdb_block_based_options_set_metadata_block_size(table, 4096);
                }
                Family::Dedup => {
                    sys::rocksdb_block_based_options_set_block_size(table, 4096);
                    let filter = sys::rocksdb_filterpolicy_create_bloom_full(BLOOM_BITS_PER_KEY);
                    sys::rocksdb_block_based_options_set_filter_policy(table, filter);
                }
                Family::Maps | Family::MapsCopy | Family::Catalog | Family::State => {
                    sys::rocksdb_block_based_options_set_block_size(table, 16 << 10);
                }
            }
            sys::rocksdb_block_based_options_set_block_cache(table, cache.0);
            sys::rocksdb_options_set_block_based_table_factory(raw, table);
            sys::rocksdb_block_based_options_destroy(table);
        }
        options
    }

    fn parsed(settings: &CStr) -> Options {
        let (base, options) = (Options::new(), Options::new());
        let set = checked("setting an option of the database", |error| {
            // SAFETY: both are live options objects, and the text is NUL-terminated.
            unsafe {
                sys::rocksdb_get_options_from_string(base.0, settings.as_ptr(), options.0, error);
            }
        });
        // A RocksDB without this option takes more space than it needs; nothing else changes.
        if let Err(error) = set {
            tracing::warn!(%error, "the database reserves space that it may not need");
        }
        options
    }

    /// Turns off RocksDB's own compactions of a family.
    pub(super) fn without_compactions(self) -> Options {
        // SAFETY: a live options object; the call only sets a field.
        unsafe { sys::rocksdb_options_set_disable_auto_compactions(self.0, 1) };
        self
    }

    fn new() -> Options {
        // SAFETY: no preconditions; RocksDB aborts rather than return null.
        Options(unsafe { sys::rocksdb_options_create() })
    }
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; databases keep copies.
        unsafe { sys::rocksdb_options_destroy(self.0) }
    }
}
