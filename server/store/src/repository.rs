//! An open repository: what every reader shares.
//!
//! ```text
//! Repository ──▶ Database (a secondary for readers, the primary for a writer)
//!     │  └─────▶ Keys
//!     ├────────▶ decoded pages of chunk maps (bounded)
//!     └────────▶ decoded chunks (bounded, may be off)
//! ```
//!
//! No lock is held while the store is read; the caches lock a shard for the
//! time of a look-up.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use zeroize::Zeroizing;

use crate::cache::{ChunkCache, PageCache};
use crate::chunk::{ChunkCodec, ChunkId};
use crate::chunked_disk::ChunkedDisk;
use crate::description::{
    database_path, lock_repository, parts, sync_directory, Description, FILE_NAME, LOCK_NAME,
    PARTS, TEMPORARY_NAME,
};
use crate::file_system::refuse_shared;
use crate::high_water::HighWater;
use crate::keys::{Key, Keys};
use crate::log_directory::LogDirectory;
use crate::map::{parse_page_value, MapRoot, Page, PageId, PageSource};
use crate::memory::default_cache_bytes;
use crate::passphrase::ReadOnce;
use crate::rocks::{Database, Family, Pinned, ReadMode};
use crate::seal::document;
use crate::writer::advise_repair;
use crate::writer::WriterLock;
use crate::{Compression, Passphrase, PassphraseSource, RepositoryId};

/// Decoded pages of chunk maps that are kept, in bytes.
pub(crate) const PAGE_CACHE_BYTES: u64 = 16 << 20;

/// What a new repository is to be.
#[derive(Debug)]
pub struct InitOptions<'a> {
    /// A power of two from [`crate::MIN_CHUNK_SIZE_BYTES`] to
    /// [`crate::MAX_CHUNK_SIZE_BYTES`].
    pub chunk_size_bytes: u32,
    /// How chunks are compressed.
    pub compression: Compression,
    /// What encrypts it; `None` makes a repository without encryption.
    pub passphrase: Option<&'a Passphrase>,
}

/// How a repository is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// Decoded chunks that are kept in memory, in bytes at most; 0 keeps none.
    pub cache_bytes: u64,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { cache_bytes: default_cache_bytes() }
    }
}

/// An open repository, for reading.
pub struct Repository {
    path: PathBuf,
    description: Description,
    keys: Keys,
    codec: ChunkCodec,
    pages: PageCache,
    chunks: Option<ChunkCache>,
    // Dropped in this order: the database, then what belongs to it.
    database: Database,
    access: Access,
}

/// When the passphrase is known to be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyCheck {
    /// Beside opening the database: it takes some 25 ms and the database a few.
    Beside,
    /// Before: opening the database changes it, and needs them.
    First,
}

/// What holding the database open takes.
pub(crate) struct Access {
    /// Held by the one writer; `None` in a reader, which has to catch up.
    pub(crate) writer_lock: Option<WriterLock>,
    /// The directory for RocksDB's own log.
    pub(crate) _log: LogDirectory,
    /// Of a writer: how far the database has come.
    pub(crate) high_water: HighWater,
}

impl Repository {
    /// Makes a repository in `path`, a directory that is absent, empty, or
    /// holds what an `init` that was killed left behind.
    ///
    /// # Errors
    /// `AlreadyExists` where there is a repository or anything foreign, `Busy` where another
    /// process is about to make one, for too long, `Unsupported` on a file system that
    /// several hosts can mount,
    /// `InvalidInput` for a chunk size or compression that is not possible.
    pub fn init(path: &Path, options: &InitOptions<'_>) -> Result<()> {
        Self::init_with_guess_time(path, options, None)
    }

