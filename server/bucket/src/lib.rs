//! A repository in an object store, where copies of points lie without a server of ours.
//!
//! ```text
//!   repository.json        parameters and wrapped keys, as in a directory; repository.copy.json is the same
//!   packs/NUMBER           chunks and pages of maps
//!   points/MACHINE/TIME    a point's document
//!   files/MACHINE/TIME     the files that it carries, if any
//!   traces/MACHINE         what it reads first at a boot
//!   busy/…                 who writes, compacts or makes the repository
//! ```
//!
//! Chunks, pages, maps and documents have the form that they have in a directory; docs/on-disk-format.md describes packs. There is no
//! database: everything is found from the points. A writer keeps an index of the contents that are there, which is a cache.
//!
//! # Invariants
//!
//! 1. A point's document is put last: all that it leads to is in the bucket then.
//! 2. The content of a value's number never changes. A compaction removes values that no point leads to, never others.
//! 3. A compaction and a writer never run at the same time ([`busy`]).
//! 4. Names of machines, points, disks and contents are not readable without the passphrase. Sizes, times and the number of points are.
#![forbid(unsafe_code)]

mod busy;
mod compact;
mod disk;
mod in_parallel;
mod index;
mod keys;
mod pack;
mod pack_reader;
mod points;
mod probe;
mod uploads;
mod verify;
mod walk;
mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_objects::Objects;
use parking_lot::Mutex;

use self::busy::{Busy, Role};
use self::keys::BucketKeys;
use self::pack_reader::PackReader;
use coldrise_store::MapRoot;
use coldrise_store::format::ReadOnce;
use coldrise_store::format::{MAX_FILE_BYTES, RepositoryConfig};
use coldrise_store::{Compression, DiskDocument, InitOptions, PassphraseSource, RepositoryId};

pub use self::compact::CompactReport;
pub use self::disk::BucketDisk;
pub use self::verify::{BucketCheck, BucketVerifyReport};
pub use self::writer::BucketWriter;

const CONFIG: &str = "repository.json";
/// The same once more: nothing opens without it.
const CONFIG_COPY: &str = "repository.copy.json";

/// A repository in a bucket.
pub struct BucketRepository {
    reader: Arc<PackReader>,
    /// The one of the two objects with its parameters that is missing or damaged.
    lost_configuration: Option<&'static str>,
    /// Documents of points that could not be read, and why.
    damaged: Mutex<BTreeMap<String, String>>,
}

impl BucketRepository {
    /// Makes a repository in a bucket that has none.
    ///
    /// Not all stores can put an object only if it is not there. So of several that begin at once at most one gets beyond
    /// [`Busy::begin`], and it looks for a repository after that.
    ///
    /// # Errors
    /// `AlreadyExists` if there is one, or packs without one; `Busy` if another init runs; `Unsupported` for a store that cannot be
    /// used; `InvalidInput` for an impossible chunk size or compression; errors of reaching the store.
    pub fn init(
        objects: &Arc<dyn Objects>,
        options: &InitOptions<'_>,
        guess_time: Option<Duration>,
    ) -> Result<()> {
        let there = |what: &str| {
            let text = format!("{}: {what} is there already", objects.place());
            Error::new(ErrorKind::AlreadyExists, text).advise("choose another bucket or prefix")
        };
        if !objects.list(pack::FOLDER)?.is_empty() || !objects.list(points::FOLDER)?.is_empty() {
            return Err(there("a repository, or the remains of one,"));
        }
        let config = RepositoryConfig::create(
            options.chunk_size_bytes,
            options.compression,
            options.passphrase,
            guess_time,
        )?;
        let busy = Busy::begin(objects, Role::Founder)?;
        probe::probe(&**objects, busy::FOLDER, &busy.name_of_probe())?;
        match configuration(&**objects) {
            Ok(_) => return Err(there("a repository")),
            Err(error) if error.kind() == ErrorKind::NoRepository => {}
            Err(error) => return Err(error.context(objects.place())),
        }
        busy.check()?;
        objects.put(CONFIG, config.to_text()?)?;
        objects.put(CONFIG_COPY, config.to_text()?)?;
        match configuration(&**objects)?.0.id == config.id {
            true => Ok(()),
            false => Err(there("another repository")),
        }
    }

