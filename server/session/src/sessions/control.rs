//! The control socket of the process that serves a session. The command line asks for a seal
//! through it, and a fold asks it to put the session's disks over a new chunk map.
//!
//! A seal that the asker gave up must never appear later. The documents' lock decides:
//!
//! ```text
//! asker                                 server
//! Seal                    ─▶            prepares: new layers, flush
//!                                       takes live/lock
//!                                       has the asker left? then it ends here, nothing was sealed
//!                         ◀─            Committing
//!                                       replaces session.json
//!                                       frees live/lock
//!                         ◀─            Sealed, Failed
//! ```
//!
//! An asker that gives up takes live/lock first, reads the answers that have come, and closes the
//! connection before it releases the lock. If the server had the lock before, `Committing` has
//! come, and the asker waits for the outcome. If the server gets the lock later, it sees that the
//! asker has left. A killed asker has left, too.
//!
//! A rebase changes nothing visible, so a fold need not learn the outcome of one that it gave up.
//! But a rebase must not happen after the fold has ended: a gc could have deleted the map. Under
//! live/lock the server checks that the asker is still there. If it is, no gc runs, and the next gc
//! reads the new document.
//!
//! One window remains: the server is stopped while it holds the lock. Then the asker can neither
//! give up nor learn the outcome, and reports that.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{Repository, SessionName};
use serde::{Deserialize, Serialize};

use crate::hexadecimal;
use crate::locks::file_lock::{FileLock, PASSING_PATIENCE, PROBE_PATIENCE};
use crate::paths::{CONTROL, SessionPaths};
use crate::sessions::changes::HeldMarks;
use crate::sessions::marks::{SessionMark, SessionMarks};
use crate::sessions::seal_report::SealReport;
use crate::sockets::local_socket::{Answers, LocalSocket, PendingAnswers, ask, has_left, send};

/// Interval between two looks of the asker at the clock.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// After this time the user gets a message that names the process.
const NOTICE: Duration = Duration::from_secs(2);
/// Longest wait for a commit that has begun. A commit is short.
const COMMIT_PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for a rebase. A rebase flushes nothing, but a running seal comes first. A request
/// to end does not shorten the wait: if the session kept its layers, they would be read and folded
/// once more.
const REBASE_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    Seal,
    /// Seals the session as it was at a mark.
    SealMark(SessionMark),
    /// Asks for the marks.
    Marks,
    /// Asks to hold the newest mark and those of these times, in place of what this holder asked for before.
    Hold {
        holder: u64,
        times_ns: Vec<u64>,
    },
    /// Replaces layers by [`crate::sessions::folded_disks::FoldedDisks`]. They are encrypted for this
    /// session: an asker without the key must not choose the content of a disk.
    Rebase(#[serde(with = "hexadecimal")] Vec<u8>),
    /// Asks for a sign of life.
    Greet,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// The point appears now, unless the commit fails. Sent under the documents' lock.
    Committing,
    Sealed(Box<SealReport>),
    /// True if a disk was moved.
    Rebased(bool),
    Marks(Box<SessionMarks>),
    Held(Box<HeldMarks>),
    Greeted,
    Failed {
        kind: String,
        message: String,
    },
    /// The session is being closed. Nothing was done.
    Closing,
}

/// The requests that a served session answers.
pub(crate) trait ServedSession: Send + Sync {
    /// Seals the session as it is, or as it was at `mark`. Nothing is sealed if `may_commit` fails
    /// under the documents' lock.
    fn seal_if(
        &self,
        mark: Option<&SessionMark>,
        may_commit: &dyn Fn() -> Result<()>,
    ) -> Result<SealReport>;

    /// The marks of the session.
    fn marks(&self) -> SessionMarks;

    /// Holds the newest mark and those of these times for `holder`, for two minutes.
    fn hold(&self, holder: u64, times_ns: &[u64]) -> HeldMarks;

    /// Reads folded disks, encrypted for [`rebase_purpose`], instead of layers. Returns true if a
    /// disk was moved.
    fn rebase(&self, folded: &[u8], may_commit: &dyn Fn() -> Result<()>) -> Result<bool>;
}

