//! The notes of a session about other sites that get its marks.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result, now_ms};
use coldrise_store::{MachineName, Repository, SessionName};
use serde::{Deserialize, Serialize};

use crate::session_folder::notes::{NotesLock, SessionNotes};

/// How far another site has the marks of a session, as a note of the session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteProgress {
    /// The link, by its name here.
    pub link: String,
    /// The session there.
    pub session: Option<String>,
    /// The newest mark there, in milliseconds since 1970.
    pub marked_at_ms: u64,
    /// It has everything that was written until then, in milliseconds since 1970.
    pub current_ms: u64,
    /// Bytes of changes that are not there yet, as far as they are known.
    pub pending_bytes: u64,
    /// Bytes that were sent, as on the line.
    pub sent_bytes: u64,
    /// Marks that were sent.
    pub marks: u64,
    /// Why nothing is sent at this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// A process sends now. Not a part of the note.
    #[serde(skip)]
    pub is_running: bool,
}

impl SiteProgress {
    /// The notes of a session, by the link.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`.
    pub fn all(repository: &Arc<Repository>, session: &SessionName) -> Result<Vec<SiteProgress>> {
        let notes = SessionNotes::of(repository, session)?;
        let names = notes.names(NOTE)?;
        let mut found = Vec::with_capacity(names.len());
        for name in names {
            if let Some(noted) = notes.read_json(&name)? {
                found.push(SiteProgress { is_running: notes.is_working(&name)?, ..noted });
            }
        }
        Ok(found)
    }

    /// The note about a site; `None` if there is none.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`.
    pub fn of(
        repository: &Arc<Repository>,
        session: &SessionName,
        link: &MachineName,
    ) -> Result<Option<SiteProgress>> {
        SessionNotes::of(repository, session)?.read_json(&note_of(link.as_str()))
    }

    /// Lets this process alone send to the site until the result is dropped.
    ///
    /// # Errors
    /// `Busy` if another process sends to it.
    pub fn lock(
        repository: &Arc<Repository>,
        session: &SessionName,
        link: &MachineName,
    ) -> Result<NotesLock> {
        let taken = SessionNotes::of(repository, session)?.lock_of(&note_of(link.as_str()))?;
        taken.ok_or_else(|| {
            let text =
                format!("another process sends the marks of session {session} to site {link}");
            Error::new(ErrorKind::Busy, text)
        })
    }

    /// Notes it.
    ///
    /// # Errors
    /// `NotFound` once the session was ended; errors of the operating system.
    pub fn write(&self, repository: &Arc<Repository>, session: &SessionName) -> Result<()> {
        let notes = SessionNotes::of(repository, session)?;
        notes.write_json(&note_of(&self.link), self)
    }

    /// The time since the state that the site has, in seconds; `None` if it has none.
    pub fn lag_s(&self) -> Option<u64> {
        (self.current_ms > 0).then(|| now_ms().saturating_sub(self.current_ms) / 1000)
    }
}

/// Ends the names of the notes.
const NOTE: &str = ".site";

fn note_of(link: &str) -> String {
    format!("{link}{NOTE}")
}
