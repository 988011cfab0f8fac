//! `session.json`: the description of a session. It is encrypted and replaced whole.

use std::collections::BTreeSet;
use std::path::PathBuf;

use coldrise_block::{Context, Error, ErrorKind, Result, replace_file};
use coldrise_store::{
    CatalogDamage, Configuration, DiskDocument, DiskName, DisplayName, LayerId, LayerReference,
    MachineName, MachinePart, MapRoot, MarkRules, PointDocument, PointName, Repository,
    RepositoryId, SessionName, WayOut,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::layer::Superblock;
use crate::paths::SessionPaths;
use crate::session_folder::progress::SessionProgress;

/// Largest document that is read, in bytes.
const MAX_DOCUMENT_BYTES: u64 = 16 << 20;
/// Number of points of marks that a document knows.
const MARK_POINTS: usize = 32;
/// Most that one layer takes in a document, in bytes.
const LAYER_BYTES: usize = 140;

/// A session: a restore point published for writing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionDocument {
    /// The session's name.
    pub name: SessionName,
    /// The machine whose point was published.
    pub machine: MachineName,
    /// The point that was published.
    pub point: PointName,
    /// Time of the publish, in milliseconds since 1970-01-01T00:00:00Z.
    pub created_at_ms: u64,
    /// The disks, in the point's order.
    pub disks: Vec<SessionDisk>,
    /// The machine's configuration from the point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configuration: Option<Configuration>,
    /// The machine's parts beside its disks: the point's, then as the machine left them. A seal takes them over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<MachinePart>,
    /// The parts have changed since the last seal.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) has_new_parts: bool,
    /// Writes in sealed layers, or files or parts, may be in no point: the last seal made a point of a time mark.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) has_unsealed_writes: bool,
    /// The machine's display name from the point.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "DisplayName::read_stored"
    )]
    pub(crate) display_name: Option<DisplayName>,
    /// The files of clients; absent if a version without them published the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) files: Option<SessionFiles>,
    /// Points sealed from this session that no writer has entered into the catalog yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sealed: Vec<PointDocument>,
    /// The highest number of a synthetic point of `point`'s time that the catalog or this session
    /// knew. A higher number of this session comes from a later document (see `rollback_guard`).
    /// Absent in older sessions until they are sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) highest_number: Option<u32>,
    /// Which time marks are kept; `None` for a session of a version without marks, and for one that
    /// lives as long as its command: they make none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) marks: Option<MarkRules>,
    /// Where the machine runs whose disks the session follows. Only the process that follows them writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<String>,
    /// The session at another site whose marks come here, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received: Option<ReceivedFrom>,
    /// The last points that show marks, by the time of the mark.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) mark_points: Vec<(u64, PointName)>,
    /// The time of the point, while its copy to this repository has not ended. The disks name no map then; see
    /// `incoming`.
    #[serde(default, rename = "coming_created_at_ms", skip_serializing_if = "Option::is_none")]
    pub(crate) incoming_created_at_ms: Option<u64>,
    /// The session was ended. The document stays only until its points are in the catalog.
    #[serde(default)]
    pub(crate) is_ended: bool,
    /// Each new document has a higher revision than the one before.
    #[serde(default)]
    pub(crate) revision: u64,
}

/// A session at another site.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceivedFrom {
    /// The link over which it comes, by its name here.
    pub link: MachineName,
    /// The repository there.
    pub repository: RepositoryId,
    /// Its name there.
    pub session: SessionName,
    /// When it was published there, in milliseconds since 1970.
    pub created_at_ms: u64,
}

/// The files of clients, as a session's document describes them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionFiles {
    /// The hash of the newest point's files, or of the files with which the session began. Files
    /// are unchanged if a seal would carry the same hash.
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
    pub(crate) root: MapRoot,
    /// Sealed layers, the bottom one first: the point's layers, then this session's.
    pub layers: Vec<LayerReference>,
    /// The layer that takes the writes.
    pub top: LayerId,
    /// The top layer's last sequence number when the session was last closed. A layer that does not
    /// reach it is an older version of itself.
    #[serde(default)]
    pub(crate) least_sequence: u64,
    /// The most that the top layer captures, in bytes of blocks; `None` if only the drive bounds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) captured_bytes_limit: Option<u64>,
}

