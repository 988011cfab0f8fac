//! The messages of the two ends of a copy over a line.
//!
//! ```text
//! source                                       remote side
//!   hello                            ─▶        ◀─ welcome: chunk size
//!   claim, points, keep              ─▶        ◀─ answers
//!   announce: the point, what of it  ─▶        ◀─ announced: where to continue; the first disk is started there
//!     differs, the boot trace
//!   start: the next disk             ─▶        ◀─ started
//!   NAMES of a batch of pieces       ─▶        ◀─ WANTED: those that are not there
//!   CONTENT of these (bulk)          ─▶        ◀─ WHOLE: those of which a delta could not be used
//!   CONTENT of these                 ─▶        ◀─ APPLIED: the batch is written
//!   hole …, finish                   ─▶        ◀─ finished: the map's root
//!   put: the point's document        ─▶        ◀─ added
//!   READ (fetch), at any time        ◀─        ─▶ DATA (fetch): a part of the announced point, out of turn
//! ```
//!
//! The side that dials is the source, or begins with *fetch*: then it is the remote side (fetch.rs).
//!
//! A *piece* is an aligned range of the remote side's chunk size; its name is its BLAKE3, all zeroes for a piece of zeroes.
//! CONTENT is specified in content.rs. Names and plaintext are inside TLS only. The remote side checks each content against its name.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{Class, Frame, Line, MAX_BODY_BYTES};
use coldrise_session::ByteRanges;
use coldrise_store::{MachineName, MapRoot, PointDocument, PointName, RepositoryId, WriteCounts};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::fetch::{FetchReport, FetchRequest};
use super::live::LiveOpening;
use super::{PartialMap, Traffic};

/// Changes with every message.
pub(crate) const VERSION: u32 = 7;

/// Kinds of frames. A message is JSON and an attachment; long ones come in parts.
pub(crate) const PART: u8 = 1;
pub(crate) const MESSAGE: u8 = 2;
pub(super) const NAMES: u8 = 3;
pub(super) const WANTED: u8 = 4;
pub(super) const APPLIED: u8 = 5;
pub(super) const CONTENT: u8 = 6;
pub(super) const WHOLE: u8 = 7;
pub(super) const READ: u8 = 8;
pub(super) const DATA: u8 = 9;
/// From the remote side of a fetch: the limit on what is sent, in bytes per second, little endian; 0: none.
pub(super) const RATE: u8 = 10;

/// Maximum plaintext of a batch, in bytes.
pub(super) const BATCH_BYTES: usize = 4 << 20;
/// Maximum number of batches that are not applied yet.
pub(super) const MAX_BATCHES: usize = 24;
/// Maximum length of a message, in bytes: a point's document and its files.
const MAX_MESSAGE_BYTES: usize = 128 << 20;
/// Maximum length of its JSON, in bytes: in memory each byte can become eight.
const MAX_JSON_BYTES: usize = 16 << 20;

/// The BLAKE3 of a piece.
pub(super) type Name = [u8; 32];
/// The name of a piece of zeroes.
pub(super) const ZEROES: Name = [0; 32];

/// The requests of the source.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ask {
    Hello {
        version: u32,
        repository: RepositoryId,
    },
    Claim {
        machine: MachineName,
    },
    Points {
        machine: MachineName,
    },
    Keep {
        machine: MachineName,
        point: PointName,
    },
    /// Names the point whose disks are started next, in this order, and starts the first one. Reads are of the point with this number. The
    /// attachment has its [`Details`].
    Announce {
        number: u32,
        document: Box<PointDocument>,
        /// Of each disk: the map there from which its changes count.
        bases: Vec<Option<MapRoot>>,
    },
    Start {
        base: Option<MapRoot>,
        size_bytes: u64,
    },
    Hole {
        offset_bytes: u64,
        length_bytes: u64,
    },
    Finish,
    Abandon,
    /// The attachment has the point's files, if it has any.
    Put {
        document: Box<PointDocument>,
    },
    /// In place of the greeting: the other side is to be the source.
    Fetch {
        version: u32,
        request: FetchRequest,
    },
    /// In place of the greeting: the marks of a session follow (see `live`).
    Live {
        version: u32,
        opening: LiveOpening,
    },
    /// How far a fetch is. No answer.
    #[serde(rename = "told")]
    FetchProgress {
        #[serde(rename = "told")]
        report: FetchReport,
    },
    /// The end of a fetch, with what was sent. No answer.
    Ended {
        result: std::result::Result<Traffic, Failure>,
    },
}

