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
//! Uses `coldrise-block`; used by sessions, ingest, exports and the command
//! line. The bytes on disk are described in docs/on-disk-format.md.
#![deny(unsafe_code)]

mod address;
mod allocator;
mod attribution;
mod cache;
mod catalog;
mod chunk;
mod chunked_disk;
mod compression;
mod damaged;
mod dedup;
mod description;
mod descriptors;
mod documents;
mod file_system;
mod hex;
mod high_water;
mod horizon;
mod keep_up;
mod keys;
mod log_directory;
mod machine_claim;
mod map;
mod markers;
mod memory;
mod name;
mod passphrase;
mod passphrases;
mod point_name;
mod reclaim;
mod repair;
mod repository;
mod retention;
mod rocks;
mod seal;
mod state;
mod stats;
mod verify;
mod writer;

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod tamper_tests;

pub use address::{Address, PointSelector, MAX_LATEST};
pub use attribution::{Holdings, MachineAttribution, PointAttribution, Share};
pub use chunked_disk::{diff, ChunkedDisk};
pub use compression::Compression;
pub use description::{lock_repository, RepositoryId, MAX_CHUNK_SIZE_BYTES, MIN_CHUNK_SIZE_BYTES};
pub use descriptors::raise_descriptor_limit;
pub use documents::{
    Configuration, DiskDocument, LayerId, LayerReference, PointDocument, PointFiles, PointOrigin,
    Quarantine, MAX_CONFIGURATION_BYTES, MAX_DISKS, MAX_LAYERS,
};
pub use horizon::Horizon;
pub use keep_up::KeepUp;
pub use machine_claim::MachineClaim;
pub use map::MapRoot;
pub use markers::PendingMarker;
pub use memory::default_cache_bytes;
pub use name::{DiskName, KeyLabel, MachineName, SessionName, MAX_NAME_BYTES};
pub use passphrase::{Passphrase, PassphraseSource, MAX_PASSPHRASE_BYTES};
pub use passphrases::{
    add_passphrase, passphrases, remove_passphrase, replace_passphrase, NewPassphrase,
    PassphraseEntry, PassphraseSelector, INITIAL_PASSPHRASE,
};
pub use point_name::PointName;
pub use reclaim::{MaxUnused, Reachable, ReclaimOptions, ReclaimProgress, Reclaimable, Reclaimed};
pub use repair::{Reopened, RepairReport};
pub use repository::{InitOptions, OpenOptions, Repository};
pub use retention::{retained, KeepReason, Period, RetentionPoint, RetentionRules, RetentionSpan};
pub use seal::random;
pub use stats::{IndexMemory, StoreStats, StoredChunks};
pub use verify::{
    Affected, CatalogDamage, Coverage, Damaged, RecentDisks, VerifiedDisk, VerifyOptions,
    VerifyProgress, VerifyReport,
};
pub use writer::{
    BackupTarget, DiskTarget, DiskWriter, RepositoryWriter, WriteCounts, WriteOptions,
};