/// The listening side. Dropping it ends the listening.
pub(crate) struct ControlSocket {
    _socket: LocalSocket,
}

impl ControlSocket {
    /// Listens for requests to `session`.
    pub(crate) fn listen(
        place: &SessionPaths,
        session: Weak<dyn ServedSession>,
    ) -> Result<ControlSocket> {
        let socket = LocalSocket::listen(place.directory(), CONTROL, SessionAnswers { session })?;
        Ok(ControlSocket { _socket: socket })
    }
}

struct SessionAnswers {
    session: Weak<dyn ServedSession>,
}

impl Answers for SessionAnswers {
    fn answer(&self, request: &str, stream: UnixStream) -> Result<()> {
        let asked = serde_json::from_str::<Request>(request);
        // Hold the session only from here on: a silent asker must not keep it open.
        let Some(session) = self.session.upgrade() else { return self.decline(&stream) };
        let mark = match asked {
            Ok(Request::Seal) => None,
            Ok(Request::SealMark(mark)) => Some(mark),
            Ok(Request::Marks) => {
                return send(&stream, &Answer::Marks(Box::new(session.marks())));
            }
            Ok(Request::Hold { holder, times_ns }) => {
                return send(&stream, &Answer::Held(Box::new(session.hold(holder, &times_ns))));
            }
            Ok(Request::Rebase(folded)) => {
                let rebased = session.rebase(&folded, &|| check_asker(&stream));
                let answer = rebased.map_or_else(|error| failed(&error), Answer::Rebased);
                return send(&stream, &answer);
            }
            Ok(Request::Greet) => return send(&stream, &Answer::Greeted),
            Err(error) => {
                let message = format!("unknown request: {error}");
                return send(&stream, &failed(&Error::new(ErrorKind::Unsupported, message)));
            }
        };
        check_asker(&stream)?;
        let may_commit = || {
            check_asker(&stream)?;
            send(&stream, &Answer::Committing)
        };
        let answer = match session.seal_if(mark.as_ref(), &may_commit) {
            Ok(sealed) => Answer::Sealed(Box::new(sealed)),
            Err(error) => failed(&error),
        };
        send(&stream, &answer)
    }

    fn decline(&self, stream: &UnixStream) -> Result<()> {
        send(stream, &Answer::Closing)
    }
}

fn failed(error: &Error) -> Answer {
    Answer::Failed { kind: error.kind().word().to_owned(), message: error.full_message() }
}

/// # Errors
/// `Interrupted` if the asker has left.
fn check_asker(stream: &UnixStream) -> Result<()> {
    if has_left(stream)? {
        Err(Error::new(ErrorKind::Interrupted, "the request was cancelled: nothing was changed"))
    } else {
        Ok(())
    }
}

