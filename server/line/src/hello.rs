//! The first message of each side on a connection. Its length is fixed, so nothing that a stranger
//! sends makes this side allocate.
//!
//! ```text
//! Hello:    magic "coldline" · version u8 · purpose u8 · count u8 · 0 ×5 · window u64 · 32 bytes
//! Welcome:  magic "coldline" · version u8 · answer u8 · count u8 · 0 ×5 · window u64 · 32 bytes
//! ```
//!
//! | purpose | count | window | 32 bytes |
//! |---|---|---|---|
//! | begin a line | bulk connections wanted | credit for bulk | |
//! | join a line's fetch or bulk | | | its session id |
//! | pair | | | the near side's proof |
//!
//! A welcome to *begin* has the bulk connections to open, its credit, and the session id; to *pair*
//! the far side's proof.

use coldrise_block::{Error, ErrorKind, Result};

use crate::frame::Class;

const MAGIC: &[u8; 8] = b"coldline";
const VERSION: u8 = 2;
/// Length of both messages.
pub(crate) const HELLO_BYTES: usize = 56;

/// Names one line at the side that listens; random.
pub(crate) type SessionId = [u8; 32];

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hello {
    Begin { bulk_connections: u8, bulk_window_bytes: u64 },
    Join { class: Class, session: SessionId },
    Pair { proof: [u8; 32] },
}

/// The answer of the side that listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Welcome {
    Begun { bulk_connections: u8, bulk_window_bytes: u64, session: SessionId },
    Joined,
    Paired { proof: [u8; 32] },
    Refused(Refusal),
}

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Version,
    TooManyLines,
    UnknownSession,
    WrongCode,
    UnknownKey,
}

const REFUSALS: [Refusal; 5] = [
    Refusal::Version,
    Refusal::TooManyLines,
    Refusal::UnknownSession,
    Refusal::WrongCode,
    Refusal::UnknownKey,
];
const FIRST_REFUSAL: u8 = 16;

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        match *self {
            Hello::Begin { bulk_connections, bulk_window_bytes } => {
                encode(0, bulk_connections, bulk_window_bytes, &[0; 32])
            }
            Hello::Join { class, session } => encode(1 + class.index() as u8, 0, 0, &session),
            Hello::Pair { proof } => encode(4, 0, 0, &proof),
        }
    }

    /// # Errors
    /// The refusal to send.
    pub(crate) fn decode(message: &[u8; HELLO_BYTES]) -> std::result::Result<Hello, Refusal> {
        let parts = Parts::of(message).ok_or(Refusal::Version)?;
        Ok(match parts.what {
            0 => Hello::Begin { bulk_connections: parts.count, bulk_window_bytes: parts.window },
            2 => Hello::Join { class: Class::Fetch, session: parts.rest },
            3 => Hello::Join { class: Class::Bulk, session: parts.rest },
            4 => Hello::Pair { proof: parts.rest },
            _ => return Err(Refusal::Version),
        })
    }
}

impl Welcome {
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        match *self {
            Welcome::Begun { bulk_connections, bulk_window_bytes, session } => {
                encode(0, bulk_connections, bulk_window_bytes, &session)
            }
            Welcome::Joined => encode(1, 0, 0, &[0; 32]),
            Welcome::Paired { proof } => encode(2, 0, 0, &proof),
            Welcome::Refused(refusal) => encode(FIRST_REFUSAL + refusal as u8, 0, 0, &[0; 32]),
        }
    }

    /// # Errors
    /// The other side's refusal; `Unsupported` if it speaks another version.
    pub(crate) fn decode(message: &[u8; HELLO_BYTES]) -> Result<Welcome> {
        let parts = Parts::of(message).ok_or_else(|| Refusal::Version.error())?;
        match parts.what {
            0 => Ok(Welcome::Begun {
                bulk_connections: parts.count,
                bulk_window_bytes: parts.window,
                session: parts.rest,
            }),
            1 => Ok(Welcome::Joined),
            2 => Ok(Welcome::Paired { proof: parts.rest }),
            code => {
                let at = code.checked_sub(FIRST_REFUSAL).map(usize::from);
                let refusal = at.and_then(|at| REFUSALS.get(at)).unwrap_or(&Refusal::Version);
                Err(refusal.error())
            }
        }
    }
}

/// The peer does not have this side's key among those that it lets in.
pub(crate) const REFUSES_KEY: &str = "it refuses the key of this side";
/// It has forgotten the first connection of a line before the others came: it was restarted.
pub(crate) const KNOWS_NO_LINE: &str = "it does not know the line that this connection belongs to";

impl Refusal {
    pub(crate) fn error(self) -> Error {
        let (kind, text, advice) = match self {
            Refusal::Version => (
                ErrorKind::Unsupported,
                "it speaks another version of the line",
                "run the same version of Coldrise at both sites",
            ),
            Refusal::TooManyLines => (
                ErrorKind::Busy,
                "it has too many lines from here already",
                "wait until other copies have ended; a line that broke counts for up to a minute",
            ),
            Refusal::UnknownSession => (
                ErrorKind::Io,
                KNOWS_NO_LINE,
                "try again; if the error persists, look at the log of the other site",
            ),
            Refusal::WrongCode => (
                ErrorKind::Forbidden,
                "the code is wrong, used or expired",
                "make a new code at the other site",
            ),
            Refusal::UnknownKey => (
                ErrorKind::Forbidden,
                REFUSES_KEY,
                "the link may have been removed there: remove it here, too, and add it again",
            ),
        };
        Error::new(kind, text).advise(advice)
    }
}

struct Parts {
    what: u8,
    count: u8,
    window: u64,
    rest: [u8; 32],
}

impl Parts {
    /// `None` if it is another version.
    fn of(message: &[u8; HELLO_BYTES]) -> Option<Parts> {
        let (mut window, mut rest) = ([0; 8], [0; 32]);
        window.copy_from_slice(&message[16..24]);
        rest.copy_from_slice(&message[24..]);
        let window = u64::from_le_bytes(window);
        let is_known = message[..8] == *MAGIC && message[8] == VERSION;
        is_known.then_some(Parts { what: message[9], count: message[10], window, rest })
    }
}

fn encode(what: u8, count: u8, window: u64, rest: &[u8; 32]) -> [u8; HELLO_BYTES] {
    let mut message = [0; HELLO_BYTES];
    message[..8].copy_from_slice(MAGIC);
    message[8..11].copy_from_slice(&[VERSION, what, count]);
    message[16..24].copy_from_slice(&window.to_le_bytes());
    message[24..].copy_from_slice(rest);
    message
}
