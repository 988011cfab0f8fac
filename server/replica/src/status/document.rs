//! The stored records of copies: one sealed document per target.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result, remove_if_present, replace_file};
use coldrise_store::{MachineName, PointDocument, PointName, Repository, RepositoryId};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::remote::Traffic;

const FOLDER: &str = "copies";
const LINK: &str = "link";
const DIRECTORY: &str = "directory";
const BUCKET: &str = "bucket";
/// The version of the document.
const VERSION: u32 = 1;
/// Maximum length of a recorded error, in bytes.
const MAX_MESSAGE_BYTES: usize = 500;

/// Where copies go.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyTarget {
    /// The repository behind a link.
    Link(MachineName),
    /// A repository on this host, by its absolute path.
    Directory(String),
    /// A repository in a bucket, by its URL.
    Bucket(String),
}

impl CopyTarget {
    /// The repository of a directory.
    pub fn directory(path: &Path) -> CopyTarget {
        let found = path.canonicalize().or_else(|_| std::path::absolute(path));
        let path = found.unwrap_or_else(|_| path.to_owned());
        CopyTarget::Directory(path.to_string_lossy().into_owned())
    }

    /// The name of its file.
    fn file_name(&self) -> String {
        match self {
            CopyTarget::Link(name) => format!("{name}.{LINK}"),
            CopyTarget::Directory(path) => format!("{}.{DIRECTORY}", short_hash(path)),
            CopyTarget::Bucket(url) => format!("{}.{BUCKET}", short_hash(url)),
        }
    }
}

impl fmt::Display for CopyTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CopyTarget::Link(name) => name.fmt(formatter),
            CopyTarget::Directory(place) | CopyTarget::Bucket(place) => place.fmt(formatter),
        }
    }
}

fn short_hash(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex()[..32].to_owned()
}

/// A failure of a copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct FailedCopy {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// The word of the error's kind.
    pub kind: String,
    /// The message for people.
    pub message: String,
}

impl FailedCopy {
    pub(super) fn of(error: &Error, at_ms: u64) -> FailedCopy {
        let mut message = error.full_message();
        let mut end = MAX_MESSAGE_BYTES.min(message.len());
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        FailedCopy { at_ms, kind: error.kind().word().to_owned(), message }
    }
}

/// A point that ends what has been copied.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema,
)]
pub struct Cut {
    /// Its time, in milliseconds since 1970.
    pub created_at_ms: u64,
    /// Its name.
    #[schema(value_type = String)]
    pub point: PointName,
}

impl Cut {
    pub(crate) fn of(point: &PointDocument) -> Cut {
        Cut { created_at_ms: point.created_at_ms, point: point.point.clone() }
    }
}

/// Counters of copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CopyCounts {
    /// Complete points.
    pub points: u64,
    /// The sizes of their disks, in bytes.
    pub size_bytes: u64,
    /// Bytes read here: the difference from the base, without holes.
    pub read_bytes: u64,
    /// Bytes that the other repository stored, compressed.
    pub stored_bytes: u64,
    /// Bytes sent over the line, and bytes saved; absent for copies on this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<Traffic>,
}

impl CopyCounts {
    fn with(
        self,
        other: CopyCounts,
        join: fn(u64, u64) -> u64,
        join_lines: fn(Traffic, Traffic) -> Traffic,
    ) -> CopyCounts {
        let line = match (self.line, other.line) {
            (None, None) => None,
            (line, other) => Some(join_lines(line.unwrap_or_default(), other.unwrap_or_default())),
        };
        CopyCounts {
            points: join(self.points, other.points),
            size_bytes: join(self.size_bytes, other.size_bytes),
            read_bytes: join(self.read_bytes, other.read_bytes),
            stored_bytes: join(self.stored_bytes, other.stored_bytes),
            line,
        }
    }

    /// The sum.
    pub(super) fn plus(self, more: CopyCounts) -> CopyCounts {
        self.with(more, u64::saturating_add, |line, more| line + more)
    }

    /// The counts since `before`.
    pub(super) fn minus(self, before: CopyCounts) -> CopyCounts {
        self.with(before, u64::saturating_sub, |line, before| line - before)
    }
}

/// The last copy of a machine, or the one that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LastCopy {
    /// Times in milliseconds since 1970.
    pub(super) started_at_ms: u64,
    pub(super) updated_at_ms: u64,
    /// `None`: it runs, or was killed.
    pub(super) ended_at_ms: Option<u64>,
    /// The point on its way.
    pub(super) point: Option<PointName>,
    /// Bytes of the point that are done, in the measure of how far behind a machine is: what differs from the base, or
    /// from zeroes, without holes.
    pub(super) done_bytes: u64,
    /// Per second, of the last minute.
    pub(super) bytes_per_second: u64,
    pub(super) sent_bytes_per_second: Option<u64>,
    pub(super) counts: CopyCounts,
}

/// The record of a machine's copies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MachineRecord {
    /// The machine.
    pub(super) machine: MachineName,
    /// The newest of its points that is there.
    pub(super) newest: Option<Cut>,
    /// Its points that are there.
    pub(super) points_there: u64,
    /// Points before `newest` that are to be copied, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) older: Vec<PointName>,
    /// Points that are there and dated in the future.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ahead: Vec<PointName>,
    /// When the other repository was asked what it has.
    pub(super) seen_at_ms: Option<u64>,
    /// When everything that was wanted was there.
    pub(super) succeeded_at_ms: Option<u64>,
    /// A failure since.
    pub(super) failure: Option<FailedCopy>,
    pub(super) last: LastCopy,
    /// The counts of all copies together.
    pub(super) total: CopyCounts,
}