/// Asks the process that serves the session to seal it, as it is or as it was at `mark`, and gives
/// up after `patience`. Returns `None` if no process serves it, or if that process ends before it
/// sealed.
///
/// # Errors
/// `Busy` if the seal was cancelled: it never happens. `Io` if the server was stopped during the
/// commit: the message says how to find out the outcome. Otherwise the server's error.
pub(crate) fn ask_for_seal(
    repository: &Arc<Repository>,
    place: &SessionPaths,
    name: &SessionName,
    mark: Option<&SessionMark>,
    patience: Duration,
) -> Result<Option<SealReport>> {
    let request = mark.map_or(Request::Seal, |mark| Request::SealMark(mark.clone()));
    let Some(mut asked) = ask(place.directory(), CONTROL, &request, LOOK_INTERVAL)? else {
        return Ok(None);
    };
    let server = || server_of(place);
    let unknown = || {
        let message = format!(
            "session {name}: {} stopped during the commit; coldrise list shows whether the point \
             is there",
            server()
        );
        Err(Error::new(ErrorKind::Io, message))
    };
    let (start, mut is_committing, mut is_noticed) = (Instant::now(), false, false);
    loop {
        if !is_noticed && start.elapsed() >= NOTICE {
            is_noticed = true;
            let seconds = patience.as_secs();
            tracing::warn!(
                "session {name}: {} has not answered yet; waiting for up to {seconds} s",
                server()
            );
        }
        let is_late = start.elapsed() >= patience;
        let cancelled = if is_late && !is_committing {
            match FileLock::documents_within(repository, COMMIT_PATIENCE)? {
                Some(lock) => Some(lock),
                None => return unknown(),
            }
        } else {
            None
        };
        match asked.next() {
            Ok(Some(Answer::Committing)) => is_committing = true,
            // The answer to another question.
            Ok(Some(Answer::Greeted | Answer::Rebased(_) | Answer::Marks(_) | Answer::Held(_))) => {
            }
            Ok(Some(Answer::Sealed(sealed))) => return Ok(Some(*sealed)),
            Ok(Some(Answer::Closing)) => return Ok(None),
            Ok(Some(Answer::Failed { kind, message })) => {
                let kind = ErrorKind::from_word(&kind).unwrap_or(ErrorKind::Io);
                let what = format!("session {name}: {} did not seal it: {message}", server());
                return Err(Error::new(kind, what));
            }
            Ok(None) if cancelled.is_some() => {
                let message = format!(
                    "session {name}: {} did not answer within {} s, so the seal was cancelled and \
                     will not happen: check whether that process is stopped or its disk is slow, \
                     and try again, with --wait SECONDS to wait longer",
                    server(),
                    patience.as_secs()
                );
                drop((asked, cancelled));
                return Err(Error::new(ErrorKind::Busy, message));
            }
            Ok(None) if start.elapsed() >= patience.saturating_add(COMMIT_PATIENCE) => {
                return unknown();
            }
            Ok(None) => {}
            // The server was killed before it could seal.
            Err(_) if !is_committing => return Ok(None),
            Err(_) => return unknown(),
        }
    }
}

/// Asks the process that serves the session for its marks. `None` if no process serves it.
///
/// # Errors
/// `Busy` if it does not answer.
pub(crate) fn ask_for_marks(
    place: &SessionPaths,
    name: &SessionName,
) -> Result<Option<SessionMarks>> {
    let marks = |answer| match answer {
        Answer::Marks(marks) => Some(*marks),
        _ => None,
    };
    ask_about_marks(place, name, &Request::Marks, marks)
}

/// Asks the process that serves the session to hold marks. `None` if no process has it.
///
/// # Errors
/// `Busy` if it does not answer.
pub(crate) fn ask_to_hold(
    place: &SessionPaths,
    name: &SessionName,
    holder: u64,
    times_ns: &[u64],
) -> Result<Option<HeldMarks>> {
    let held = |answer| match answer {
        Answer::Held(held) => Some(*held),
        _ => None,
    };
    ask_about_marks(place, name, &Request::Hold { holder, times_ns: times_ns.to_vec() }, held)
}

/// A process that opens or closes the session does not answer, and its marks are not in the layers yet: waits for it.
fn ask_about_marks<T>(
    place: &SessionPaths,
    name: &SessionName,
    request: &Request,
    wanted: impl Fn(Answer) -> Option<T>,
) -> Result<Option<T>> {
    let start = Instant::now();
    loop {
        let answer = ask_server_about_marks(place, name, request, &wanted)?;
        if answer.is_some() || !FileLock::is_held(&place.lock())? {
            return Ok(answer);
        }
        if start.elapsed() >= PASSING_PATIENCE {
            return Err(no_answer(place, name));
        }
        std::thread::sleep(LOOK_INTERVAL / 4);
    }
}

fn no_answer(place: &SessionPaths, name: &SessionName) -> Error {
    let message = format!(
        "session {name}: {} does not answer; check whether that process is stopped",
        server_of(place)
    );
    Error::new(ErrorKind::Busy, message)
}

fn ask_server_about_marks<T>(
    place: &SessionPaths,
    name: &SessionName,
    request: &Request,
    wanted: impl Fn(Answer) -> Option<T>,
) -> Result<Option<T>> {
    let start = Instant::now();
    let Some(mut asked) = ask(place.directory(), CONTROL, request, LOOK_INTERVAL)? else {
        return Ok(None);
    };
    loop {
        match asked.next() {
            Ok(Some(Answer::Failed { kind, message })) => {
                let kind = ErrorKind::from_word(&kind).unwrap_or(ErrorKind::Io);
                let what = format!("session {name}: {} has no marks: {message}", server_of(place));
                return Err(Error::new(kind, what));
            }
            Ok(Some(Answer::Closing)) | Err(_) => return Ok(None),
            Ok(Some(answer)) => {
                if let Some(found) = wanted(answer) {
                    return Ok(Some(found));
                }
            }
            Ok(None) => {}
        }
        if start.elapsed() >= COMMIT_PATIENCE {
            return Err(no_answer(place, name));
        }
    }
}

