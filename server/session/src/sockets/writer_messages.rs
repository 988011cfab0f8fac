//! The messages between a backup and the process that holds the writer, through `writer.control`:
//! lines of JSON. The bytes of a write, and of a point's files, follow its line.
//!
//! ```text
//! guest                                host
//!   {backup: nonce}            ─▶
//!                              ◀─      {welcome: nonce, proof}
//!   {proof}                    ─▶
//!                              ◀─      accepted
//!   {start} {write}… {hole}…   ─▶      ◀─ {counts}, now and then
//!   finish                     ─▶      ◀─ {finished: root, counts}      once per disk
//!   {put_point}                ─▶      ◀─ added
//!   {change}                   ─▶      ◀─ changed
//!                              ◀─      moving: the host is about to end (at any time)
//!                              ◀─      {failed: kind, message}, and the end
//! ```
//!
//! Both sides prove that they know the repository's key, by a keyed hash over both nonces. So
//! plaintext goes only to a process that can read the repository anyway, and comes only from one
//! that can write it. In a repository without encryption only the modes of the socket (0600) and of
//! the folder (0700) keep other users out.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{MapRoot, MaxUnused, PointDocument, Repository, WriteCounts, random};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::sockets::point_change::PointChange;

/// The socket's name in the repository's folder.
pub(crate) const SOCKET: &str = "writer.control";

/// Maximum length of a line, in bytes. The longest one holds a point with its configuration and parts.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// Maximum size of one write, in bytes.
pub(crate) const MAX_WRITE_BYTES: u64 = 16 << 20;

/// The first line of a connection.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    Gc { max_unused: MaxUnused },
    Backup { nonce: Nonce },
}

/// The later messages of a guest.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ask {
    Proof([u8; 32]),
    Start {
        base: Option<MapRoot>,
        size_bytes: u64,
        threads: usize,
    },
    Write {
        offset_bytes: u64,
        length_bytes: u64,
    },
    Hole {
        offset_bytes: u64,
        length_bytes: u64,
    },
    Finish,
    /// The bytes of the files follow, if there are any.
    PutPoint {
        document: Box<PointDocument>,
        files_bytes: Option<u64>,
    },
    /// Changes points in the catalog.
    Change(PointChange),
}

/// The messages of a host.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Welcome {
        nonce: Nonce,
        proof: [u8; 32],
    },
    Accepted,
    Counts(WriteCounts),
    Finished {
        root: MapRoot,
        counts: WriteCounts,
    },
    Added,
    Changed,
    /// The host takes no more: continue at the next host.
    Moving,
    /// Like `Moving`, for a process that has just connected.
    Closing,
    Failed {
        kind: String,
        message: String,
    },
}

impl Answer {
    pub(crate) fn failed(error: &Error) -> Answer {
        Answer::Failed { kind: error.kind().word().to_owned(), message: error.full_message() }
    }
}

/// The error that another process reported.
pub(crate) fn remote_error(kind: &str, message: String) -> Error {
    Error::new(ErrorKind::from_word(kind).unwrap_or(ErrorKind::Io), message)
}

pub(crate) type Nonce = [u8; 16];

/// The side that proves that it knows the key.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    Guest,
    Host,
}

pub(crate) fn nonce() -> Result<Nonce> {
    let mut nonce = Nonce::default();
    random(&mut nonce)?;
    Ok(nonce)
}

/// The proof of one side.
pub(crate) fn proof(repository: &Repository, side: Side, guest: &Nonce, host: &Nonce) -> [u8; 32] {
    let key = repository.derive_key("writer control", &[*guest, *host].concat());
    let side: &[u8] = match side {
        Side::Guest => b"guest",
        Side::Host => b"host",
    };
    *blake3::keyed_hash(&key, side).as_bytes()
}

/// Checks a proof in constant time.
pub(crate) fn is_proof(given: [u8; 32], expected: [u8; 32]) -> bool {
    blake3::Hash::from_bytes(given) == blake3::Hash::from_bytes(expected)
}

/// The next line; `None` at the end of the connection.
///
/// # Errors
/// `Io` if reading fails, or for an invalid line.
pub(crate) fn read_line<T: DeserializeOwned>(
    stream: &mut BufReader<&UnixStream>,
) -> Result<Option<T>> {
    let mut line = Vec::new();
    stream.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).context(|| "reading")?;
    if !line.ends_with(b"\n") {
        return Ok(None);
    }
    serde_json::from_slice(&line)
        .map(Some)
        .map_err(|error| Error::with_source(ErrorKind::Io, "an unknown message", error))
}