    /// The same, with a choice of how long a guess at the passphrase, and with it every
    /// opening of the repository, shall take on this machine. Without one about 25 ms.
    ///
    /// # Errors
    /// As of [`Repository::init`].
    pub fn init_with_guess_time(
        path: &Path,
        options: &InitOptions<'_>,
        guess_time: Option<Duration>,
    ) -> Result<()> {
        // Where it is going to be made: what is there of the way to it tells the type.
        let absolute = std::path::absolute(path).context(|| path.display().to_string())?;
        let there = absolute.ancestors().find(|place| place.exists());
        there.map(refuse_shared).transpose()?;
        let description = Description::create(
            options.chunk_size_bytes,
            options.compression,
            options.passphrase,
            guess_time,
        )?;
        make_directory(path)?;
        // Another init would take what this one has made for what a killed one left.
        half_made(path)?;
        let _lock = lock_repository(path, "another process makes it into a repository")?;
        for (part, is_dir) in half_made(path)? {
            let removed = match is_dir {
                true => std::fs::remove_dir_all(&part),
                false => std::fs::remove_file(&part),
            };
            removed.context(|| format!("removing the half-made {}", part.display()))?;
        }
        for part in parts(path) {
            make_directory(&part)?;
        }
        let log = LogDirectory::create()?;
        drop(Database::open_primary(&database_path(path), log.path(), true)?);
        sync_directory(path)?;
        description.write_synced(path)
    }

    /// Whether there is a repository in `path`, of a format that can be opened.
    ///
    /// # Errors
    /// `NoRepository`, `Unsupported` for another format version, `Corrupt` for damage.
    pub fn check(path: &Path) -> Result<()> {
        Description::read(path).map(|_| ())
    }

    /// Opens a repository for reading, beside a writer where there is one.
    ///
    /// # Errors
    /// `NoRepository`, `WrongPassphrase`, `Unsupported` for another format
    /// version, `Corrupt` for damage.
    pub fn open(
        path: &Path,
        passphrase: &PassphraseSource,
        options: &OpenOptions,
    ) -> Result<Arc<Repository>> {
        let passphrase = ReadOnce::new(passphrase);
        Self::open_with(path, &passphrase, options, KeyCheck::Beside, |_, _| {
            let directory = LogDirectory::create()?;
            let database = Database::open_secondary(&database_path(path), directory.path())
                .map_err(advise_repair)?;
            let high_water = HighWater::default();
            Ok((database, Access { writer_lock: None, _log: directory, high_water }))
        })
        .map(Arc::new)
    }

    pub(crate) fn open_with(
        path: &Path,
        passphrase: &ReadOnce<'_>,
        options: &OpenOptions,
        check: KeyCheck,
        open_database: impl FnOnce(&Description, Option<&Keys>) -> Result<(Database, Access)>,
    ) -> Result<Repository> {
        let description = Description::read(path)?;
        let passphrase = passphrase.get()?;
        let derive = || {
            let master = description.master(passphrase);
            master.context(|| path.display().to_string())
        };
        let new_keys = |master: &Key| Keys::new(master, description.is_encrypted());
        let (keys, opened) = match check {
            KeyCheck::First => {
                let keys = new_keys(&*derive()?)?;
                let opened = open_database(&description, Some(&keys));
                (keys, opened)
            }
            KeyCheck::Beside => std::thread::scope(|scope| {
                let master = scope.spawn(derive);
                let opened = open_database(&description, None);
                let panicked = || Error::new(ErrorKind::Internal, "deriving the key panicked");
                let master = master.join().unwrap_or_else(|_| Err(panicked()))?;
                Ok::<_, Error>((new_keys(&master)?, opened))
            })?,
        };
        let (database, access) = opened?;
        make_missing_parts(path);
        let codec =
            ChunkCodec::new(description.id, description.compression, description.chunk_size_bytes);
        Ok(Repository {
            path: path.to_owned(),
            keys,
            codec,
            pages: PageCache::new(PAGE_CACHE_BYTES),
            chunks: ChunkCache::new(options.cache_bytes, description.chunk_size_bytes),
            description,
            database,
            access,
        })
    }

    /// Lets a reader see what the writer has committed since; a writer always
    /// sees everything.
    ///
    /// # Errors
    /// What the operating system says of the files.
    pub fn catch_up(&self) -> Result<()> {
        match self.access.writer_lock {
            None => self.database.catch_up(),
            Some(_) => Ok(()),
        }
    }

    /// Where the repository lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The random id that tells this repository from every other.
    pub fn id(&self) -> &RepositoryId {
        &self.description.id
    }

    /// The size of every chunk, in bytes.
    pub fn chunk_size_bytes(&self) -> u32 {
        self.description.chunk_size_bytes
    }

