//! `live/HASH/progress` and `progress-copy`: how far a session had come at least.
//!
//! A session's document, and the layers that take its writes, are replaced or grow: an
//! older version of one of them, put back, would read as sound. This file beside them
//! remembers a lower bound of both. It is written after what it speaks of is durable,
//! so that a crash leaves it behind, which only means that less is noticed. There are two
//! copies with the same content, the first of them synced: damage to one is healed
//! by the next write. Without either nothing could be told: that is damage to the session,
//! but for a session whose first document a crash left without them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{LayerId, Repository};
use serde::{Deserialize, Serialize};

use crate::document::SessionDocument;
use crate::place::{is_there, replace_file, unfinished, Place};

const MAX_STORED_BYTES: u64 = 1 << 20;

/// What a session had reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionProgress {
    /// Number of the document: each that is written has a higher one.
    pub(crate) revision: u64,
    /// By id of a layer that takes writes: the last sequence number when it was closed.
    pub(crate) sequences: BTreeMap<String, u64>,
}

impl SessionProgress {
    /// What is known. `None` where neither copy is there.
    ///
    /// # Errors
    /// `Corrupt` where none can be read.
    pub(crate) fn read(repository: &Repository, place: &Place) -> Result<Option<SessionProgress>> {
        let (mut known, mut reason) = (None::<SessionProgress>, None);
        for path in place.progress() {
            match read_copy(repository, place, &path) {
                Ok(Some(copy)) => known = Some(known.map_or(copy.clone(), |known| known.or(copy))),
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Corrupt => reason = Some(error),
                Err(error) => return Err(error),
            }
        }
        match (known, reason) {
            (None, Some(error)) => Err(error).context(|| lost(place)),
            (known, _) => Ok(known),
        }
    }

    /// Whether one of the copies is there.
    pub(crate) fn is_there(place: &Place) -> Result<bool> {
        let [first, second] = place.progress();
        Ok(is_there(&first)? || is_there(&second)?)
    }

    /// The later of both in everything.
    fn or(mut self, other: SessionProgress) -> SessionProgress {
        self.revision = self.revision.max(other.revision);
        for (layer, sequence) in other.sequences {
            let known = self.sequences.entry(layer).or_default();
            *known = sequence.max(*known);
        }
        self
    }

    /// Fills in what the document's layers have to have, and checks its own number.
    /// `known` was read before the document.
    ///
    /// # Errors
    /// `Corrupt` where the document is older than one that was there, or nothing is known.
    pub(crate) fn apply(
        known: Option<SessionProgress>,
        document: &mut SessionDocument,
        place: &Place,
    ) -> Result<()> {
        let Some(known) = known else {
            // Each later document is written when the one before is known.
            if document.revision > 1 {
                return Err(Error::new(ErrorKind::Corrupt, lost(place)));
            }
            return Ok(());
        };
        if document.revision < known.revision {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "{} is older than it was: version {} and not {}",
                    place.document().display(),
                    document.revision,
                    known.revision
                ),
            ));
        }
        for disk in &mut document.disks {
            disk.least_sequence = known.sequences.get(&disk.top.to_string()).copied().unwrap_or(0);
        }
        Ok(())
    }

    /// Notes what layers have reached now, durably. The documents' lock is held.
    pub(crate) fn note(
        repository: &Repository,
        place: &Place,
        revision: u64,
        reached: &[(LayerId, u64)],
        document: &SessionDocument,
    ) -> Result<()> {
        let mut progress = SessionProgress::read(repository, place)?.unwrap_or_default();
        progress.revision = progress.revision.max(revision);
        for (layer, sequence) in reached {
            progress.sequences.insert(layer.to_string(), *sequence);
        }
        let is_top = |id: &String| document.disks.iter().any(|disk| disk.top.to_string() == *id);
        progress.sequences.retain(|id, _| is_top(id));
        let text = serde_json::to_vec(&progress).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "describing a session's progress", error)
        })?;
        let stored = repository.seal_document(&purpose(place), &text)?;
        let [first, second] = place.progress();
        let what = || "noting a session's progress";
        replace_file(&first, &stored).context(what)?;
        // Not synced: where a power cut loses it, the first one is there.
        let temporary = unfinished(&second);
        std::fs::write(&temporary, &stored)
            .and_then(|()| std::fs::rename(&temporary, &second))
            .context(what)
    }
}

fn read_copy(
    repository: &Repository,
    place: &Place,
    path: &Path,
) -> Result<Option<SessionProgress>> {
    let what = || format!("reading {}", path.display());
    let stored = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        opened => opened.and_then(|file| {
            let mut stored = Vec::new();
            file.take(MAX_STORED_BYTES).read_to_end(&mut stored).map(|_| stored)
        }),
    };
    let text = repository.open_document(&purpose(place), &stored.context(what)?).context(what)?;
    let progress = serde_json::from_slice(&text).map_err(|error| {
        let message = format!("{} has an unknown form", path.display());
        Error::with_source(ErrorKind::Corrupt, message, error)
    });
    progress.map(Some)
}

fn lost(place: &Place) -> String {
    let [first, second] = place.progress().map(|path| path.display().to_string());
    format!(
        "neither {first} nor {second} can be read: whether the session is an older version of \
         itself cannot be told. Put one of them back from a copy of the repository"
    )
}

fn purpose(place: &Place) -> String {
    format!("progress of {}", place.purpose())
}
