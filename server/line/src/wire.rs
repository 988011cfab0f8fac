//! Messages on a connection, once it belongs to a line, and their reader.
//!
//! ```text
//! what u8 · kind u8 · class u8 · zero u8 · stream u32 · length u32 · body     (little endian)
//! ```

use crate::failure::Failure;
use crate::frame::{Class, Frame, GRANT_UNIT_BYTES, HEADER_BYTES, MAX_BODY_BYTES};

const FRAME: u8 = 0;
const GRANT: u8 = 1;
const ALIVE: u8 = 2;
const CLOSE: u8 = 3;

/// One message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Frame(Class, Frame),
    /// The receiver has room for that many more bytes of a class.
    Grant {
        class: Class,
        bytes: u64,
    },
    /// Nothing to send, but here.
    Alive,
    /// The last message of a connection.
    Close,
}

impl Message {
    /// How urgent it is. Messages without a body keep the line alive or moving.
    pub(crate) fn urgency(&self) -> Class {
        match self {
            Message::Frame(class, _) => *class,
            _ => Class::Control,
        }
    }

    /// Its bytes before the body, and the body.
    pub(crate) fn encode(&self) -> ([u8; HEADER_BYTES], &[u8]) {
        let (what, kind, stream, body): (_, _, _, &[u8]) = match self {
            Message::Frame(_, frame) => (FRAME, frame.kind, frame.stream, &frame.body),
            // In the field of the stream: a grant has no body.
            Message::Grant { class, bytes } => {
                (GRANT, class.index() as u8, (bytes / GRANT_UNIT_BYTES) as u32, &[])
            }
            Message::Alive => (ALIVE, 0, 0, &[]),
            Message::Close => (CLOSE, 0, 0, &[]),
        };
        let mut header = [0; HEADER_BYTES];
        header[0] = what;
        header[1] = kind;
        header[2] = self.urgency().index() as u8;
        header[4..8].copy_from_slice(&stream.to_le_bytes());
        header[8..].copy_from_slice(&(body.len() as u32).to_le_bytes());
        (header, body)
    }
}

fn unknown() -> Failure {
    Failure::protocol("it sent an unknown message")
}

/// Puts messages together from the bytes of a connection.
#[derive(Default)]
pub(crate) struct MessageReader {
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that are there.
    filled: usize,
    body: Vec<u8>,
}

impl MessageReader {
    /// Takes bytes; gives each complete message to `take`. Memory for a body is allocated after
    /// `reserve` has allowed its length.
    pub(crate) fn read(
        &mut self,
        mut bytes: &[u8],
        reserve: impl Fn(Class, usize) -> Result<(), Failure>,
        mut take: impl FnMut(Message) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        loop {
            if self.filled < HEADER_BYTES {
                if bytes.is_empty() {
                    return Ok(());
                }
                let (first, rest) = bytes.split_at(bytes.len().min(HEADER_BYTES - self.filled));
                self.header[self.filled..][..first.len()].copy_from_slice(first);
                self.filled += first.len();
                bytes = rest;
                if self.filled < HEADER_BYTES {
                    return Ok(());
                }
                self.check_header(&reserve)?;
            }
            let missing = self.body_bytes() - self.body.len();
            let (first, rest) = bytes.split_at(bytes.len().min(missing));
            self.body.extend_from_slice(first);
            bytes = rest;
            if first.len() < missing {
                return Ok(());
            }
            let body = std::mem::take(&mut self.body);
            self.filled = 0;
            take(self.message(body)?)?;
        }
    }

    fn number(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.header[at..at + 4]);
        u32::from_le_bytes(bytes)
    }

    fn body_bytes(&self) -> usize {
        self.number(8) as usize
    }

    fn check_header(
        &mut self,
        reserve: impl Fn(Class, usize) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let length = self.body_bytes();
        let most = if self.header[0] == FRAME { MAX_BODY_BYTES } else { 0 };
        if length > most {
            return Err(Failure::protocol(format!("a message of {length} bytes is too long")));
        }
        if self.header[0] == FRAME {
            reserve(self.class()?, length)?;
        }
        self.body.reserve_exact(length);
        Ok(())
    }

    fn class(&self) -> Result<Class, Failure> {
        Class::ALL.get(usize::from(self.header[2])).copied().ok_or_else(unknown)
    }

    fn message(&self, body: Vec<u8>) -> Result<Message, Failure> {
        if self.header[3] != 0 {
            return Err(unknown());
        }
        let (kind, stream) = (self.header[1], self.number(4));
        match self.header[0] {
            FRAME => Ok(Message::Frame(self.class()?, Frame { stream, kind, body })),
            GRANT => {
                let class = Class::ALL.get(usize::from(kind)).copied().ok_or_else(unknown)?;
                Ok(Message::Grant { class, bytes: u64::from(stream) * GRANT_UNIT_BYTES })
            }
            ALIVE => Ok(Message::Alive),
            CLOSE => Ok(Message::Close),
            _ => Err(unknown()),
        }
    }
}