    /// How chunks are compressed.
    pub fn compression(&self) -> Compression {
        self.description.compression
    }

    /// Whether a passphrase protects the repository.
    pub fn is_encrypted(&self) -> bool {
        self.description.is_encrypted()
    }

    /// Where sessions lie.
    pub fn live_dir(&self) -> PathBuf {
        self.path.join("live")
    }

    /// Where layers lie.
    pub fn layers_dir(&self) -> PathBuf {
        self.path.join("layers")
    }

    /// Where running front ends say what they serve.
    pub fn leases_dir(&self) -> PathBuf {
        self.path.join("leases")
    }

    /// A key for another part of Coldrise, derived from the master key, from
    /// what it is for and from what it belongs to. In a repository without
    /// encryption everybody can derive it: then it guards against accidents
    /// only.
    pub fn derive_key(&self, purpose: &str, material: &[u8]) -> Zeroizing<Key> {
        self.keys.export(purpose, material)
    }

    /// Seals a document: version (1), nonce (12), ciphertext, tag (16). It
    /// opens only in this repository and for the same purpose.
    ///
    /// # Errors
    /// `InvalidInput` over 16 MiB.
    pub fn seal_document(&self, purpose: &str, plaintext: &[u8]) -> Result<Vec<u8>> {
        document::seal(&self.keys.documents, &self.description.id.0, purpose, plaintext)
    }

    /// Opens what [`Repository::seal_document`] has sealed.
    ///
    /// # Errors
    /// `Corrupt` where it was changed, truncated, or sealed for another
    /// purpose or repository.
    pub fn open_document(&self, purpose: &str, bytes: &[u8]) -> Result<Vec<u8>> {
        tracing::trace!(purpose, "opening a document");
        document::open(&self.keys.documents, &self.description.id.0, purpose, bytes)
    }

    /// The disk of a chunk map, read-only. Costs nothing.
    pub fn disk(self: &Arc<Self>, root: MapRoot, size_bytes: u64) -> ChunkedDisk {
        ChunkedDisk::new(self.clone(), root, size_bytes)
    }

    pub(crate) fn high_water(&self) -> &HighWater {
        &self.access.high_water
    }

    pub(crate) fn keys(&self) -> &Keys {
        &self.keys
    }

    pub(crate) fn codec(&self) -> &ChunkCodec {
        &self.codec
    }

    pub(crate) fn database(&self) -> &Database {
        &self.database
    }

    pub(crate) fn chunk_cache(&self) -> Option<&ChunkCache> {
        self.chunks.as_ref()
    }

    /// Looks a value up, and once more after catching up where it is missing:
    /// its point may be newer than what this reader has seen.
    pub(crate) fn get_caught_up(
        &self,
        family: Family,
        key: &[u8],
        mode: ReadMode,
    ) -> Result<Option<Pinned<'_>>> {
        match self.database.get(family, key, mode)? {
            Some(value) => Ok(Some(value)),
            None => {
                self.catch_up()?;
                self.database.get(family, key, mode)
            }
        }
    }

    /// Decodes a chunk into `chunk`, which has the chunk size. One that is damaged is
    /// looked at once more, after catching up: it may have been healed.
    pub(crate) fn read_chunk(&self, id: ChunkId, chunk: &mut [u8]) -> Result<()> {
        match self.try_read_chunk(id, chunk) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.catch_up()?;
                self.try_read_chunk(id, chunk)
            }
            read => read,
        }
    }

    fn try_read_chunk(&self, id: ChunkId, chunk: &mut [u8]) -> Result<()> {
        let value = self
            .get_caught_up(Family::Chunks, &id.to_be_bytes(), ReadMode::Payload)
            .map_err(|error| error.context(format_args!("chunk {id}; {ADVICE}")))?
            .ok_or_else(|| missing_chunk(id))?;
        self.codec.decode(&self.keys.chunks, id, &value, chunk)
    }
}

/// What to do about a damaged chunk.
const ADVICE: &str = "run coldrise verify to see what it affects";

pub(crate) fn missing_chunk(id: ChunkId) -> Error {
    Error::new(ErrorKind::Corrupt, format!("chunk {id} is missing; {ADVICE}"))
}

