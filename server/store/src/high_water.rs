//! The high-water mark: the progress of the database, stored outside it.
//!
//! If the log or the manifest has lost its end, RocksDB opens the database as if the end had never
//! been written, and deletes every file that the manifest does not name. So each commit raises a
//! mark: the next ids, the sequence number of the last change, and the length of the manifest. A
//! database below its mark was rolled back: a writer refuses it before RocksDB changes anything,
//! and a repair assigns ids from the mark on, so that no id is given twice.
//!
//! `high-water.1` and `high-water.2` are sealed documents with the purpose `high-water mark`: a
//! version and five numbers of 8 bytes, little endian. Each is one sector, written in place and
//! synced, one after the other: a crash leaves at least one of them whole, and the next commit
//! heals damage to either. Every number only grows, so the higher one counts.
//!
//! The mark is written after the state it describes is durable: a crash in between leaves a lower
//! mark. Other threads extend the manifest too, so it is synced before its length is taken.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::fs::OFlags;

use crate::RepositoryId;
use crate::advice::REPAIR;
use crate::aead::document;
use crate::keys::Keys;
use crate::rocks::{self, ManifestEnd};

pub(crate) const NAMES: [&str; 2] = ["high-water.1", "high-water.2"];
pub(crate) const PURPOSE: &str = "high-water mark";
const VERSION: u64 = 1;
const FIELDS: usize = 6;
/// Longer files are not read.
const MAX_STORED_BYTES: u64 = 512;

/// The progress of a database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// All lower chunk ids may have been assigned.
    pub(crate) next_chunk: u64,
    /// All lower page ids may have been assigned.
    pub(crate) next_page: u64,
    /// The database holds the change with this sequence number.
    pub(crate) sequence: u64,
    /// The durable part of the manifest.
    pub(crate) manifest: ManifestEnd,
}

impl Mark {
    pub(crate) fn fields(&self) -> [u64; FIELDS] {
        let (chunk, page) = (self.next_chunk, self.next_page);
        [VERSION, chunk, page, self.sequence, self.manifest.number, self.manifest.bytes]
    }

    fn parse(plaintext: &[u8]) -> Option<Mark> {
        let words = plaintext.chunks(8).map(|word| word.try_into().map(u64::from_le_bytes));
        let words: Vec<u64> = words.collect::<std::result::Result<_, _>>().ok()?;
        let &[VERSION, next_chunk, next_page, sequence, number, bytes] = &words[..] else {
            return None;
        };
        Some(Mark { next_chunk, next_page, sequence, manifest: ManifestEnd { number, bytes } })
    }

    /// The higher value of each number; the length is that of the newer manifest.
    pub(crate) fn or_higher(self, other: Mark) -> Mark {
        Mark {
            next_chunk: self.next_chunk.max(other.next_chunk),
            next_page: self.next_page.max(other.next_page),
            sequence: self.sequence.max(other.sequence),
            manifest: self.manifest.max(other.manifest),
        }
    }

    /// The reason why the database in this folder is below this mark; `None` if it is not.
    ///
    /// # Errors
    /// `Corrupt` if the manifest cannot be read; errors of the operating system.
    pub(crate) fn rolled_back(
        &self,
        folder: &Path,
        log_directory: &Path,
    ) -> Result<Option<String>> {
        if rocks::sound_manifest(folder)? < self.manifest {
            return Ok(Some("the list of its files has lost its end".to_owned()));
        }
        let sequence = rocks::open_as_listed(folder, log_directory)?.sequence();
        Ok((sequence < self.sequence).then(|| {
            format!("its log has lost its end: change {sequence} is the last of {}", self.sequence)
        }))
    }
}

/// The mark of an open repository.
#[derive(Default)]
pub(crate) struct HighWater(pub(crate) Mutex<Mark>);

impl HighWater {
    pub(crate) fn new(mark: Mark) -> HighWater {
        HighWater(Mutex::new(mark))
    }

    /// Sets the next ids for the commit that is about to be made.
    pub(crate) fn reach(&self, next_chunk: u64, next_page: u64) {
        let mut mark = self.0.lock();
        mark.next_chunk = mark.next_chunk.max(next_chunk);
        mark.next_page = mark.next_page.max(next_page);
    }

    pub(crate) fn get(&self) -> Mark {
        *self.0.lock()
    }
}

/// The mark of a repository; `None` if neither file can be read.
pub(crate) fn read(repository: &Path, id: &RepositoryId, keys: &Keys) -> Option<Mark> {
    let paths = mark_paths(repository).into_iter();
    paths.filter_map(|path| read_one(&path, id, keys)).reduce(Mark::or_higher)
}

/// Opens a file of the mark, which is written in place, but not through a symbolic link.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> std::io::Result<File> {
    options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(path)
}

pub(crate) fn read_one(path: &Path, id: &RepositoryId, keys: &Keys) -> Option<Mark> {
    let file = open(path, File::options().read(true)).ok()?;
    let mut stored = Vec::new();
    file.take(MAX_STORED_BYTES + 1).read_to_end(&mut stored).ok()?;
    if stored.len() as u64 > MAX_STORED_BYTES {
        return None;
    }
    Mark::parse(&document::decrypt(&keys.documents, id.as_bytes(), PURPOSE, &stored).ok()?)
}

/// Refuses a database that is below the mark.
///
/// # Errors
/// `Corrupt`; as [`Mark::rolled_back`].
pub(crate) fn refuse_rolled_back(folder: &Path, mark: &Mark, log_directory: &Path) -> Result<()> {
    match mark.rolled_back(folder, log_directory)? {
        None => Ok(()),
        Some(why) => Err(Error::new(
            ErrorKind::Corrupt,
            format!("{} is older than its last commit: {why}", folder.display()),
        )
        .advise(REPAIR)),
    }
}

pub(crate) fn mark_paths(repository: &Path) -> [PathBuf; 2] {
    NAMES.map(|name| repository.join(name))
}