impl SessionDisk {
    /// The expected superblock of the top layer.
    pub(crate) fn top_superblock(&self) -> Superblock {
        Superblock { id: self.top.0, disk_size_bytes: self.size_bytes }
    }

    /// The disk without its top layer, as a point describes it.
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
    /// Refuses to read the session's disks as they are, without a time, if it follows a machine.
    ///
    /// Errors: `Busy`, naming a time that can be read.
    pub(crate) fn check_readable_now(&self) -> Result<()> {
        if self.follows.is_none() {
            return Ok(());
        }
        let (name, machine) = (&self.name, &self.machine);
        let text = format!(
            "session {name} follows machine {machine}: between two of its times its disks are a mixture of both"
        );
        Err(Error::new(ErrorKind::Busy, text).advise(format!("name a time: live/{name}@-5s")))
    }

    /// Reads the document in `place`; `None` if there is none.
    pub(crate) fn read(repository: &Repository, place: &SessionPaths) -> Result<Option<Self>> {
        loop {
            // Read the progress before the document: the document is replaced first.
            let progress = SessionProgress::read(repository, place);
            let Some(document) = Self::read_alone(repository, place)? else { return Ok(None) };
            // Both files were created in between.
            if matches!(progress, Ok(None)) && SessionProgress::is_there(place)? {
                continue;
            }
            SessionProgress::check(progress?, document.revision, place)?;
            return Ok(Some(document));
        }
    }

    fn read_alone(repository: &Repository, place: &SessionPaths) -> Result<Option<Self>> {
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
        let text = repository.decrypt_document(&place.purpose(), &stored).context(what)?;
        serde_json::from_slice(&text).map(Some).map_err(|error| {
            let message = format!("{} has an unknown form", path.display());
            Error::with_source(ErrorKind::Corrupt, message, error)
        })
    }