impl Repository {
    /// A page, if it is kept decoded.
    pub(crate) fn decoded_page(&self, id: PageId, level: u8) -> Option<Page> {
        self.pages.get(id, level)
    }
}

impl Repository {
    fn stored_page(&self, family: Family, id: PageId, level: u8) -> Result<Vec<u64>> {
        let value =
            self.get_caught_up(family, &id.to_be_bytes(), ReadMode::Cached)?.ok_or_else(|| {
                let message = format!(
                    "page {id} of a chunk map is missing; run coldrise verify to see what it \
                     affects"
                );
                Error::new(ErrorKind::Corrupt, message)
            })?;
        parse_page_value(&self.description.id, &self.keys.pages, id, level, &value)
    }
}

impl PageSource for Repository {
    fn page(&self, id: PageId, level: u8) -> Result<Page> {
        if let Some(page) = self.pages.get(id, level) {
            return Ok(page);
        }
        let slots = match self.stored_page(Family::Maps, id, level) {
            // What damage takes from one the other has.
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
                self.stored_page(Family::MapsCopy, id, level).map_err(|_| error)?
            }
            read => read?,
        };
        let page: Page = slots.into();
        self.pages.insert(id, level, page.clone());
        Ok(page)
    }
}

/// Whoever copies a repository may leave empty directories out. What has to be in them and is
/// missing verify tells.
fn make_missing_parts(path: &Path) {
    for part in parts(path) {
        // Anything else that is wrong with it shows when it is used.
        if matches!(part.try_exists(), Ok(false)) {
            match make_directory(&part) {
                Ok(()) => tracing::warn!(path = %part.display(), "a directory was missing"),
                // Nobody writes there then, and who reads says so.
                Err(error) => tracing::debug!(%error, "a directory is missing"),
            }
        }
    }
}

fn make_directory(path: &Path) -> Result<()> {
    let made = std::fs::DirBuilder::new().mode(0o700).create(path);
    match made {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        made => made.context(|| format!("making the directory {}", path.display())),
    }
}

/// What a killed `init` left, and whether that is a directory. Anything else is refused.
fn half_made(path: &Path) -> Result<Vec<(PathBuf, bool)>> {
    let taken = |what: &str| {
        Err(Error::new(
            ErrorKind::AlreadyExists,
            format!("{} {what}: give an empty or new directory", path.display()),
        ))
    };
    let reading = || format!("reading {}", path.display());
    if path.join(FILE_NAME).symlink_metadata().is_ok() {
        return taken("already holds a repository");
    }
    let mut half_made = Vec::new();
    for entry in std::fs::read_dir(path).context(reading)? {
        let entry = entry.context(reading)?;
        let name = entry.file_name();
        let is_part = PARTS.iter().any(|part| name == **part);
        let kind = entry.file_type().context(reading)?;
        if name == LOCK_NAME && kind.is_file() {
            continue;
        }
        if !(is_part && kind.is_dir() || name == TEMPORARY_NAME && kind.is_file()) {
            return taken("holds other files");
        }
        half_made.push((entry.path(), kind.is_dir()));
    }
    for (part, _) in half_made.iter().filter(|(_, is_dir)| *is_dir) {
        if !part.ends_with("db") {
            let mut entries = std::fs::read_dir(part).context(reading)?;
            if entries.next().is_some() {
                return taken("holds other files");
            }
        } else if !looks_like_new_database(part)? {
            return taken("holds other files");
        }
    }
    Ok(half_made)
}

/// True where a directory holds nothing but what RocksDB puts into an empty
/// database.
fn looks_like_new_database(path: &Path) -> Result<bool> {
    let reading = || format!("reading {}", path.display());
    for entry in std::fs::read_dir(path).context(reading)? {
        let name = entry.context(reading)?.file_name();
        let name = name.to_string_lossy();
        let known = ["CURRENT", "IDENTITY", "LOCK", "LOG"].contains(&name.as_ref())
            || ["MANIFEST-", "OPTIONS-", "LOG.old."].iter().any(|p| name.starts_with(p))
            || name.ends_with(".dbtmp")
            || name.ends_with(".log");
        if !known {
            return Ok(false);
        }
    }
    Ok(true)
}
