//! The socket by which the command line asks the serving process for a seal.
//!
//! A seal that was given up must never appear later. The lock of the documents decides:
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
//! An asker that gives up takes live/lock first, reads what has come, and closes the
//! connection before it frees the lock. Either the server had the lock before: then
//! `Committing` has come, and the asker waits for the outcome. Or it gets the lock later:
//! then it sees that the asker has left. An asker that was killed has left, too.
//!
//! One window remains: the server stops while it holds the lock. Then the asker can neither
//! give up nor learn the outcome, and says so.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{Repository, SessionName};
use serde::{Deserialize, Serialize};

use crate::local_socket::{ask, has_left, send, Answers, Asked, LocalSocket};
use crate::lock::FileLock;
use crate::place::{Place, CONTROL};
use crate::seal::Sealed;
use crate::session::Session;

/// How often the asker looks at the clock.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// After this long the user is told what is waited for.
const NOTICE: Duration = Duration::from_secs(2);
/// A commit that has begun takes moments.
const COMMIT_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    Seal,
    /// Whether somebody is there to answer.
    Greet,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// The point appears now, unless the commit fails. Sent under the documents' lock.
    Committing,
    Sealed(Box<Sealed>),
    Greeted,
    Failed {
        kind: String,
        message: String,
    },
    /// The session is being closed: nothing was done.
    Closing,
}

/// The listening side; it ends when it is dropped.
pub(crate) struct ControlSocket {
    _socket: LocalSocket,
}

impl ControlSocket {
    /// Listens for requests to `session`.
    pub(crate) fn listen(place: &Place, session: Weak<Session>) -> Result<ControlSocket> {
        let socket = LocalSocket::listen(place.directory(), CONTROL, Seals { session })?;
        Ok(ControlSocket { _socket: socket })
    }
}

struct Seals {
    session: Weak<Session>,
}

impl Answers for Seals {
    fn answer(&self, request: &str, stream: UnixStream) -> Result<()> {
        let asked = serde_json::from_str::<Request>(request);
        // The session is held from here on only: a silent asker must not keep it open.
        let Some(session) = self.session.upgrade() else { return self.decline(&stream) };
        match asked {
            Ok(Request::Seal) => {}
            Ok(Request::Greet) => return send(&stream, &Answer::Greeted),
            Err(error) => {
                let message = format!("unknown request: {error}");
                return send(&stream, &failed(&Error::new(ErrorKind::Unsupported, message)));
            }
        }
        check_asker(&stream)?;
        let may_commit = || {
            check_asker(&stream)?;
            send(&stream, &Answer::Committing)
        };
        let answer = match session.seal_if(&may_commit) {
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
/// `Interrupted` where the asker has left.
fn check_asker(stream: &UnixStream) -> Result<()> {
    match has_left(stream)? {
        true => Err(Error::new(ErrorKind::Interrupted, "a seal was given up: nothing was sealed")),
        false => Ok(()),
    }
}

/// Asks the process that serves the session to seal it, and gives up after `patience`;
/// `None` where no process serves it, or that process ends before it sealed.
///
/// # Errors
/// `Busy` where it was given up: that seal never happens. `Io` where the server was
/// stopped during the commit: the message says where to look for the outcome. Otherwise the
/// server's error.
pub(crate) fn ask_for_seal(
    repository: &Arc<Repository>,
    place: &Place,
    name: &SessionName,
    patience: Duration,
) -> Result<Option<Sealed>> {
    let Some(mut asked) = ask(place.directory(), CONTROL, &Request::Seal, LOOK_INTERVAL)? else {
        return Ok(None);
    };
    let server = || match FileLock::holder(&place.lock()) {
        Some(process) => format!("process {process}, which serves it,"),
        None => "the process that serves it".to_owned(),
    };
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
        let given_up = match is_late && !is_committing {
            true => match FileLock::documents_within(repository, COMMIT_PATIENCE)? {
                Some(lock) => Some(lock),
                None => return unknown(),
            },
            false => None,
        };
        match asked.next() {
            Ok(Some(Answer::Committing)) => is_committing = true,
            // Of another question.
            Ok(Some(Answer::Greeted)) => {}
            Ok(Some(Answer::Sealed(sealed))) => return Ok(Some(*sealed)),
            Ok(Some(Answer::Closing)) => return Ok(None),
            Ok(Some(Answer::Failed { kind, message })) => {
                let kind = ErrorKind::from_word(&kind).unwrap_or(ErrorKind::Io);
                let what = format!("session {name}: {} did not seal it: {message}", server());
                return Err(Error::new(kind, what));
            }
            Ok(None) if given_up.is_some() => {
                let message = format!(
                    "session {name}: {} did not answer within {} s, so the seal was given up and \
                     will not happen: look whether that process is stopped or its disk is slow, \
                     and try again, with --wait SECONDS for longer",
                    server(),
                    patience.as_secs()
                );
                drop((asked, given_up));
                return Err(Error::new(ErrorKind::Busy, message));
            }
            Ok(None) if start.elapsed() >= patience.saturating_add(COMMIT_PATIENCE) => {
                return unknown();
            }
            Ok(None) => {}
            // It was killed before it could seal.
            Err(_) if !is_committing => return Ok(None),
            Err(_) => return unknown(),
        }
    }
}

/// A question to the process that serves a session: is it alive?
pub(crate) struct Greeting(Asked);

impl Greeting {
    /// Asks; `None` where nobody listens. Each look at the answer takes up to `patience`.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn send(place: &Place, patience: Duration) -> Result<Option<Greeting>> {
        Ok(ask(place.directory(), CONTROL, &Request::Greet, patience)?.map(Greeting))
    }

    /// True where it goes on serving, false where it is about to end, `None` where it has
    /// not answered yet: it is busy, stopped, or was killed and has not ended.
    pub(crate) fn is_answered(&mut self) -> Option<bool> {
        match self.0.next() {
            Ok(None) => None,
            Ok(Some(Answer::Closing)) | Err(_) => Some(false),
            Ok(Some(_)) => Some(true),
        }
    }
}