/// The process that serves a session, for messages.
fn server_of(place: &SessionPaths) -> String {
    match coldrise_store::lock_holder(&place.lock()) {
        Some(process) => format!("process {process}, which serves it,"),
        None => "the process that serves it".to_owned(),
    }
}

/// The encryption purpose of a fold's request: only this session can decrypt it.
pub(crate) fn rebase_purpose(place: &SessionPaths) -> String {
    format!("rebase of {}", place.purpose())
}

/// Asks the process that serves the session to read the folded disks instead of their layers.
/// Returns false if it did not, `None` if no process serves the session.
///
/// # Errors
/// `InvalidInput` if the session refers to more layers than a request can name.
pub(crate) fn ask_for_rebase(
    repository: &Repository,
    place: &SessionPaths,
    name: &SessionName,
    folded: &impl Serialize,
) -> Result<Option<bool>> {
    let text = serde_json::to_vec(folded).map_err(|error| {
        Error::with_source(ErrorKind::Internal, "describing folded disks", error)
    })?;
    let request = Request::Rebase(repository.encrypt_document(&rebase_purpose(place), &text)?);
    let kept = |reason: &str| {
        tracing::warn!("session {name}: {} keeps the folded layers: {reason}", server_of(place));
        Ok(Some(false))
    };
    let start = Instant::now();
    let mut asked = match ask(place.directory(), CONTROL, &request, LOOK_INTERVAL) {
        Err(error) => return kept(&error.full_message()),
        Ok(None) => return Ok(None),
        Ok(Some(asked)) => asked,
    };
    loop {
        match asked.next() {
            Ok(Some(Answer::Rebased(is_moved))) => return Ok(Some(is_moved)),
            Ok(Some(Answer::Failed { message, .. })) => return kept(&message),
            // The server is about to end, or was killed.
            Ok(Some(Answer::Closing)) | Err(_) => return Ok(None),
            Ok(_) if start.elapsed() >= REBASE_PATIENCE => return kept("it does not answer"),
            Ok(_) => {}
        }
    }
}

/// Takes the lock of a session to serve it. Returns `None` if another process continues to serve
/// it. Waits for a killed process: it holds the lock, and seems to listen, until the kernel has
/// released its memory.
pub(crate) fn lock_for_serving(place: &SessionPaths) -> Result<Option<FileLock>> {
    let start = Instant::now();
    let mut greeting = None;
    loop {
        if let Some(lock) = FileLock::take(place)? {
            return Ok(Some(lock));
        }
        if greeting.is_none() {
            greeting = Greeting::send(place, PROBE_PATIENCE)?;
        }
        match greeting.as_mut().and_then(Greeting::is_answered) {
            Some(true) => return Ok(None),
            Some(false) => greeting = None,
            None => {}
        }
        if start.elapsed() >= PASSING_PATIENCE {
            return Ok(None);
        }
    }
}

/// Asks the process that serves a session for a sign of life.
pub(crate) struct Greeting(PendingAnswers);

impl Greeting {
    /// Sends the question. Returns `None` if no process listens. Each check for the answer takes up
    /// to `patience`.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn send(place: &SessionPaths, patience: Duration) -> Result<Option<Greeting>> {
        Ok(ask(place.directory(), CONTROL, &Request::Greet, patience)?.map(Greeting))
    }

    /// True if the process continues to serve the session, false if it is about to end. `None` if
    /// there is no answer yet: it is busy, stopped, or was killed and has not ended.
    pub(crate) fn is_answered(&mut self) -> Option<bool> {
        match self.0.next() {
            Ok(None) => None,
            Ok(Some(Answer::Closing)) | Err(_) => Some(false),
            Ok(Some(_)) => Some(true),
        }
    }
}
