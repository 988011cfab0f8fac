//! The store: chunks, chunk maps, the catalog of restore points, and keys, in
//! one repository directory.
//!
//! ```text
//!        RepositoryWriter ── DiskWriter      (one process: the primary)
//!               │
//!  catalog · chunk maps · chunks · dedup     (sealed values)
//!               │
//!            RocksDB                         (`rocks`; unsafe code is there and in `allocator`)
//!               │
//!          Repository ── ChunkedDisk         (any number of processes: secondaries)
//! ```
//!
//! Uses `coldrise-block`; used by sessions, ingest, exports and the command line.
//! docs/on-disk-format.md describes the bytes on disk.
#![deny(unsafe_code)]

mod address;
mod advice;
mod aead;
mod allocator;
mod attribution;
mod cache;
mod catalog;
mod catalog_scan;
mod catch_up;
mod chunk;
mod chunked_disk;
mod claim;
mod clock_guard;
mod compression;
mod damage_list;
mod dedup;
mod descriptors;
mod display_name;
mod documents;
mod durable_commit;
mod file_system;
mod gc;
mod high_water;
mod keys;
mod known_content;
mod lock_holder;
mod log_directory;
mod map;
mod mark_rules;
mod markers;
mod memory;
mod name;
mod parts;
mod passphrase;
mod passphrases;
mod point_name;
mod repair;
mod repair_flag;
mod repository;
mod repository_config;
mod repository_id;
mod retention;
mod rocks;
mod sealed_folder;
mod session_time;
mod state;
mod state_order;
mod stats;
mod verify;
mod writer;
mod writer_lock;

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod tamper_tests;

pub use address::{Address, PointSelector};
pub use advice::advise_room;
pub use aead::random;
pub use allocator::return_free_memory;
pub use attribution::{HeldAmount, Holdings, MachineAttribution};
pub use catalog_scan::{
    CatalogStamp, MachineId, MarkerFiles, ScanEntry, ScannedMachine, ScannedPoint,
};
pub use catch_up::CatchUpThread;
pub use chunk::{MAX_CHUNK_SIZE_BYTES, MIN_CHUNK_SIZE_BYTES};
pub use chunked_disk::{ChunkedDisk, diff};
pub use claim::Claim;
pub use clock_guard::ClockGuard;
pub use compression::Compression;
pub use descriptors::raise_descriptor_limit;
pub use display_name::{DisplayName, MAX_DISPLAY_NAME_CHARS};
pub use documents::{
    COLDRISE_JSON, CatalogDamage, Configuration, DiskDocument, LIBVIRT_XML, LayerId,
    LayerReference, MAX_CAME_BY, MAX_CONFIGURATION_BYTES, MAX_DISKS, MadeIn, OVF, PointDocument,
    PointFiles, PointOrigin, Quarantine, VMX, WayOut,
};
pub use gc::{GcEstimate, GcOptions, GcProgress, GcReport, MaxUnused, Reachable};
pub use lock_holder::lock_holder;
pub use map::MapRoot;
pub use mark_rules::MarkRules;
pub use markers::{BootCheckDocument, BootVerdict, MarkerId, PendingMarker, ReachedStage};
pub use memory::{available_memory_bytes, default_cache_bytes, memory_limit_bytes};
pub use name::{DiskName, KeyLabel, LATEST, MAX_NAME_BYTES, MachineName, SessionName};
pub use parts::{
    FIRMWARE_VARIABLES, MAX_PART_BYTES, MachinePart, RAW, SWTPM_PERMALL, TPM_STATE, check_parts,
};
pub use passphrase::{Passphrase, PassphraseSource};
pub use passphrases::{
    INITIAL_PASSPHRASE, NewPassphrase, PassphraseEntry, PassphraseSelector, add_passphrase,
    passphrases, remove_passphrase, replace_passphrase,
};
pub use point_name::PointName;
pub use repair::{ReopenReport, RepairReport};
pub use repository::{InitOptions, OpenOptions, Repository};
pub use repository_config::lock_repository;
pub use repository_id::RepositoryId;
pub use retention::{KeepReason, Period, RetentionPoint, RetentionRules, RetentionSpan, retained};
pub use sealed_folder::SealedFolder;
pub use session_time::SessionTime;
pub use state_order::{StateTime, order_states};
pub use stats::IndexMemory;
pub use verify::{
    Affected, Coverage, Damaged, RecentDisks, VerifiedDisk, VerifyOptions, VerifyProgress,
};
pub use writer::{
    BackupTarget, DiskTarget, DiskWriter, RepositoryWriter, WriteCounts, WriteOptions,
};

/// The parts of a repository's format, for repositories that do not lie in a directory.
pub mod format {
    pub use crate::aead::document;
    pub use crate::cache::PageCache;
    pub use crate::chunk::{ChunkCodec, ChunkId, EncoderState, is_zero};
    pub use crate::keys::Keys;
    pub use crate::log_directory::LogDirectory;
    pub use crate::map::{
        MapBuilder, Page, PageId, PageSink, PageSource, Place, extents_of, for_each_difference,
        page_value, parse_page_value, slot_of, subtree_chunks,
    };
    pub use crate::passphrase::ReadOnce;
    pub use crate::repository_config::{MAX_FILE_BYTES, RepositoryConfig};
    pub use crate::rocks::{Batch, Database, Family, ReadMode};
    pub use crate::writer::{check_size, end_of_write};
}
