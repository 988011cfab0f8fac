//! `repository.json`: what has to be known before anything can be opened.
//!
//! It is the last file that `init` writes, so a repository either has all it
//! needs or is none. It is written under a temporary name, synced, renamed,
//! and the directory is synced: a crash leaves the old file or the new one.

use std::cmp::Ordering;
use std::fmt;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::{flock, FlockOperation};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::file_system::refuse_shared;
use crate::keys::{GuessCost, Key, KeySlot, Keys};
use crate::{hex, markers, Compression, Passphrase};

/// Smallest chunk, in bytes.
pub const MIN_CHUNK_SIZE_BYTES: u32 = 4 << 10;
/// Largest chunk, in bytes.
pub const MAX_CHUNK_SIZE_BYTES: u32 = 256 << 10;

pub(crate) const FILE_NAME: &str = "repository.json";
pub(crate) const TEMPORARY_NAME: &str = "repository.json.new";
pub(crate) const LOCK_NAME: &str = "repository.lock";
const FORMAT: &str = "coldrise repository";
const FORMAT_VERSION: u32 = 2;
const MAX_FILE_BYTES: u64 = 64 << 10;
/// How long to wait for another process that changes what stands beside the parts.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);
/// Passphrases of one repository.
pub(crate) const MAX_KEY_SLOTS: usize = 8;

/// The random 16 bytes that tell one repository from every other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RepositoryId(pub(crate) [u8; 16]);

impl RepositoryId {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for RepositoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(&self.0))
    }
}

impl fmt::Debug for RepositoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for RepositoryId {
    fn serialize<S: serde::Serializer>(&self, out: S) -> std::result::Result<S::Ok, S::Error> {
        out.serialize_str(&hex::encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for RepositoryId {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        hex::decode(&text)
            .map(RepositoryId)
            .ok_or_else(|| serde::de::Error::custom("a repository id is 32 hexadecimal digits"))
    }
}

/// The content of `repository.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Description {
    format: String,
    format_version: u32,
    pub(crate) id: RepositoryId,
    pub(crate) chunk_size_bytes: u32,
    pub(crate) compression: Compression,
    /// One per passphrase; empty in a repository without encryption.
    pub(crate) key_slots: Vec<KeySlot>,
    /// BLAKE3 of everything above: tells damage from a wrong passphrase.
    checksum: String,
}

/// What every version of the file has.
#[derive(Deserialize)]
struct Version {
    format: String,
    format_version: u32,
}

impl Description {
    /// A new description with its id, and the master key that goes with it. A guess at
    /// the passphrase takes about `guess_time`; without it, as little as there is.
    pub(crate) fn create(
        chunk_size_bytes: u32,
        compression: Compression,
        passphrase: Option<&Passphrase>,
        guess_time: Option<Duration>,
    ) -> Result<Self> {
        check_chunk_size(chunk_size_bytes)?;
        compression.check()?;
        let mut id = [0; 16];
        crate::seal::random(&mut id)?;
        let mut description = Description {
            format: FORMAT.to_owned(),
            format_version: FORMAT_VERSION,
            id: RepositoryId(id),
            chunk_size_bytes,
            compression,
            key_slots: Vec::new(),
            checksum: String::new(),
        };
        if let Some(passphrase) = passphrase {
            let master = Keys::new_master()?;
            let bound = description.bound();
            let cost = match guess_time {
                Some(time) => GuessCost::for_this_machine(time)?,
                None => GuessCost::DEFAULT,
            };
            let slot = KeySlot::wrap(&master, passphrase, &bound, cost, None, None)?;
            description.key_slots.push(slot);
        }
        description.set_checksum()?;
        Ok(description)
    }

    /// Makes the checksum that of the fields as they are now.
    pub(crate) fn set_checksum(&mut self) -> Result<()> {
        self.checksum = self.expected_checksum()?;
        Ok(())
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        !self.key_slots.is_empty()
    }

    /// The fields that a key slot is bound to, so that none of them can be
    /// changed without the passphrase.
    pub(crate) fn bound(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(self.format.as_bytes());
        bytes.extend_from_slice(&self.format_version.to_le_bytes());
        bytes.extend_from_slice(&self.id.0);
        bytes.extend_from_slice(&self.chunk_size_bytes.to_le_bytes());
        let compression = self.compression.to_string();
        bytes.extend_from_slice(&(compression.len() as u32).to_le_bytes());
        bytes.extend_from_slice(compression.as_bytes());
        bytes
    }

