//! Opening the database.

use std::ffi::c_char;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use coldrise_block::{ErrorKind, Result};
use librocksdb_sys as sys;
use parking_lot::RwLock;

use super::compaction::Filter;
use super::manifest::manifest;
use super::opening_lock::lock_for_opening;
use super::options::{BlockCache, Options};
use super::other_file::{name_other_file, refuse_other_files};
use super::preopen_check::refuse_fatal;
use super::{
    Database, FAMILIES, FILTERED, Family, Opened, READ_TIER_MEMTABLES, READER_FAMILIES,
    SCAN_READAHEAD_BYTES, c_path, checked,
};

/// The purpose of opening a database.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Writer,
    Repair,
    Reader,
}

impl Database {
    /// Opens the database for writing; `create` makes a missing one.
    pub fn open_primary(path: &Path, log_directory: &Path, create: bool) -> Result<Database> {
        refuse_fatal(path)?;
        Self::open_writable(path, log_directory, create, Role::Writer)
    }

    /// [`Database::open_primary`] for a database that was checked immediately before.
    pub(crate) fn open_looked_at(path: &Path, log_directory: &Path) -> Result<Database> {
        Self::open_writable(path, log_directory, false, Role::Writer)
    }

    /// Opens the database for a repair. RocksDB compacts no files of chunks, because readers may
    /// hold others, and takes all readable records of a damaged log.
    pub(crate) fn open_for_repair(path: &Path, log_directory: &Path) -> Result<Database> {
        refuse_fatal(path)?;
        Self::open_writable(path, log_directory, false, Role::Repair)
    }

    fn open_writable(
        path: &Path,
        log_directory: &Path,
        create: bool,
        role: Role,
    ) -> Result<Database> {
        let open = |options| Self::open_writable_with(path, log_directory, role, options);
        let mut options = Options::database(create);
        if role == Role::Repair {
            options = options.with_what_is_left_of_the_log();
        }
        match open(options) {
            // So that a gc can free some.
            Err(error) if error.kind() == ErrorKind::NoSpace && !create => {
                open(Options::on_full_drive())
            }
            opened => opened.map_err(|error| name_other_file(path, log_directory, error)),
        }
    }

    fn open_writable_with(
        path: &Path,
        log_directory: &Path,
        role: Role,
        options: Options,
    ) -> Result<Database> {
        let (c_path, c_log) = (c_path(path)?, c_path(log_directory)?);
        let database = options.with_log_directory(&c_log);
        let _lock = lock_for_opening(path);
        Self::open_with(path, role, |names, options, handles| {
            checked("opening the database", |error| {
                // SAFETY: the arrays have `names.len()` entries each and live
                // through the call; `handles` is written before a success.
                unsafe {
                    sys::rocksdb_open_column_families(
                        database.as_ptr(),
                        c_path.as_ptr(),
                        names.len() as i32,
                        names.as_ptr(),
                        options.as_ptr(),
                        handles.as_mut_ptr(),
                        error,
                    )
                }
            })
        })
    }

    /// See [`Database::open_secondary`]. The result cannot catch up.
    pub(super) fn open_secondary_once(path: &Path, own_directory: &Path) -> Result<Database> {
        refuse_fatal(path)?;
        manifest(path)?;
        let (c_path, c_own) = (c_path(path)?, c_path(own_directory)?);
        let database = Options::database(false);
        let opened = Self::open_with(path, Role::Reader, |names, options, handles| {
            checked("opening the database beside its writer", |error| {
                // SAFETY: as in `open_writable`.
                unsafe {
                    sys::rocksdb_open_as_secondary_column_families(
                        database.as_ptr(),
                        c_path.as_ptr(),
                        c_own.as_ptr(),
                        names.len() as i32,
                        names.as_ptr(),
                        options.as_ptr(),
                        handles.as_mut_ptr(),
                        error,
                    )
                }
            })
        });
        opened.map_err(|error| name_other_file(path, own_directory, error))
    }

    /// Opens the database only to list the files of all families, beside a writer and even if files
    /// are missing.
    pub(super) fn open_listing(path: &Path, log_directory: &Path) -> Result<Database> {
        Self::open_read_only(path, log_directory, Options::listing())
    }

