//! An open repository: the state that all readers share.
//!
//! ```text
//! Repository ──▶ Database (a secondary for readers, the primary for a writer)
//!     │  └─────▶ Keys
//!     ├────────▶ decoded pages of chunk maps (bounded)
//!     └────────▶ decoded chunks (bounded, may be off)
//! ```
//!
//! No lock is held while the store is read. The caches lock one shard during a look-up.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result, sync_directory};
use zeroize::Zeroizing;

use crate::advice::{VERIFY, advise_repair};
use crate::aead::Key;
use crate::aead::document;
use crate::cache::{ChunkCache, PageCache};
use crate::chunk::{ChunkCodec, ChunkId};
use crate::file_system::refuse_shared;
use crate::high_water::HighWater;
use crate::keys::Keys;
use crate::log_directory::LogDirectory;
use crate::map::{Page, PageId, PageSource, parse_page_value};
use crate::memory::default_cache_bytes;
use crate::passphrase::ReadOnce;
use crate::repository_config::{
    FILE_NAME, LEASES_NAME, LOCK_NAME, PARTS, RepositoryConfig, TEMPORARY_NAME, database_path,
    lock_repository, parts,
};
use crate::rocks::{Database, Family, Pinned, ReadMode};
use crate::writer_lock::WriterLock;
use crate::{Compression, Passphrase, PassphraseSource, RepositoryId};

/// Size of the cache of decoded chunk-map pages, in bytes.
pub(crate) const PAGE_CACHE_BYTES: u64 = 16 << 20;

/// Options of a new repository.
#[derive(Debug)]
pub struct InitOptions<'a> {
    /// A power of two from [`crate::MIN_CHUNK_SIZE_BYTES`] to
    /// [`crate::MAX_CHUNK_SIZE_BYTES`].
    pub chunk_size_bytes: u32,
    /// How chunks are compressed.
    pub compression: Compression,
    /// The passphrase that encrypts the repository; `None` makes an unencrypted one.
    pub passphrase: Option<&'a Passphrase>,
}

/// Options for opening a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// Size of the cache of decoded chunks, in bytes at most; 0 caches none.
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
    config: RepositoryConfig,
    keys: Keys,
    codec: ChunkCodec,
    pages: PageCache,
    chunks: Option<ChunkCache>,
    // Fields are dropped in this order: the database before the things it needs.
    database: Database,
    access: Access,
}

/// When the passphrase is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyCheck {
    /// While the database opens: the check takes about 25 ms and the database a few.
    Beside,
    /// Before: opening the database changes it and needs the keys.
    First,
}

/// Resources held while the database is open.
pub(crate) struct Access {
    /// Held by the one writer; `None` in a reader, which has to catch up.
    pub(crate) writer_lock: Option<WriterLock>,
    /// The directory for RocksDB's own log.
    pub(crate) _log: LogDirectory,
    /// In a writer: the high-water mark of the database.
    pub(crate) high_water: HighWater,
}

impl Repository {
    /// Makes a repository in `path`, a directory that is absent, is empty, or holds the remains of
    /// a killed `init`.
    ///
    /// # Errors
    /// `AlreadyExists` if there is a repository or any foreign file; `Busy` if another process is
    /// making a repository there and does not finish in time; `Unsupported` on a file system that
    /// several hosts can mount; `InvalidInput` for an impossible chunk size or compression.
    pub fn init(path: &Path, options: &InitOptions<'_>) -> Result<()> {
        Self::init_with_guess_time(path, options, None)
    }

    /// [`Repository::init`] with a chosen time that one guess at the passphrase takes on this
    /// machine. Each opening of the repository takes the same time. The default is about 25 ms.
    ///
    /// # Errors
    /// As [`Repository::init`].
    pub fn init_with_guess_time(
        path: &Path,
        options: &InitOptions<'_>,
        guess_time: Option<Duration>,
    ) -> Result<()> {
        // The existing part of the path determines the file system's type.
        let absolute = std::path::absolute(path).context(|| path.display().to_string())?;
        let there = absolute.ancestors().find(|place| place.exists());
        there.map(refuse_shared).transpose()?;
        let config = RepositoryConfig::create(
            options.chunk_size_bytes,
            options.compression,
            options.passphrase,
            guess_time,
        )?;
        make_directory(path)?;
        // Another init would take these files for the remains of a killed one.
        half_made(path)?;
        let _lock = lock_repository(path, "another process makes it into a repository")?;
        for (part, is_dir) in half_made(path)? {
            let removed =
                if is_dir { std::fs::remove_dir_all(&part) } else { std::fs::remove_file(&part) };
            removed.context(|| format!("removing the half-made {}", part.display()))?;
        }
        for part in parts(path) {
            make_directory(&part)?;
        }
        let log = LogDirectory::create()?;
        drop(Database::open_primary(&database_path(path), log.path(), true)?);
        sync_directory(path)?;
        config.write_synced(path)
    }