    /// Opens the repository in a bucket.
    ///
    /// # Errors
    /// `NoRepository`; `WrongPassphrase`; `Unsupported` for another format version; `Corrupt` for damage; errors of reaching the
    /// store.
    pub fn open(
        objects: Arc<dyn Objects>,
        passphrase: &PassphraseSource,
    ) -> Result<Arc<BucketRepository>> {
        let passphrase = ReadOnce::new(passphrase);
        let opened = configuration(&*objects)
            .and_then(|(config, lost)| Ok((BucketKeys::new(config, passphrase.get()?)?, lost)));
        let (keys, lost_configuration) = opened.map_err(|error| error.context(objects.place()))?;
        if let Some(name) = lost_configuration {
            tracing::warn!(
                "{}: {name} is damaged or missing; the other copy is used",
                objects.place()
            );
        }
        let reader = Arc::new(PackReader::new(objects, keys));
        Ok(Arc::new(BucketRepository { reader, lost_configuration, damaged: Mutex::default() }))
    }

    /// The repository's id.
    pub fn id(&self) -> &RepositoryId {
        self.reader.keys.id()
    }

    /// The size of every chunk, in bytes.
    pub fn chunk_size_bytes(&self) -> u32 {
        self.reader.keys.config.chunk_size_bytes
    }

    /// How chunks are compressed.
    pub fn compression(&self) -> Compression {
        self.reader.keys.config.compression
    }

    /// Whether a passphrase opens it.
    pub fn is_encrypted(&self) -> bool {
        self.reader.keys.config.is_encrypted()
    }

    /// Where it is: `s3://bucket/prefix`.
    pub fn place(&self) -> &str {
        self.reader.objects.place()
    }

    /// A disk of one of its points.
    pub fn disk(&self, disk: &DiskDocument) -> BucketDisk {
        self.disk_of(disk.root, disk.size_bytes)
    }

    fn disk_of(&self, root: MapRoot, size_bytes: u64) -> BucketDisk {
        BucketDisk::new(Arc::clone(&self.reader), root, size_bytes)
    }
}

/// The parameters and wrapped keys of the repository in a bucket, from one of their two objects; the name of the other one, if it is
/// missing or damaged.
fn configuration(objects: &dyn Objects) -> Result<(RepositoryConfig, Option<&'static str>)> {
    let read =
        |name| objects.get(name, MAX_FILE_BYTES).and_then(|text| RepositoryConfig::parse(&text));
    let is_lost = |error: &Error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt);
    let failed = match (read(CONFIG), read(CONFIG_COPY)) {
        (Ok(first), Ok(copy)) if first.id != copy.id => {
            let text = format!("{CONFIG} and {CONFIG_COPY} belong to different repositories");
            return Err(Error::new(ErrorKind::Corrupt, text).advise("put the right one back"));
        }
        (Ok(first), copy) => {
            return match copy {
                Ok(_) => Ok((first, None)),
                Err(error) if is_lost(&error) => Ok((first, Some(CONFIG_COPY))),
                Err(error) => Err(error),
            };
        }
        (Err(error), _) if !is_lost(&error) => return Err(error),
        (Err(_), Ok(copy)) => return Ok((copy, Some(CONFIG))),
        (Err(_), Err(error)) if !is_lost(&error) => return Err(error),
        (Err(error), Err(_)) => error,
    };
    if failed.kind() == ErrorKind::NotFound && objects.list(pack::FOLDER)?.is_empty() {
        let text =
            "there is no repository: is the prefix right? Only for a new one: coldrise bucket init";
        return Err(Error::new(ErrorKind::NoRepository, text));
    }
    let text = format!("{CONFIG} and {CONFIG_COPY} are damaged or missing: put a copy of one back");
    Err(Error::new(ErrorKind::Corrupt, text))
}

#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod tests;
