//! Frames: what travels over a line, and their form on a connection.

use coldrise_block::{Error, ErrorKind, Result};

/// Largest body of a frame, in bytes. The receiver refuses a longer one before it allocates memory.
pub const MAX_BODY_BYTES: usize = 1 << 20;

/// Bytes before a body, see [`crate::wire`].
pub(crate) const HEADER_BYTES: usize = 12;

/// Credit is granted in multiples of this.
pub(crate) const GRANT_UNIT_BYTES: u64 = 64;

/// How a frame travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// In order, on a connection of its own.
    Control,
    /// In any order, on a connection of its own and on the bulk connections: bulk lets it pass.
    Fetch,
    /// In any order, over all bulk connections.
    Bulk,
}

impl Class {
    /// All classes, the most urgent one first.
    pub const ALL: [Class; 3] = [Class::Control, Class::Fetch, Class::Bulk];

    pub(crate) fn index(self) -> usize {
        self as usize
    }

    /// The classes on a connection of this class, the most urgent first.
    pub(crate) fn carries(self) -> &'static [Class] {
        match self {
            Class::Control => &[Class::Control],
            Class::Fetch => &[Class::Fetch],
            Class::Bulk => &[Class::Fetch, Class::Bulk],
        }
    }
}

/// A message of the user of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The stream that it belongs to. The line does not look at it.
    pub stream: u32,
    /// The kind of the body. The line does not look at it.
    pub kind: u8,
    /// At most [`MAX_BODY_BYTES`].
    pub body: Vec<u8>,
}

impl Frame {
    /// The frame's share of the receiver's credit, in bytes.
    pub(crate) fn cost_bytes(&self) -> u64 {
        cost_bytes(self.body.len())
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.body.len() <= MAX_BODY_BYTES {
            return Ok(());
        }
        let text = format!("a frame of {} bytes is longer than a line takes", self.body.len());
        Err(Error::new(ErrorKind::InvalidInput, text))
    }
}

/// As [`Frame::cost_bytes`], from the length of a body. Empty frames cost something, too: they
/// take memory in the receiver's queue. A multiple of the unit in which credit is given back.
pub(crate) fn cost_bytes(body_bytes: usize) -> u64 {
    (body_bytes as u64 + GRANT_UNIT_BYTES).next_multiple_of(GRANT_UNIT_BYTES)
}