    fn expected_checksum(&self) -> Result<String> {
        let mut hasher = blake3::Hasher::new_derive_key("coldrise v1 repository.json");
        hasher.update(&self.bound());
        hasher.update(&to_json(&self.key_slots)?);
        Ok(hex::encode(hasher.finalize().as_bytes()))
    }

    /// The master key.
    ///
    /// # Errors
    /// `WrongPassphrase` where none or another one is given, and where one is
    /// given for a repository without encryption (somebody may have put such
    /// a repository in the place of an encrypted one).
    pub(crate) fn master(&self, passphrase: Option<&Passphrase>) -> Result<Zeroizing<Key>> {
        self.master_and_slot(passphrase).map(|(master, _)| master)
    }

    /// The same, and the key slot that the passphrase opens: 0 where there is none.
    pub(crate) fn master_and_slot(
        &self,
        passphrase: Option<&Passphrase>,
    ) -> Result<(Zeroizing<Key>, usize)> {
        let wrong = |text: &str| Err(Error::new(ErrorKind::WrongPassphrase, text));
        match (self.is_encrypted(), passphrase) {
            (false, None) => Ok((Keys::open_master(&self.id), 0)),
            (false, Some(_)) => wrong(
                "a passphrase was given, but the repository is not encrypted: leave the \
                 passphrase out if that is as you want it",
            ),
            (true, None) => wrong(
                "the repository is encrypted: give its passphrase (--passphrase-file, \
                 COLDRISE_PASSPHRASE_FILE or COLDRISE_PASSPHRASE_COMMAND)",
            ),
            (true, Some(passphrase)) => {
                let bound = self.bound();
                for (number, slot) in self.key_slots.iter().enumerate() {
                    if let Some(master) = slot.unwrap(passphrase, &bound)? {
                        return Ok((master, number));
                    }
                }
                wrong(
                    "the passphrase does not open the repository: check the file or command \
                       that it comes from",
                )
            }
        }
    }

    /// Reads and checks `repository.json`.
    ///
    /// # Errors
    /// `NoRepository`, `Unsupported` for another version and on a file system of several
    /// hosts, `Corrupt` for anything that Coldrise did not write.
    pub(crate) fn read(repository: &Path) -> Result<Self> {
        for place in std::iter::once(repository.to_owned()).chain(parts(repository)) {
            refuse_shared(&place)?;
        }
        let path = repository.join(FILE_NAME);
        let file = std::fs::File::open(&path).map_err(|error| match error.kind() {
            // An interrupted init leaves a database, and nothing that stands for a point.
            std::io::ErrorKind::NotFound if markers::are_there(repository) => Error::with_source(
                ErrorKind::Corrupt,
                format!("{} is missing: put a copy of it back", path.display()),
                error,
            ),
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => Error::with_source(
                ErrorKind::NoRepository,
                format!(
                    "there is no repository at {}: check the path, or make one with coldrise init",
                    repository.display()
                ),
                error,
            ),
            _ => Error::io(format!("opening {}", path.display()), error),
        })?;
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES + 1)
            .read_to_end(&mut text)
            .context(|| format!("reading {}", path.display()))?;
        Self::parse(&text).context(|| path.display().to_string())
    }

    /// Puts a flipped bit of the file right, durably; whether there was one.
    ///
    /// # Errors
    /// What the operating system says.
    pub(crate) fn mend(repository: &Path) -> Result<bool> {
        match Self::read(repository) {
            // A bit of the version may have flipped, too; of a later one no bit makes ours.
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => {}
            _ => return Ok(false),
        }
        let path = repository.join(FILE_NAME);
        let Ok(mut text) = std::fs::read(&path) else { return Ok(false) };
        if text.len() as u64 > MAX_FILE_BYTES {
            return Ok(false);
        }
        for bit in 0..text.len() * 8 {
            text[bit / 8] ^= 1 << (bit % 8);
            if let Ok(description) = Self::parse(&text) {
                description.write_synced(repository)?;
                tracing::warn!(path = %path.display(), "a flipped bit was put right");
                return Ok(true);
            }
            text[bit / 8] ^= 1 << (bit % 8);
        }
        Ok(false)
    }