/// The answers of the remote side.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Welcome {
        repository: RepositoryId,
        chunk_size_bytes: u32,
    },
    Claimed,
    Points {
        points: Vec<PointDocument>,
        is_last: bool,
    },
    Kept {
        is_there: bool,
    },
    /// Of each disk: what has arrived before.
    Announced {
        begun: Vec<Option<PartialMap>>,
    },
    Started,
    Finished {
        root: MapRoot,
        counts: WriteCounts,
    },
    Added,
    Failed(Failure),
}

/// An error on its way to the other side.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(super) kind: String,
    pub(super) message: String,
}

impl Failure {
    pub(crate) fn of(error: &Error) -> Failure {
        Failure { kind: error.kind().word().to_owned(), message: error.full_message() }
    }

    /// The error here. What the other side says is shown on terminals. A full drive is that of the other site.
    pub(crate) fn error(self) -> Error {
        let kind = ErrorKind::from_word(&self.kind).unwrap_or(ErrorKind::Io);
        let message = self.message.replace(|c: char| c.is_control(), " ");
        let error = Error::new(kind, message);
        if kind == ErrorKind::NoSpace { error.context("at the other site") } else { error }
    }
}

/// An error as a part of a message.
pub(crate) mod error_on_its_way {
    use super::{Deserialize, Error, Failure, Serialize};

    pub(crate) fn serialize<S: serde::Serializer>(
        error: &Option<Error>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        error.as_ref().map(Failure::of).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: serde::Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Error>, D::Error> {
        Ok(Option::<Failure>::deserialize(deserializer)?.map(Failure::error))
    }
}

/// The rest of an announcement, beside the document; compressed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Details {
    /// Of each disk: what may differ from its base, or from zeroes.
    pub(super) differences: Vec<ByteRanges>,
    /// The boot trace of the machine.
    pub(super) trace: String,
    /// The point's files, unless they are sent at its end.
    pub(super) files: Vec<u8>,
}

/// Maximum length of [`Details`], in bytes.
const MAX_DETAILS_BYTES: usize = 64 << 20;

impl Details {
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let json = serde_json::to_vec(&(&self.differences, &self.trace))
            .map_err(|error| Error::with_source(ErrorKind::Internal, "a message", error))?;
        let mut bytes = (json.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&json);
        bytes.extend_from_slice(&self.files);
        zstd::bulk::compress(&bytes, 9)
            .map_err(|error| Error::with_source(ErrorKind::Internal, "compressing", error))
    }

    pub(super) fn decode(attachment: &[u8]) -> Result<Details> {
        let bytes = zstd::bulk::decompress(attachment, MAX_DETAILS_BYTES)
            .map_err(|_| broken("an announcement that cannot be decompressed"))?;
        let mut reader = Reader(&bytes);
        let length = reader.u32()?;
        let json = reader.take(length as usize)?;
        let (differences, trace) = serde_json::from_slice(json)
            .map_err(|error| broken(&format!("an unknown announcement ({error})")))?;
        Ok(Details { differences, trace, files: reader.0.to_vec() })
    }
}

/// A part of the announced point that the remote side reads, little endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadAsk {
    pub(super) id: u32,
    /// Of the announcement.
    pub(super) number: u32,
    pub(super) disk: u16,
    pub(super) offset_bytes: u64,
    pub(super) length_bytes: u32,
}

/// Maximum length of a [`ReadAsk`], in bytes.
pub(super) const MAX_READ_BYTES: u32 = 256 << 10;

