//! `live/HASH/progress`: how far a session had come at least.
//!
//! A session's document, and the layers that take its writes, are replaced or grow: an
//! older version of one of them, put back, would read as sound. This file beside them
//! remembers a lower bound of both. It is written after what it speaks of is durable,
//! so that a crash leaves it behind, which only means that less is noticed.

use std::collections::BTreeMap;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{LayerId, Repository};
use serde::{Deserialize, Serialize};

use crate::document::SessionDocument;
use crate::place::{replace_file, Place};

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
    /// What is known; nothing where that cannot be told.
    pub(crate) fn read(repository: &Repository, place: &Place) -> SessionProgress {
        let path = place.progress();
        let is_small = path.metadata().is_ok_and(|found| found.len() <= MAX_STORED_BYTES);
        let stored = is_small.then(|| std::fs::read(&path).ok()).flatten();
        let opened =
            stored.and_then(|stored| repository.open_document(&purpose(place), &stored).ok());
        let progress = opened.and_then(|text| serde_json::from_slice(&text).ok());
        progress.unwrap_or_default()
    }

    /// Fills in what the document's layers have to have, and checks its own number.
    /// `self` was read before the document.
    ///
    /// # Errors
    /// `Corrupt` where the document is older than one that was there.
    pub(crate) fn apply(&self, document: &mut SessionDocument, place: &Place) -> Result<()> {
        if document.revision < self.revision {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "{} is older than it was: version {} and not {}",
                    place.document().display(),
                    document.revision,
                    self.revision
                ),
            ));
        }
        for disk in &mut document.disks {
            disk.least_sequence = self.sequences.get(&disk.top.to_string()).copied().unwrap_or(0);
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
        let mut progress = SessionProgress::read(repository, place);
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
        replace_file(&place.progress(), &stored).context(|| "noting a session's progress")
    }
}

fn purpose(place: &Place) -> String {
    format!("progress of {}", place.purpose())
}