    fn parse(text: &[u8]) -> Result<Self> {
        let corrupt = |why: String| {
            Error::new(
                ErrorKind::Corrupt,
                format!("the file is damaged or foreign ({why}): run coldrise repair, or put a copy of it back"),
            )
        };
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(corrupt(format!("over {MAX_FILE_BYTES} bytes")));
        }
        let version: Version =
            serde_json::from_slice(text).map_err(|error| corrupt(error.to_string()))?;
        if version.format != FORMAT {
            return Err(corrupt("another format".to_owned()));
        }
        check_version(version.format_version)?;
        let description: Description =
            serde_json::from_slice(text).map_err(|error| corrupt(error.to_string()))?;
        if description.key_slots.len() > MAX_KEY_SLOTS {
            return Err(corrupt(format!("over {MAX_KEY_SLOTS} key slots")));
        }
        if description.checksum != description.expected_checksum()? {
            return Err(corrupt("wrong checksum".to_owned()));
        }
        check_chunk_size(description.chunk_size_bytes)
            .and_then(|()| description.compression.check())
            .map_err(|error| corrupt(error.to_string()))?;
        for slot in &description.key_slots {
            slot.check()?;
        }
        Ok(description)
    }

    /// Writes `repository.json` so that a crash leaves it whole or absent.
    pub(crate) fn write_synced(&self, repository: &Path) -> Result<()> {
        let temporary = repository.join(TEMPORARY_NAME);
        let target = repository.join(FILE_NAME);
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|e| Error::with_source(ErrorKind::Internal, "describing the repository", e))?;
        text.push(b'\n');
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let what = || format!("writing {}", temporary.display());
        let mut file = options.open(&temporary).context(what)?;
        file.write_all(&text).context(what)?;
        file.sync_all().context(what)?;
        std::fs::rename(&temporary, &target).context(|| format!("making {}", target.display()))?;
        sync_directory(repository)
    }
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value)
        .map_err(|e| Error::with_source(ErrorKind::Internal, "describing the repository", e))
}

/// Locks what stands beside the parts of a repository: its description, the passphrases, the
/// number of the NFS server. The lock is a file: that of a directory may end at this host.
///
/// # Errors
/// `Busy` where another process keeps it locked for too long: it `does` that.
pub fn lock_repository(repository: &Path, does: &str) -> Result<File> {
    let path = repository.join(LOCK_NAME);
    let what = || format!("locking {}", path.display());
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.context(what)?;
    let start = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) => {
                if start.elapsed() >= PATIENCE {
                    let message =
                        format!("{}: {does}; try again in a moment", repository.display());
                    return Err(Error::new(ErrorKind::Busy, message));
                }
                std::thread::sleep(PAUSE);
            }
            Err(errno) => return Err(Error::io(what(), errno.into())),
        }
    }
}

/// Makes entries of a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    let what = || format!("syncing {}", path.display());
    std::fs::File::open(path).context(what)?.sync_all().context(what)
}

/// # Errors
/// `Unsupported` for any version but this program's.
fn check_version(found: u32) -> Result<()> {
    let advice = match found.cmp(&FORMAT_VERSION) {
        Ordering::Equal => return Ok(()),
        Ordering::Greater => "use a newer Coldrise",
        Ordering::Less => {
            "make a new repository with coldrise init and back the machines up again; the \
             older Coldrise still restores from this one"
        }
    };
    let message = format!(
        "the repository has format version {found}, and this Coldrise reads version \
         {FORMAT_VERSION} only: {advice}"
    );
    Err(Error::new(ErrorKind::Unsupported, message))
}

fn check_chunk_size(bytes: u32) -> Result<()> {
    if bytes.is_power_of_two() && (MIN_CHUNK_SIZE_BYTES..=MAX_CHUNK_SIZE_BYTES).contains(&bytes) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidInput,
        format!(
            "a chunk of {bytes} bytes is not possible: use a power of two from \
             {MIN_CHUNK_SIZE_BYTES} to {MAX_CHUNK_SIZE_BYTES}"
        ),
    ))
}

/// The directories of a repository.
pub(crate) const PARTS: [&str; 5] = ["db", "live", "leases", "layers", "markers"];

/// Where they lie.
pub(crate) fn parts(repository: &Path) -> impl Iterator<Item = PathBuf> + '_ {
    PARTS.iter().map(|part| repository.join(part))
}

/// Where the database lies.
pub(crate) fn database_path(repository: &Path) -> PathBuf {
    repository.join("db")
}

#[cfg(test)]
#[path = "description_tests.rs"]
mod tests;