impl ReadAsk {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = self.id.to_le_bytes().to_vec();
        body.extend_from_slice(&self.number.to_le_bytes());
        body.extend_from_slice(&self.disk.to_le_bytes());
        body.extend_from_slice(&self.offset_bytes.to_le_bytes());
        body.extend_from_slice(&self.length_bytes.to_le_bytes());
        body
    }

    pub(super) fn decode(body: &[u8]) -> Result<ReadAsk> {
        let mut reader = Reader(body);
        let (id, number) = (reader.u32()?, reader.u32()?);
        let disk = u16::from_le_bytes(*reader.take(2)?.first_chunk().unwrap_or(&[0; 2]));
        let (offset_bytes, length_bytes) = (reader.u64()?, reader.u32()?);
        if length_bytes == 0 || length_bytes > MAX_READ_BYTES {
            return Err(broken("a read of an impossible length"));
        }
        Ok(ReadAsk { id, number, disk, offset_bytes, length_bytes })
    }
}

/// The kind of an answer to a read, after its id.
pub(super) const READ_CONTENT: u8 = 0;
/// It cannot be read: the text follows.
pub(super) const READ_DAMAGED: u8 = 1;
/// That point is not announced any more.
pub(super) const READ_GONE: u8 = 2;

/// Sends a message in as many frames as it needs.
pub(crate) fn send<T: Serialize>(line: &dyn Line, message: &T, attachment: &[u8]) -> Result<()> {
    let json = serde_json::to_vec(message)
        .map_err(|error| Error::with_source(ErrorKind::Internal, "writing a message", error))?;
    let mut bytes = (json.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(&json);
    bytes.extend_from_slice(attachment);
    let mut parts = bytes.chunks(MAX_BODY_BYTES).peekable();
    while let Some(part) = parts.next() {
        let kind = if parts.peek().is_some() { PART } else { MESSAGE };
        line.send(Class::Control, Frame { stream: 0, kind, body: part.to_vec() })?;
    }
    Ok(())
}

/// Puts messages together.
#[derive(Default)]
pub(crate) struct Parts(Vec<u8>);

impl Parts {
    /// Takes a frame of the kind PART or MESSAGE. Returns the message and its attachment if it is complete.
    pub(crate) fn take<T: DeserializeOwned>(
        &mut self,
        kind: u8,
        body: &[u8],
    ) -> Result<Option<(T, Vec<u8>)>> {
        if self.0.len() + body.len() > MAX_MESSAGE_BYTES {
            return Err(broken("a message is too long"));
        }
        self.0.extend_from_slice(body);
        if kind == PART {
            return Ok(None);
        }
        let mut bytes = std::mem::take(&mut self.0);
        let length = u32::from_le_bytes(*bytes.first_chunk().ok_or_else(|| broken("no length"))?);
        let end = 4 + length as usize;
        if end > MAX_JSON_BYTES {
            return Err(broken("a message is too long"));
        }
        let json = bytes.get(4..end).ok_or_else(|| broken("a message is too short"))?;
        let message = serde_json::from_slice(json)
            .map_err(|error| broken(&format!("an unknown message ({error})")))?;
        bytes.drain(..end);
        Ok(Some((message, bytes)))
    }
}

/// The other side does not keep to the protocol.
pub(crate) fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the other side broke the protocol: {what}"))
        .advise("run the same version of Coldrise at both sites")
}

/// A batch of pieces, as its names travel: number, runs of pieces (offset, count), names. Little endian.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    pub(super) number: u32,
    /// Ascending offsets of the pieces.
    pub(super) offsets: Vec<u64>,
    pub(super) names: Vec<Name>,
}

impl Names {
    pub(super) fn encode(&self, chunk_bytes: u64) -> Vec<u8> {
        let mut runs: Vec<(u64, u32)> = Vec::new();
        for offset in &self.offsets {
            match runs.last_mut() {
                Some((first, count)) if *first + u64::from(*count) * chunk_bytes == *offset => {
                    *count += 1;
                }
                _ => runs.push((*offset, 1)),
            }
        }
        let mut body = self.number.to_le_bytes().to_vec();
        body.extend_from_slice(&(runs.len() as u32).to_le_bytes());
        for (offset, count) in runs {
            body.extend_from_slice(&offset.to_le_bytes());
            body.extend_from_slice(&count.to_le_bytes());
        }
        self.names.iter().for_each(|name| body.extend_from_slice(name));
        body
    }

