//! `session.json`: what a session consists of. Sealed, replaced whole.

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{
    Configuration, DiskDocument, DiskName, LayerId, LayerReference, MachineName, MapRoot,
    PointDocument, PointName, Repository, SessionName,
};
use serde::{Deserialize, Serialize};

use crate::layer::Superblock;
use crate::place::{replace_file, Place};
use crate::progress_mark::SessionProgress;

/// Largest document that is read, in bytes.
const MAX_DOCUMENT_BYTES: u64 = 16 << 20;

/// A session: a restore point published for writing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionDocument {
    /// The session's name.
    pub name: SessionName,
    /// The machine whose point was published.
    pub machine: MachineName,
    /// The point that was published.
    pub point: PointName,
    /// When: milliseconds since 1970-01-01T00:00:00Z.
    pub created_at_ms: u64,
    /// The disks, in the point's order.
    pub disks: Vec<SessionDisk>,
    /// The machine's configuration, as the point has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configuration: Option<Configuration>,
    /// Of the files of clients; absent in a session of a version that kept none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) files: Option<SessionFiles>,
    /// Points sealed from this session that no writer has yet entered into the catalog.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sealed: Vec<PointDocument>,
    /// The session was ended; it stays only until its points are in the catalog.
    #[serde(default)]
    pub(crate) is_ended: bool,
    /// Each document that is written has a higher number than the one before.
    #[serde(default)]
    pub(crate) revision: u64,
}

/// What a session's document says of the files of clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionFiles {
    /// The hash of those that the newest point has, or that the session began with: as
    /// long as a seal would carry the same, nothing changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hash: Option<String>,
}

/// One disk of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionDisk {
    /// The disk's name.
    pub name: DiskName,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// The chunk map at the bottom.
    pub root: MapRoot,
    /// Sealed layers, the bottom one first: the point's, and this session's.
    pub layers: Vec<LayerReference>,
    /// The layer that takes the writes.
    pub top: LayerId,
    /// What the top layer's last sequence number is at least.
    #[serde(skip)]
    pub(crate) least_sequence: u64,
}

impl SessionDisk {
    /// What the top layer's superblock has to say.
    pub(crate) fn top_superblock(&self) -> Superblock {
        Superblock { id: self.top.0, disk_size_bytes: self.size_bytes }
    }

    /// The disk as a point has it, without the top layer.
    pub fn sealed(&self) -> DiskDocument {
        DiskDocument {
            name: self.name.clone(),
            size_bytes: self.size_bytes,
            root: self.root,
            layers: self.layers.clone(),
        }
    }
}

impl SessionDocument {
    /// Reads the document in `place`; `None` where there is none.
    pub(crate) fn read(repository: &Repository, place: &Place) -> Result<Option<Self>> {
        loop {
            // Before the document, which is replaced first.
            let progress = SessionProgress::read(repository, place);
            let Some(mut document) = Self::read_alone(repository, place)? else { return Ok(None) };
            // Both came into being in between.
            if matches!(progress, Ok(None)) && SessionProgress::is_there(place)? {
                continue;
            }
            SessionProgress::apply(progress?, &mut document, place)?;
            return Ok(Some(document));
        }
    }

    fn read_alone(repository: &Repository, place: &Place) -> Result<Option<Self>> {
        let path = place.document();
        let what = || format!("reading {}", path.display());
        let length = match std::fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).context(what),
        };
        if length > MAX_DOCUMENT_BYTES {
            return Err(Error::new(ErrorKind::Corrupt, format!("{} is too large", path.display())));
        }
        let stored = match std::fs::read(&path) {
            Ok(stored) => stored,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).context(what),
        };
        let text = repository.open_document(&place.purpose(), &stored).context(what)?;
        serde_json::from_slice(&text).map(Some).map_err(|error| {
            let message = format!("{} has an unknown form", path.display());
            Error::with_source(ErrorKind::Corrupt, message, error)
        })
    }

    /// The document of a session that is to be there.
    ///
    /// Errors: `NotFound`, naming the sessions that are there.
    pub(crate) fn of(repository: &Repository, name: &SessionName) -> Result<Self> {
        let found = Self::read(repository, &Place::of(repository, name))?;
        match found.filter(|document| !document.is_ended) {
            Some(document) => Ok(document),
            None => {
                let mut names: Vec<String> = Self::readable(repository)?
                    .into_iter()
                    .filter(|(_, document)| !document.is_ended)
                    .map(|(_, document)| document.name.to_string())
                    .collect();
                names.sort_unstable();
                let there = match names.len() {
                    0 => "no point is published".to_owned(),
                    _ => format!("published are: {}", names.join(", ")),
                };
                Err(Error::new(ErrorKind::NotFound, format!("there is no session {name}; {there}")))
            }
        }
    }

    /// Every document that can be read, ended sessions included. What is damaged hides
    /// no other; verify tells of it.
    pub(crate) fn readable(repository: &Repository) -> Result<Vec<(Place, Self)>> {
        let mut documents = Vec::new();
        for place in Place::all(repository)? {
            match Self::read(repository, &place) {
                Ok(document) => documents.extend(document.map(|document| (place, document))),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::warn!(error = %error.full_message(), "a damaged session is passed over");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(documents)
    }

    /// Every document, ended sessions included.
    pub(crate) fn all(repository: &Repository) -> Result<Vec<(Place, Self)>> {
        let mut documents = Vec::new();
        for place in Place::all(repository)? {
            if let Some(document) = Self::read(repository, &place)? {
                documents.push((place, document));
            }
        }
        Ok(documents)
    }

    /// Writes the document durably; the caller holds the documents' lock.
    pub(crate) fn write(&mut self, repository: &Repository, place: &Place) -> Result<()> {
        let known = SessionProgress::read(repository, place)?.unwrap_or_default().revision;
        if self.revision > known {
            // A crash, or a full disk, kept it from being noted; see `SessionProgress::apply`.
            SessionProgress::note(repository, place, self.revision, &[], self)?;
        }
        let revision = self.revision.max(known) + 1;
        self.revision = revision;
        let text = serde_json::to_vec(self).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "describing a session", error)
        })?;
        let stored = repository.seal_document(&place.purpose(), &text)?;
        replace_file(&place.document(), &stored)?;
        // The document counts from here on: what is missing now only means that less
        // is noticed.
        if let Err(error) = SessionProgress::note(repository, place, revision, &[], self) {
            tracing::warn!(error = %error.full_message(), "an older document of the session would not be noticed");
        }
        Ok(())
    }

    /// Points sealed from this session that wait for a writer to enter them into
    /// the catalog.
    pub fn waiting_points(&self) -> usize {
        self.sealed.len()
    }

    /// The disk of that name.
    ///
    /// Errors: `NotFound`, naming the disks that are there.
    pub fn disk(&self, name: &DiskName) -> Result<&SessionDisk> {
        self.disks.iter().find(|disk| disk.name == *name).ok_or_else(|| {
            let names: Vec<&str> = self.disks.iter().map(|disk| disk.name.as_str()).collect();
            Error::new(
                ErrorKind::NotFound,
                format!("session {} has no disk {name}, only {}", self.name, names.join(", ")),
            )
        })
    }
}

/// Milliseconds since 1970-01-01T00:00:00Z.
pub(crate) fn now_ms() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0)
}