    /// Checks that `path` holds a repository of a supported format.
    ///
    /// # Errors
    /// `NoRepository`; `Unsupported` for another format version; `Corrupt` for damage.
    pub fn check(path: &Path) -> Result<()> {
        RepositoryConfig::read(path).map(|_| ())
    }

    /// The id of the repository in `path`, without opening it.
    ///
    /// # Errors
    /// As [`Repository::check`].
    pub fn id_of(path: &Path) -> Result<RepositoryId> {
        RepositoryConfig::read(path).map(|config| config.id)
    }

    /// Opens a repository for reading, also beside a writer.
    ///
    /// # Errors
    /// `NoRepository`; `WrongPassphrase`; `Unsupported` for another format version; `Corrupt` for
    /// damage.
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
        open_database: impl FnOnce(&RepositoryConfig, Option<&Keys>) -> Result<(Database, Access)>,
    ) -> Result<Repository> {
        let config = RepositoryConfig::read(path)?;
        let passphrase = passphrase.get()?;
        let derive = || {
            let master = config.master(passphrase);
            master.context(|| path.display().to_string())
        };
        let new_keys = |master: &Key| Keys::new(master, config.is_encrypted());
        let (keys, opened) = match check {
            KeyCheck::First => {
                let keys = new_keys(&*derive()?)?;
                let opened = open_database(&config, Some(&keys));
                (keys, opened)
            }
            KeyCheck::Beside => std::thread::scope(|scope| {
                let master = scope.spawn(derive);
                let opened = open_database(&config, None);
                let panicked = || Error::new(ErrorKind::Internal, "deriving the key panicked");
                let master = master.join().unwrap_or_else(|_| Err(panicked()))?;
                Ok::<_, Error>((new_keys(&master)?, opened))
            })?,
        };
        let (database, access) = opened?;
        make_missing_parts(path);
        let codec = ChunkCodec::new(config.id, config.compression, config.chunk_size_bytes);
        Ok(Repository {
            path: path.to_owned(),
            keys,
            codec,
            pages: PageCache::new(PAGE_CACHE_BYTES),
            chunks: ChunkCache::new(options.cache_bytes, config.chunk_size_bytes),
            config,
            database,
            access,
        })
    }

    /// Lets a reader see the commits that the writer has made since. A writer always sees
    /// everything.
    ///
    /// # Errors
    /// Errors of the operating system on the files.
    pub fn catch_up(&self) -> Result<()> {
        match self.access.writer_lock {
            None => self.database.catch_up(),
            Some(_) => Ok(()),
        }
    }

    /// The directory of the repository.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The random id that distinguishes this repository from all others.
    pub fn id(&self) -> &RepositoryId {
        &self.config.id
    }

    /// The size of every chunk, in bytes.
    pub fn chunk_size_bytes(&self) -> u32 {
        self.config.chunk_size_bytes
    }

    /// How chunks are compressed.
    pub fn compression(&self) -> Compression {
        self.config.compression
    }

    /// Whether a passphrase protects the repository.
    pub fn is_encrypted(&self) -> bool {
        self.config.is_encrypted()
    }

    /// The directory of sessions.
    pub fn live_dir(&self) -> PathBuf {
        self.path.join("live")
    }

    /// The directory of layers.
    pub fn layers_dir(&self) -> PathBuf {
        self.path.join("layers")
    }

    /// The directory of boot traces.
    pub fn traces_dir(&self) -> PathBuf {
        self.path.join("traces")
    }

    /// The directory in which running front ends record what they serve.
    pub fn leases_dir(&self) -> PathBuf {
        self.path.join(LEASES_NAME)
    }

    /// Derives a key for another part of Coldrise from the master key, a purpose and the thing it
    /// belongs to. In an unencrypted repository any reader can derive it; there it protects only
    /// against accidents.
    pub fn derive_key(&self, purpose: &str, material: &[u8]) -> Zeroizing<Key> {
        self.keys.export(purpose, material)
    }

    /// Seals a document: version (1), nonce (12), ciphertext, tag (16). It opens only in this
    /// repository and for the same purpose.
    ///
    /// # Errors
    /// `InvalidInput` over 16 MiB.
    pub fn encrypt_document(&self, purpose: &str, plaintext: &[u8]) -> Result<Vec<u8>> {
        document::encrypt(&self.keys.documents, &self.config.id.0, purpose, plaintext)
    }

    /// Opens a document sealed by [`Repository::encrypt_document`].
    ///
    /// # Errors
    /// `Corrupt` if it was changed, truncated, or sealed for another purpose or repository.
    pub fn decrypt_document(&self, purpose: &str, bytes: &[u8]) -> Result<Vec<u8>> {
        tracing::trace!(purpose, "opening a document");
        document::decrypt(&self.keys.documents, &self.config.id.0, purpose, bytes)
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

    /// Capacity of the cache of decoded chunks, in bytes. It changes with the free memory.
    pub fn cache_bytes(&self) -> u64 {
        self.chunks.as_ref().map_or(0, ChunkCache::capacity_bytes)
    }

    pub(crate) fn chunk_cache(&self) -> Option<&ChunkCache> {
        self.chunks.as_ref()
    }

    /// Looks a value up. If it is missing, catches up and looks again: its point may be newer than
    /// this reader's view.
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

    /// Decodes a chunk into `chunk`, which has the chunk size. If the chunk is damaged, catches up
    /// and reads again: a writer may have healed it.
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
            .map_err(|error| error.context(format_args!("chunk {id}; {VERIFY}")))?
            .ok_or_else(|| missing_chunk(id))?;
        self.codec.decode(&self.keys.chunks, id, &value, chunk)
    }
}

