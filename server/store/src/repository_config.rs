//! `repository.json`: the properties that must be known before a repository can be opened.
//!
//! `init` writes it last, so a repository is either complete or does not exist. It is written under
//! a temporary name, synced and renamed, and the directory is synced: a crash leaves the old file
//! or the new one.

use std::cmp::Ordering;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result, replace_file};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::aead::Key;
use crate::file_system::refuse_shared;
use crate::keys::{GuessCost, KeySlot, Keys};
use crate::{Compression, MAX_CHUNK_SIZE_BYTES, MIN_CHUNK_SIZE_BYTES, Passphrase, RepositoryId};
use coldrise_block::hex;

pub(crate) const FILE_NAME: &str = "repository.json";
pub(crate) const TEMPORARY_NAME: &str = "repository.json.new";
pub(crate) const LOCK_NAME: &str = "repository.lock";
const FORMAT: &str = "coldrise repository";
const FORMAT_VERSION: u32 = 2;
/// The maximum size of the file.
pub const MAX_FILE_BYTES: u64 = 64 << 10;
/// How long to wait for another process that changes files beside the parts.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of passphrases of one repository.
pub(crate) const MAX_KEY_SLOTS: usize = 8;

/// The content of `repository.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RepositoryConfig {
    format: String,
    format_version: u32,
    /// The repository's id.
    pub id: RepositoryId,
    /// The size of every chunk.
    pub chunk_size_bytes: u32,
    /// The compression of chunks.
    pub compression: Compression,
    /// One per passphrase; empty in an unencrypted repository.
    pub(crate) key_slots: Vec<KeySlot>,
    /// BLAKE3 of all fields above; distinguishes damage from a wrong passphrase.
    checksum: String,
}

/// The fields that every version of the file has.
#[derive(Deserialize)]
struct Version {
    format: String,
    format_version: u32,
}

impl RepositoryConfig {
    /// A new configuration with its id, and its master key. A guess at the passphrase takes about
    /// `guess_time`; without it, the default cost, which is the minimum.
    pub fn create(
        chunk_size_bytes: u32,
        compression: Compression,
        passphrase: Option<&Passphrase>,
        guess_time: Option<Duration>,
    ) -> Result<Self> {
        check_chunk_size(chunk_size_bytes)?;
        compression.check()?;
        let mut id = [0; 16];
        crate::aead::random(&mut id)?;
        let mut config = RepositoryConfig {
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
            let bound = config.bound();
            let cost = match guess_time {
                Some(time) => GuessCost::for_this_machine(time)?,
                None => GuessCost::DEFAULT,
            };
            let slot = KeySlot::wrap(&master, passphrase, &bound, cost, None, None)?;
            config.key_slots.push(slot);
        }
        config.set_checksum()?;
        Ok(config)
    }

    /// Sets the checksum of the present fields.
    pub(crate) fn set_checksum(&mut self) -> Result<()> {
        self.checksum = self.expected_checksum()?;
        Ok(())
    }

    /// Whether a passphrase is needed.
    pub fn is_encrypted(&self) -> bool {
        !self.key_slots.is_empty()
    }

    /// The fields that a key slot is bound to: none of them can be changed without the passphrase.
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
    /// `WrongPassphrase` if the passphrase is wrong or missing, and if one is given for an
    /// unencrypted repository (a person may have put it in the place of an encrypted one).
    pub fn master(&self, passphrase: Option<&Passphrase>) -> Result<Zeroizing<Key>> {
        self.master_and_slot(passphrase).map(|(master, _)| master)
    }