    pub(super) fn decode(body: &[u8], chunk_bytes: u64) -> Result<Names> {
        let mut reader = Reader(body);
        let number = reader.u32()?;
        let runs = reader.u32()?;
        let most = (BATCH_BYTES as u64 / chunk_bytes).max(1) as usize;
        let mut offsets = Vec::new();
        for _ in 0..runs {
            let (offset, count) = (reader.u64()?, reader.u32()? as usize);
            if count == 0 || count > most || offsets.len() + count > most {
                return Err(broken("too many names"));
            }
            for at in 0..count as u64 {
                let offset = at.checked_mul(chunk_bytes).and_then(|more| offset.checked_add(more));
                offsets.push(offset.ok_or_else(|| broken("an offset is out of range"))?);
            }
        }
        let names = reader
            .0
            .chunks_exact(32)
            .filter_map(|name| name.try_into().ok())
            .collect::<Vec<Name>>();
        if names.len() != offsets.len() || reader.0.len() != 32 * names.len() {
            return Err(broken("names are missing"));
        }
        Ok(Names { number, offsets, names })
    }
}

/// Places of pieces in a batch, as in WANTED and WHOLE, and at the beginning of CONTENT.
pub(super) fn encode_places(number: u32, places: &[u16]) -> Vec<u8> {
    let mut body = number.to_le_bytes().to_vec();
    body.extend_from_slice(&(places.len() as u32).to_le_bytes());
    places.iter().for_each(|place| body.extend_from_slice(&place.to_le_bytes()));
    body
}

/// The number of a batch, places in it, and what follows.
pub(super) fn decode_places(body: &[u8]) -> Result<(u32, Vec<u16>, &[u8])> {
    let mut reader = Reader(body);
    let number = reader.u32()?;
    let count = reader.u32()? as usize;
    let bytes = reader.take(count.saturating_mul(2))?;
    let places = bytes.chunks_exact(2).map(|place| u16::from_le_bytes([place[0], place[1]]));
    Ok((number, places.collect(), reader.0))
}

pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        if count > self.0.len() {
            return Err(broken("a frame is too short"));
        }
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        let bytes = self.take(4)?;
        Ok(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        let bytes = self.take(8)?;
        Ok(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_batch_come_back() {
        let names = Names {
            number: 7,
            offsets: vec![0, 4096, 8192, 1 << 40],
            names: vec![[1; 32], ZEROES, [3; 32], [4; 32]],
        };
        let body = names.encode(4096);
        assert_eq!(body.len(), 8 + 2 * 12 + 4 * 32);
        assert_eq!(Names::decode(&body, 4096).unwrap(), names);
        for length in 0..body.len() {
            assert!(Names::decode(&body[..length], 4096).is_err(), "{length}");
        }
        let many = Names { number: 0, offsets: vec![0; 2000], names: vec![ZEROES; 2000] };
        assert!(Names::decode(&many.encode(4096), 4096).is_err());
    }

    #[test]
    fn announcements_and_reads_come_back() {
        let details = Details {
            differences: vec![ByteRanges::union(vec![(0, 4096), (8192, 9000)])],
            trace: "{}".to_owned(),
            files: vec![7; 100],
        };
        let found = Details::decode(&details.encode().unwrap()).unwrap();
        assert_eq!((found.differences, found.files), (details.differences, details.files));
        assert!(Details::decode(b"no zstd").is_err());
        let ask = ReadAsk { id: 1, number: 2, disk: 3, offset_bytes: 1 << 40, length_bytes: 65536 };
        assert_eq!(ReadAsk::decode(&ask.encode()).unwrap(), ask);
        for length_bytes in [0, MAX_READ_BYTES + 1] {
            assert!(ReadAsk::decode(&ReadAsk { length_bytes, ..ask }.encode()).is_err());
        }
        assert!(ReadAsk::decode(&ask.encode()[..20]).is_err());
    }

    #[test]
    fn places_are_decoded_with_the_bytes_after_them() {
        let mut body = encode_places(9, &[1, 5, 1023]);
        body.extend_from_slice(b"rest");
        let (number, places, rest) = decode_places(&body).unwrap();
        assert_eq!((number, &places[..], rest), (9, &[1, 5, 1023][..], &b"rest"[..]));
        assert!(decode_places(&body[..9]).is_err());
    }
}