pub(crate) fn missing_chunk(id: ChunkId) -> Error {
    Error::new(ErrorKind::Corrupt, format!("chunk {id} is missing")).advise(VERIFY)
}

impl Repository {
    /// The decoded page, if it is cached.
    pub(crate) fn decoded_page(&self, id: PageId, level: u8) -> Option<Page> {
        self.pages.get(id, level)
    }

    /// Reads and decodes a page, and caches it.
    pub(crate) fn load_page(&self, id: PageId, level: u8) -> Result<Page> {
        let slots = match self.stored_page(Family::Maps, id, level) {
            // One family still has pages that are damaged in the other.
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
                self.stored_page(Family::MapsCopy, id, level).map_err(|_| error)?
            }
            read => read?,
        };
        let page: Page = slots.into();
        self.pages.insert(id, level, page.clone());
        Ok(page)
    }

    fn stored_page(&self, family: Family, id: PageId, level: u8) -> Result<Vec<u64>> {
        let value =
            self.get_caught_up(family, &id.to_be_bytes(), ReadMode::Cached)?.ok_or_else(|| {
                let message = format!("page {id} of a chunk map is missing");
                Error::new(ErrorKind::Corrupt, message).advise(VERIFY)
            })?;
        parse_page_value(&self.config.id, &self.keys.pages, id, level, &value)
    }
}

impl PageSource for Repository {
    fn page(&self, id: PageId, level: u8) -> Result<Page> {
        self.decoded_page(id, level).map_or_else(|| self.load_page(id, level), Ok)
    }
}

/// Makes missing directories. Copying a repository may leave empty ones out; `verify` reports
/// content that is missing from them.
fn make_missing_parts(path: &Path) {
    // Not in what is left of a repository that has just been unmounted.
    if !path.join(FILE_NAME).exists() {
        return;
    }
    for part in parts(path) {
        // Any other error shows when the directory is used.
        if matches!(part.try_exists(), Ok(false)) {
            match make_directory(&part) {
                Ok(()) => tracing::warn!(path = %part.display(), "a directory was missing"),
                // A repository without it has no writer, and readers report it.
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

/// The remains of a killed `init`, each with whether it is a directory. Anything else is refused.
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

/// True if a directory holds only the files that RocksDB puts into an empty database.
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
