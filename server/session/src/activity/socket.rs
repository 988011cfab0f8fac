//! The socket through which other processes ask for the counts of a served session.

use coldrise_block::now_ms;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{DiskName, Repository};
use serde::{Deserialize, Serialize};

use super::counters::Counters;
use super::sample::SessionActivity;
use crate::hexadecimal;
use crate::locks::file_lock::FileLock;
use crate::paths::{ACTIVITY, SessionPaths};
use crate::session_folder::document::SessionDocument;
use crate::sockets::local_socket::{Answers, LocalSocket, ask, send};

/// Longest wait for an answer. The server only reads numbers in its memory: one that takes longer is
/// stopped, or the host is overloaded.
const PATIENCE: Duration = Duration::from_secs(1);

/// The request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivityDetail {
    /// Counts only.
    Totals,
    /// Also a heat map per disk.
    HeatMaps,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// A [`SessionActivity`], encrypted for this session: without the key a process can neither read
    /// counts nor invent them.
    Activity(#[serde(with = "hexadecimal")] Vec<u8>),
    /// The session is being closed.
    Closing,
}

/// The counters of an open session. They do not keep it open.
pub(crate) struct Served {
    pub(crate) repository: Arc<Repository>,
    pub(crate) place: SessionPaths,
    pub(crate) disks: Vec<(DiskName, Arc<Counters>)>,
}

/// The listening side. Dropping it ends the listening.
pub(crate) struct ActivitySocket {
    _socket: LocalSocket,
}

impl ActivitySocket {
    /// Answers questions about an open session. The caller holds the session's lock.
    pub(crate) fn listen(served: Served) -> Result<ActivitySocket> {
        let folder = served.place.directory().to_owned();
        let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let answers = ActivityAnswers {
            served,
            program: program.trim_end().to_owned(),
            opened_at_ms: now_ms(),
        };
        let socket = LocalSocket::listen(&folder, ACTIVITY, answers)?;
        Ok(ActivitySocket { _socket: socket })
    }
}

struct ActivityAnswers {
    served: Served,
    program: String,
    opened_at_ms: u64,
}

impl ActivityAnswers {
    fn sample(&self, detail: ActivityDetail) -> SessionActivity {
        let with_heat_maps = detail == ActivityDetail::HeatMaps;
        let sample = |(name, counters): &(DiskName, Arc<Counters>)| {
            counters.sample(name.as_str(), with_heat_maps)
        };
        SessionActivity {
            program: self.program.clone(),
            process: std::process::id(),
            opened_at_ms: self.opened_at_ms,
            sampled_at_ms: now_ms(),
            disks: self.served.disks.iter().map(sample).collect(),
        }
    }
}

impl Answers for ActivityAnswers {
    fn answer(&self, request: &str, stream: UnixStream) -> Result<()> {
        // An asker that does not read must not hold up others for long.
        stream.set_write_timeout(Some(PATIENCE)).context(|| "answering a request")?;
        let detail = serde_json::from_str(request).map_err(|error| {
            Error::with_source(ErrorKind::InvalidInput, "a question about activity", error)
        })?;
        let text = serde_json::to_vec(&self.sample(detail))
            .map_err(|error| Error::with_source(ErrorKind::Internal, "activity", error))?;
        let Served { repository, place, .. } = &self.served;
        let sealed = repository.encrypt_document(&purpose(place), &text)?;
        send(&stream, &Answer::Activity(sealed))
    }

    fn decline(&self, stream: &UnixStream) -> Result<()> {
        send(stream, &Answer::Closing)
    }
}

/// The encryption purpose of the counts.
fn purpose(place: &SessionPaths) -> String {
    format!("activity of {}", place.purpose())
}

/// What clients did with a session since its server opened it. `None` if no process serves it now, or one that
/// counts nothing: of an older version.
///
/// # Errors
/// `Busy` if its process does not answer within a second; `Corrupt` for an answer that does not
/// authenticate, or is of other disks or of another time; `PermissionDenied` if another user serves
/// the session; `Io`.
pub fn session_activity(
    repository: &Repository,
    session: &SessionDocument,
    detail: ActivityDetail,
) -> Result<Option<SessionActivity>> {
    let place = SessionPaths::of(repository, &session.name);
    let asked_at_ms = now_ms();
    let Some(mut asked) = ask(place.directory(), ACTIVITY, &detail, PATIENCE)? else {
        return Ok(None);
    };
    let sealed = match asked.next()? {
        Some(Answer::Activity(sealed)) => sealed,
        Some(Answer::Closing) => return Ok(None),
        None => {
            let text = format!("the process that serves session {} does not answer", session.name);
            return Err(Error::new(ErrorKind::Busy, text));
        }
    };
    let text = repository.decrypt_document(&purpose(&place), &sealed)?;
    let activity: SessionActivity = serde_json::from_slice(&text).map_err(|error| {
        Error::with_source(ErrorKind::Unsupported, "the server is of another version", error)
    })?;
    let disks: Vec<&str> = session.disks.iter().map(|disk| disk.name.as_str()).collect();
    activity.check(&disks, asked_at_ms)?;
    Ok(Some(activity))
}

/// The documents of the sessions that a process has open for writing now. Others are not read.
///
/// # Errors
/// Errors of the operating system. A damaged document is left out.
pub fn served_sessions(repository: &Repository) -> Result<Vec<SessionDocument>> {
    let mut found = Vec::new();
    for place in SessionPaths::all(repository)? {
        if FileLock::is_held(&place.lock())? {
            let document = SessionDocument::read(repository, &place).ok().flatten();
            found.extend(document.filter(|document| !document.is_ended));
        }
    }
    Ok(found)
}
