//! The socket by which the command line asks the serving process for a seal.

use std::os::unix::net::UnixStream;
use std::sync::Weak;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::local_socket::{ask, send, Answers, Asked, LocalSocket};
use crate::place::{Place, CONTROL};
use crate::seal::Sealed;
use crate::session::Session;

/// A flush of much unflushed data may take a while; an answer later than this is none.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

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
    Sealed(Box<Sealed>),
    Greeted,
    Failed {
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
    fn answer(&self, request: &str, stream: &UnixStream) -> Result<()> {
        // Held only from here on: whoever asks nothing must not keep it open.
        let answer = match (serde_json::from_str::<Request>(request), self.session.upgrade()) {
            (Ok(Request::Seal), Some(session)) => match session.seal() {
                Ok(sealed) => Answer::Sealed(Box::new(sealed)),
                Err(error) => Answer::Failed { message: error.full_message() },
            },
            (Ok(Request::Greet), Some(_)) => Answer::Greeted,
            (Ok(Request::Seal | Request::Greet), None) => Answer::Closing,
            (Err(error), _) => Answer::Failed { message: format!("unknown request: {error}") },
        };
        send(stream, &answer)
    }

    fn decline(&self, stream: &UnixStream) -> Result<()> {
        send(stream, &Answer::Closing)
    }
}

/// Asks the process that serves the session to seal it; `None` where none does,
/// or where it is about to stop.
pub(crate) fn ask_for_seal(place: &Place) -> Result<Option<Sealed>> {
    let asked = ask(place.directory(), CONTROL, &Request::Seal, ANSWER_TIMEOUT)?;
    let Some(mut asked) = asked else { return Ok(None) };
    let what = "the process that serves the session did not answer; look with `coldrise sessions` \
                and `coldrise list` whether the point is there";
    match asked.next().map_err(|error| error.context(what))? {
        Some(Answer::Closing) => Ok(None),
        Some(Answer::Sealed(sealed)) => Ok(Some(*sealed)),
        Some(Answer::Failed { message }) => Err(Error::new(ErrorKind::Io, message)),
        None | Some(Answer::Greeted) => Err(Error::new(ErrorKind::Io, what)),
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