    /// [`Database::open_listing`] that also opens every listed file and checks that it is the
    /// listed one.
    pub(super) fn open_checked(path: &Path, log_directory: &Path) -> Result<Database> {
        let opened = Self::open_read_only(path, log_directory, Options::database(false));
        opened
            .and_then(|database| refuse_other_files(&database).map(|()| database))
            .map_err(|error| name_other_file(path, log_directory, error))
    }

    fn open_read_only(path: &Path, log_directory: &Path, options: Options) -> Result<Database> {
        refuse_fatal(path)?;
        let (c_path, c_log) = (c_path(path)?, c_path(log_directory)?);
        let database = options.with_log_directory(&c_log);
        Self::open_with(path, Role::Writer, |names, options, handles| {
            checked("reading the list of the database's files", |error| {
                // SAFETY: as in `open_writable`.
                unsafe {
                    sys::rocksdb_open_for_read_only_column_families(
                        database.as_ptr(),
                        c_path.as_ptr(),
                        names.len() as i32,
                        names.as_ptr(),
                        options.as_ptr(),
                        handles.as_mut_ptr(),
                        0,
                        error,
                    )
                }
            })
        })
    }

    fn open_with(
        path: &Path,
        role: Role,
        open: impl FnOnce(
            &[*const c_char],
            &[*const sys::rocksdb_options_t],
            &mut [*mut sys::rocksdb_column_family_handle_t],
        ) -> Result<*mut sys::rocksdb_t>,
    ) -> Result<Database> {
        let writer = role != Role::Reader;
        let count = if writer { FAMILIES.len() } else { READER_FAMILIES };
        let names: Vec<*const c_char> =
            FAMILIES.iter().take(count).map(|(_, name)| name.as_ptr()).collect();
        let cache = BlockCache::new(writer);
        let filters: Vec<(Family, Filter)> = if writer {
            FILTERED.iter().map(|family| (*family, Filter::new())).collect()
        } else {
            Vec::new()
        };
        let filter_of = |family| {
            filters.iter().find(|(filtered, _)| *filtered == family).map(|(_, filter)| filter)
        };
        let owned: Vec<Options> = FAMILIES
            .iter()
            .take(count)
            .map(|(family, _)| match (role, *family) {
                // Only this family: without compactions, rebuilding a large index is slow.
                (Role::Repair, Family::Chunks) => {
                    Options::family(*family, &cache, filter_of(*family)).without_compactions()
                }
                _ => Options::family(*family, &cache, filter_of(*family)),
            })
            .collect();
        let options: Vec<_> = owned.iter().map(Options::as_ptr).collect();
        let mut families = vec![ptr::null_mut(); count];
        let db = open(&names, &options, &mut families)
            .map_err(|error| error.context(path.display().to_string()))?;
        // SAFETY: no preconditions; the objects are owned by the database.
        let (payload_read, scan_read, cached_read, memory_read) = unsafe {
            let payload = sys::rocksdb_readoptions_create();
            sys::rocksdb_readoptions_set_fill_cache(payload, 0);
            let scan = sys::rocksdb_readoptions_create();
            sys::rocksdb_readoptions_set_fill_cache(scan, 0);
            sys::rocksdb_readoptions_set_readahead_size(scan, SCAN_READAHEAD_BYTES);
            let cached = sys::rocksdb_readoptions_create();
            // The database has none. If RocksDB 7.8 looks for them, it ends a walk at a damaged
            // file as if nothing followed, and reports no error.
            let memory = sys::rocksdb_readoptions_create();
            sys::rocksdb_readoptions_set_read_tier(memory, READ_TIER_MEMTABLES);
            for options in [payload, scan, cached, memory] {
                sys::rocksdb_readoptions_set_ignore_range_deletions(options, 1);
            }
            (payload, scan, cached, memory)
        };
        Ok(Database {
            path: path.to_owned(),
            reader: None,
            opened: RwLock::new(Arc::new(Opened { db, families })),
            payload_read,
            scan_read,
            cached_read,
            memory_read,
            options: owned,
            filters,
        })
    }
}
