//! `live/HASH/progress` and `progress-copy`: the number of the session's last document.
//!
//! They reveal an older document that was put back; see [`crate::rollback_guard`].

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use coldrise_block::{
    Context, Error, ErrorKind, IS_FOLDER, Result, create_private, path_exists, rename_over,
    replace_file, temporary_path,
};
use coldrise_store::Repository;
use serde::{Deserialize, Serialize};

use crate::paths::SessionPaths;

const MAX_STORED_BYTES: u64 = 1 << 20;

/// The progress of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionProgress {
    /// Number of the document. Each new document has a higher one.
    pub(crate) revision: u64,
}

impl SessionProgress {
    /// The later of the two copies. `None` if neither exists.
    ///
    /// # Errors
    /// `Corrupt` if neither can be read.
    pub(crate) fn read(
        repository: &Repository,
        place: &SessionPaths,
    ) -> Result<Option<SessionProgress>> {
        let (mut known, mut reason) = (None::<SessionProgress>, None);
        for path in place.progress() {
            match read_copy(repository, place, &path) {
                Ok(Some(copy)) if known.is_none_or(|known| known.revision < copy.revision) => {
                    known = Some(copy);
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Corrupt => reason = Some(error),
                Err(error) => return Err(error),
            }
        }
        match (known, reason) {
            (None, Some(error)) => Err(error).context(|| lost(place)),
            (known, _) => Ok(known),
        }
    }

    /// True if one of the copies exists.
    pub(crate) fn is_there(place: &SessionPaths) -> Result<bool> {
        let [first, second] = place.progress();
        Ok(path_exists(&first)? || path_exists(&second)?)
    }

    /// Compares the document's `revision` with the known progress, which was read before the
    /// document.
    ///
    /// # Errors
    /// `Corrupt` if one is older than the other requires, or if no progress is known.
    pub(crate) fn check(
        known: Option<SessionProgress>,
        revision: u64,
        place: &SessionPaths,
    ) -> Result<()> {
        let Some(SessionProgress { revision: known }) = known else {
            // Each later document is written only after the previous one was noted.
            if revision > 1 {
                return Err(Error::new(ErrorKind::Corrupt, lost(place)));
            }
            return Ok(());
        };
        let [first, _] = place.progress();
        let (path, found, expected) = if revision < known {
            (place.document(), revision, known)
        } else if revision > known.saturating_add(1) {
            (first, known, revision)
        } else {
            return Ok(());
        };
        let path = path.display();
        let message = format!("{path} is older than it was: version {found} and not {expected}");
        Err(Error::new(ErrorKind::Corrupt, message))
    }

    /// Notes a durable document. The caller holds the documents' lock.
    pub(crate) fn note(repository: &Repository, place: &SessionPaths, revision: u64) -> Result<()> {
        let known = SessionProgress::read(repository, place)?.unwrap_or_default().revision;
        let progress = SessionProgress { revision: revision.max(known) };
        let text = serde_json::to_vec(&progress).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "describing a session's progress", error)
        })?;
        let stored = repository.encrypt_document(&purpose(place), &text)?;
        let [first, second] = place.progress();
        let what = |path: &Path| format!("writing {}", path.display());
        replace_file(&first, &stored).context(|| what(&first))?;
        // The copy is not synced: if a power cut loses it, the first file exists.
        let temporary = temporary_path(&second);
        create_private(&temporary)
            .and_then(|mut file| file.write_all(&stored))
            .and_then(|()| rename_over(&temporary, &second))
            .context(|| what(&second))
    }
}

pub(crate) fn read_copy(
    repository: &Repository,
    place: &SessionPaths,
    path: &Path,
) -> Result<Option<SessionProgress>> {
    let what = || format!("reading {}", path.display());
    let stored = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        _ if path.is_dir() => return Err(Error::new(ErrorKind::Corrupt, IS_FOLDER)).context(what),
        opened => opened.and_then(|file| {
            let mut stored = Vec::new();
            file.take(MAX_STORED_BYTES).read_to_end(&mut stored).map(|_| stored)
        }),
    };
    let text =
        repository.decrypt_document(&purpose(place), &stored.context(what)?).context(what)?;
    let progress = serde_json::from_slice(&text).map_err(|error| {
        let message = format!("{} has an unknown form", path.display());
        Error::with_source(ErrorKind::Corrupt, message, error)
    });
    progress.map(Some)
}

fn purpose(place: &SessionPaths) -> String {
    format!("progress of {}", place.purpose())
}

fn lost(place: &SessionPaths) -> String {
    let [first, second] = place.progress().map(|path| path.display().to_string());
    format!(
        "neither {first} nor {second} can be read: whether the session is an older version of \
         itself cannot be determined. Put one of them back from a copy of the repository"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_content_of_progress_is_pinned() {
        let text = r#"{"revision":7}"#;
        let progress = SessionProgress { revision: 7 };
        assert_eq!(serde_json::to_string(&progress).unwrap(), text);
        let older = r#"{"revision":7,"sequences":{"00":3}}"#;
        for text in [text, older] {
            assert_eq!(serde_json::from_str::<SessionProgress>(text).unwrap(), progress);
        }
    }
}