    /// The master key, and the key slot that the passphrase opens: 0 if there is none.
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
    /// `NoRepository`; `Unsupported` for another version and on a file system that several hosts
    /// can mount; `Corrupt` for anything that Coldrise did not write.
    pub(crate) fn read(repository: &Path) -> Result<Self> {
        for place in std::iter::once(repository.to_owned()).chain(parts(repository)) {
            refuse_shared(&place)?;
        }
        let path = repository.join(FILE_NAME);
        let file = std::fs::File::open(&path).map_err(|error| match error.kind() {
            // An interrupted init leaves a database, but no markers.
            std::io::ErrorKind::NotFound if has_markers(repository) => Error::with_source(
                ErrorKind::Corrupt,
                format!("{} is missing: put a copy of it back", path.display()),
                error,
            ),
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => Error::with_source(
                ErrorKind::NoRepository,
                format!(
                    "there is no repository at {}: is its drive mounted, and the path right? Only for a \
                     new one: coldrise init",
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

    /// Corrects a flipped bit of the file, durably. Returns whether there was one.
    ///
    /// # Errors
    /// `Corrupt` if more than one bit is wrong; errors of the operating system.
    pub(crate) fn mend(repository: &Path) -> Result<bool> {
        let kind = match Self::read(repository) {
            // A bit of the version may have flipped too. No single bit turns a later version into
            // this one.
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => {
                error.kind()
            }
            _ => return Ok(false),
        };
        let path = repository.join(FILE_NAME);
        let Ok(mut text) = std::fs::read(&path) else { return Ok(false) };
        if text.len() as u64 > MAX_FILE_BYTES {
            return Ok(false);
        }
        for bit in 0..text.len() * 8 {
            text[bit / 8] ^= 1 << (bit % 8);
            if let Ok(config) = Self::parse(&text) {
                config.write_synced(repository)?;
                tracing::warn!(path = %path.display(), "a flipped bit was corrected");
                return Ok(true);
            }
            text[bit / 8] ^= 1 << (bit % 8);
        }
        if kind == ErrorKind::Unsupported {
            return Ok(false);
        }
        let message = format!(
            "{} is damaged beyond repair, and holds the slots of the key: put a copy of it back",
            path.display()
        );
        Err(Error::new(ErrorKind::Corrupt, message))
    }

    /// Parses and checks the content of `repository.json`.
    ///
    /// # Errors
    /// `Corrupt` for anything that Coldrise did not write; `Unsupported` for another version.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let corrupt = |why: String| {
            Error::new(
                ErrorKind::Corrupt,
                format!(
                    "the file is damaged or foreign ({why}): put a copy of it back (coldrise \
                     repair corrects a single flipped bit)"
                ),
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
        let config: RepositoryConfig =
            serde_json::from_slice(text).map_err(|error| corrupt(error.to_string()))?;
        if config.key_slots.len() > MAX_KEY_SLOTS {
            return Err(corrupt(format!("over {MAX_KEY_SLOTS} key slots")));
        }
        if config.checksum != config.expected_checksum()? {
            return Err(corrupt("wrong checksum".to_owned()));
        }
        check_chunk_size(config.chunk_size_bytes)
            .and_then(|()| config.compression.check())
            .map_err(|error| corrupt(error.to_string()))?;
        for slot in &config.key_slots {
            slot.check()?;
        }
        Ok(config)
    }

    /// Writes `repository.json` so that a crash leaves it whole or absent.
    pub(crate) fn write_synced(&self, repository: &Path) -> Result<()> {
        replace_file(&repository.join(FILE_NAME), &self.to_text()?)
    }

    /// The content of `repository.json`.
    pub fn to_text(&self) -> Result<Vec<u8>> {
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|e| Error::with_source(ErrorKind::Internal, "describing the repository", e))?;
        text.push(b'\n');
        Ok(text)
    }
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value)
        .map_err(|e| Error::with_source(ErrorKind::Internal, "describing the repository", e))
}

/// Locks the files beside the parts of a repository: its configuration, the passphrases, the number
/// of the NFS server. The lock is a file, because the lock of a directory may end at this host.
///
/// # Errors
/// `Busy` if another process keeps it locked for too long; the message says that it `does` that.
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

/// # Errors
/// `Unsupported` for any version other than this program's.
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

/// The folder of claims and leases.
pub(crate) const LEASES_NAME: &str = "leases";

/// The directories of a repository.
pub(crate) const PARTS: [&str; 5] = ["db", "live", LEASES_NAME, "layers", MARKERS_NAME];
pub(crate) const MARKERS_NAME: &str = "markers";

/// The paths of these directories.
pub(crate) fn parts(repository: &Path) -> impl Iterator<Item = PathBuf> + '_ {
    PARTS.iter().map(|part| repository.join(part))
}

/// The path of the database.
pub(crate) fn database_path(repository: &Path) -> PathBuf {
    repository.join("db")
}

/// Whether a repository that cannot be opened has ever held anything.
fn has_markers(repository: &Path) -> bool {
    std::fs::read_dir(repository.join(MARKERS_NAME))
        .is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
#[path = "repository_config_tests.rs"]
mod tests;
