//! What a backup and the process that holds the writer say to each other through
//! `writer.control`: lines of JSON, and behind the line of a write its bytes.
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
//!                              ◀─      moving: the host is about to end (at any time)
//!                              ◀─      {failed: kind, message}, and the end
//! ```
//!
//! Both prove that they know the repository's key, by a keyed hash over both nonces: plaintext
//! goes only to a process that could read the repository anyway, and comes only from one that
//! could write it. In a repository without encryption the modes of the socket (0600) and of the
//! folder (0700) are what keeps others away.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{random, MapRoot, MaxUnused, PointDocument, Repository, WriteCounts};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Longest line, in bytes: a point with its configuration.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// Most bytes of one write.
pub(super) const MAX_WRITE_BYTES: u64 = 16 << 20;

/// The first line of a connection.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    Gc { max_unused: MaxUnused },
    Backup { nonce: Nonce },
}

/// What a guest says afterwards.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    Proof([u8; 32]),
    Start { base: Option<MapRoot>, size_bytes: u64, threads: usize },
    Write { offset_bytes: u64, length_bytes: u64 },
    Hole { offset_bytes: u64, length_bytes: u64 },
    Finish,
    PutPoint(Box<PointDocument>),
}

/// What the host says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
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
    /// Nothing more is taken: go on at the next host.
    Moving,
    /// The same, to who has just connected.
    Closing,
    Failed {
        kind: String,
        message: String,
    },
}

impl Answer {
    pub(super) fn failed(error: &Error) -> Answer {
        Answer::Failed { kind: error.kind().word().to_owned(), message: error.full_message() }
    }
}

/// The error that another process has told.
pub(super) fn told_error(kind: &str, message: String) -> Error {
    Error::new(ErrorKind::from_word(kind).unwrap_or(ErrorKind::Io), message)
}

pub(crate) type Nonce = [u8; 16];

/// Who proves that it knows the key.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Guest,
    Host,
}

pub(super) fn nonce() -> Result<Nonce> {
    let mut nonce = Nonce::default();
    random(&mut nonce)?;
    Ok(nonce)
}

/// The proof of one side.
pub(super) fn proof(repository: &Repository, side: Side, guest: &Nonce, host: &Nonce) -> [u8; 32] {
    let key = repository.derive_key("writer control", &[*guest, *host].concat());
    let side: &[u8] = match side {
        Side::Guest => b"guest",
        Side::Host => b"host",
    };
    *blake3::keyed_hash(&key, side).as_bytes()
}

/// Whether a proof is right; takes the same time whatever is wrong with it.
pub(super) fn is_proof(told: [u8; 32], expected: [u8; 32]) -> bool {
    blake3::Hash::from_bytes(told) == blake3::Hash::from_bytes(expected)
}

/// The next line; `None` at the end of the connection.
///
/// # Errors
/// `Io` where reading fails, or for a line that cannot be understood.
pub(super) fn read_line<T: DeserializeOwned>(
    stream: &mut BufReader<&UnixStream>,
) -> Result<Option<T>> {
    let mut line = Vec::new();
    stream.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).context(|| "reading")?;
    if !line.ends_with(b"\n") {
        return Ok(None);
    }
    serde_json::from_slice(&line)
        .map(Some)
        .map_err(|error| Error::with_source(ErrorKind::Io, "what was said is unknown", error))
}