impl MachineRecord {
    pub(super) fn new(machine: MachineName) -> MachineRecord {
        MachineRecord {
            machine,
            newest: None,
            points_there: 0,
            older: Vec::new(),
            ahead: Vec::new(),
            seen_at_ms: None,
            succeeded_at_ms: None,
            failure: None,
            last: LastCopy::default(),
            total: CopyCounts::default(),
        }
    }
}

/// The record of the copies to one target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TargetDocument {
    version: u32,
    pub(super) target: CopyTarget,
    /// The other repository. Records of another one are dropped.
    pub(super) repository: Option<RepositoryId>,
    /// Copies are of all machines: one without a record was never copied.
    pub(super) is_of_all: bool,
    /// Why the other repository could not be reached, since it was reached last.
    pub(super) failure: Option<FailedCopy>,
    /// By the machine's name there.
    pub(super) machines: BTreeMap<MachineName, MachineRecord>,
}

impl TargetDocument {
    fn new(target: &CopyTarget) -> TargetDocument {
        TargetDocument {
            version: VERSION,
            target: target.clone(),
            repository: None,
            is_of_all: false,
            failure: None,
            machines: BTreeMap::new(),
        }
    }
}

/// The name of a file, its number and the time of its last change.
pub(super) type RecordStamp = (String, u64, i64, i64);

/// The records of a repository's copies.
pub struct CopyRecords {
    repository: Arc<Repository>,
    folder: PathBuf,
}

impl CopyRecords {
    /// Opens them; nothing is read yet.
    pub fn of(repository: &Arc<Repository>) -> CopyRecords {
        let folder = repository.path().join(FOLDER);
        CopyRecords { repository: Arc::clone(repository), folder }
    }

    /// Records that a copy of `machines` has failed before any machine's turn, such as because the target cannot be
    /// reached. A directory to which nothing was ever copied is not a target yet.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn failed(
        &self,
        target: &CopyTarget,
        machines: &[MachineName],
        error: &Error,
    ) -> Result<()> {
        let is_link = matches!(target, CopyTarget::Link(_));
        if !is_link && !self.folder.join(target.file_name()).exists() {
            return Ok(());
        }
        let failure = FailedCopy::of(error, coldrise_block::now_ms());
        self.change(target, |document| {
            document.failure = Some(failure);
            for machine in machines {
                // A machine that was never copied is missing there, too.
                if !document.machines.values().any(|record| record.machine == *machine) {
                    let record = MachineRecord::new(machine.clone());
                    document.machines.insert(machine.clone(), record);
                }
            }
        })
    }

    /// Forgets a target: it is not shown until the next copy to it. Returns whether it was known.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn forget(&self, target: &CopyTarget) -> Result<bool> {
        remove_if_present(&self.folder.join(target.file_name()))
    }

    /// Changes the document of a target; a damaged one is replaced.
    pub(super) fn change(
        &self,
        target: &CopyTarget,
        change: impl FnOnce(&mut TargetDocument),
    ) -> Result<()> {
        let what = || format!("writing the records of copies in {}", self.folder.display());
        match std::fs::create_dir(&self.folder) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(error).context(what);
            }
            _ => {}
        }
        let lock = File::open(&self.folder).context(what)?;
        flock(&lock, FlockOperation::LockExclusive).map_err(std::io::Error::from).context(what)?;
        let name = target.file_name();
        let mut document = match self.read(&name) {
            Ok(document) => document,
            Err(error) if error.kind() == ErrorKind::NotFound => TargetDocument::new(target),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!(
                    "the record of copies to {target} is rebuilt: {}",
                    error.full_message()
                );
                TargetDocument::new(target)
            }
            Err(error) => return Err(error),
        };
        change(&mut document);
        let json = serde_json::to_vec(&document)
            .map_err(|error| Error::with_source(ErrorKind::Internal, what(), error))?;
        let sealed = self.repository.encrypt_document(&purpose(&name), &json)?;
        let written = replace_file(&self.folder.join(&name), &sealed);
        // A child process that another thread starts just now has the file, too.
        let _ = flock(&lock, FlockOperation::Unlock);
        written
    }

    /// The names of the documents' files, with what changes when one is replaced.
    pub(super) fn stamps(&self) -> Result<Vec<RecordStamp>> {
        use std::os::unix::fs::MetadataExt;
        let what = || format!("reading {}", self.folder.display());
        let entries = match std::fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.context(what)?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.context(what)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if ![LINK, DIRECTORY, BUCKET].iter().any(|kind| name.ends_with(&format!(".{kind}"))) {
                continue;
            }
            // It may be replaced or removed at this moment.
            let Ok(facts) = entry.metadata() else { continue };
            found.push((name, facts.ino(), facts.mtime(), facts.mtime_nsec()));
        }
        found.sort();
        Ok(found)
    }

    /// Reads a document by the name of its file.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` if it was changed; `Unsupported` if a newer version wrote it; errors of the drive.
    pub(super) fn read(&self, name: &str) -> Result<TargetDocument> {
        let path = self.folder.join(name);
        let what = || format!("reading {}", path.display());
        let sealed = std::fs::read(&path).context(what)?;
        let json = self.repository.decrypt_document(&purpose(name), &sealed);
        let json = json.map_err(|error| error.context(path.display()))?;
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let bad = |error| Error::with_source(ErrorKind::Corrupt, what(), error);
        let Version { version } = serde_json::from_slice(&json).map_err(bad)?;
        if version != VERSION {
            let text = format!("{}: version {version} is not known", path.display());
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        serde_json::from_slice(&json).map_err(bad)
    }
}

/// The subject of a file that cannot be read, for people: the link's name, or the file's.
pub(super) fn shown_name(file_name: &str) -> &str {
    file_name.strip_suffix(&format!(".{LINK}")).unwrap_or(file_name)
}

fn purpose(name: &str) -> String {
    format!("copies {name}")
}