    /// The document of an existing session.
    ///
    /// Errors: `NotFound`, naming the existing sessions.
    pub(crate) fn of(repository: &Repository, name: &SessionName) -> Result<Self> {
        let place = SessionPaths::of(repository, name);
        let found = Self::read(repository, &place);
        match found
            .map_err(|error| describe(repository, &place, error))?
            .filter(|document| !document.is_ended)
        {
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

    /// All readable documents, those of ended sessions included. A damaged one hides no other: it
    /// is logged once per process, and verify and doctor name it.
    pub(crate) fn readable(repository: &Repository) -> Result<Vec<(SessionPaths, Self)>> {
        let mut documents = Vec::new();
        for place in SessionPaths::all(repository)? {
            match Self::read(repository, &place) {
                Ok(document) => documents.extend(document.map(|document| (place, document))),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    if LOGGED.lock().insert(place.document()) {
                        let damage = damage(repository, &place, &error).message();
                        tracing::warn!(%damage, "a damaged session is left out");
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(documents)
    }

    /// All documents, those of ended sessions included.
    pub(crate) fn all(repository: &Repository) -> Result<Vec<(SessionPaths, Self)>> {
        let mut documents = Vec::new();
        for place in SessionPaths::all(repository)? {
            let read = Self::read(repository, &place);
            if let Some(document) = read.map_err(|error| describe(repository, &place, error))? {
                documents.push((place, document));
            }
        }
        Ok(documents)
    }

    /// Writes the document durably. The caller holds the documents' lock.
    pub(crate) fn write(&mut self, repository: &Repository, place: &SessionPaths) -> Result<()> {
        let known = SessionProgress::read(repository, place)?.unwrap_or_default().revision;
        if self.revision > known {
            // A crash or a full disk prevented this note; see `SessionProgress::check`.
            SessionProgress::note(repository, place, self.revision)?;
        }
        let revision = self.revision.max(known) + 1;
        self.revision = revision;
        let text = serde_json::to_vec(self).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "describing a session", error)
        })?;
        if text.len() as u64 > MAX_DOCUMENT_BYTES - 64 {
            let text = format!(
                "the sealed points of session {} that wait for a writer take too much",
                self.name
            );
            return Err(Error::new(ErrorKind::NoSpace, text)
                .advise("let one enter them into the catalog: coldrise gc"));
        }
        let stored = repository.encrypt_document(&place.purpose(), &text)?;
        replace_file(&place.document(), &stored)?;
        // The document is valid from here on. If the note is missing, only less damage is detected.
        if let Err(error) = SessionProgress::note(repository, place, revision) {
            tracing::warn!(error = %error.full_message(), "the state of a session was not noted: verify would not find that its document was replaced by an older copy");
        }
        Ok(())
    }

    /// True if the point had not arrived completely when a process last had the session open.
    pub fn is_incoming(&self) -> bool {
        self.incoming_created_at_ms.is_some()
    }

    /// Which time marks are kept.
    pub fn mark_rules(&self) -> MarkRules {
        self.marks.clone().unwrap_or_else(MarkRules::off)
    }

    /// The point that was sealed at the mark of this time, if it is known.
    pub(crate) fn point_of_mark(&self, time_ns: u64) -> Option<(MachineName, PointName)> {
        let found = self.mark_points.iter().find(|(time, _)| *time == time_ns);
        found.map(|(_, point)| (self.machine.clone(), point.clone()))
    }

    pub(crate) fn note_mark_point(&mut self, time_ns: u64, point: &PointName) {
        let surplus = (self.mark_points.len() + 1).saturating_sub(MARK_POINTS);
        self.mark_points.drain(..surplus);
        self.mark_points.push((time_ns, point.clone()));
    }

    /// The part of this kind beside the disks.
    pub fn part(&self, kind: &str) -> Option<&MachinePart> {
        self.parts.iter().find(|part| part.kind == kind)
    }

    /// Size of the parts and layers of the points in the document that wait for a writer, in bytes. Each point
    /// names all layers below it.
    pub fn waiting_bytes(&self) -> usize {
        let parts = self.sealed.iter().flat_map(|point| &point.parts);
        let disks = self.sealed.iter().flat_map(|point| &point.disks);
        let layers: usize = disks.map(|disk| disk.layers.len()).sum();
        parts.map(MachinePart::stored_bytes).sum::<usize>() + layers * LAYER_BYTES
    }

    /// Number of points sealed from this session that wait for a writer to enter them into the
    /// catalog.
    pub fn waiting_points(&self) -> usize {
        self.sealed.len()
    }

    /// The disk with this name.
    ///
    /// Errors: `NotFound`, naming the existing disks.
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

/// Damaged documents that this process has logged.
static LOGGED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// The damage of a session whose document failed with this error. Names the session if its marker
/// is readable.
pub(crate) fn damage(
    repository: &Repository,
    place: &SessionPaths,
    error: &Error,
) -> CatalogDamage {
    let marked = repository.marked().unwrap_or_default();
    let is_there = |name: &&String| {
        let session = name.strip_prefix("live/").and_then(|name| SessionName::parse(name).ok());
        session.is_some_and(|session| {
            SessionPaths::of(repository, &session).directory() == place.directory()
        })
    };
    let reason = error.full_message();
    match marked.iter().find(is_there) {
        Some(name) => CatalogDamage { what: name.clone(), reason, way_out: WayOut::GiveUp },
        None => {
            CatalogDamage::new(format!("the session in {}", place.directory().display()), reason)
        }
    }
}

/// Turns the error of a damaged document into one for users.
fn describe(repository: &Repository, place: &SessionPaths, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Corrupt => {
            Error::new(ErrorKind::Corrupt, damage(repository, place, &error).message())
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_of_an_incoming_point_has_the_stored_form_of_earlier_versions() {
        let stored = serde_json::json!({
            "name": "s", "machine": "m", "point": "20261120T100000Z", "created_at_ms": 1,
            "disks": [], "coming_created_at_ms": 5, "is_ended": false, "revision": 2,
        });
        let document: SessionDocument = serde_json::from_value(stored.clone()).unwrap();
        assert!(document.is_incoming());
        assert_eq!(serde_json::to_value(&document).unwrap(), stored);
    }
}
