//! Fields of a body.

use std::fmt;

/// The bytes are not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("malformed message")
    }
}

impl std::error::Error for Malformed {}

/// Writes a body.
#[derive(Debug)]
pub(crate) struct Body(Vec<u8>);

impl Body {
    pub(crate) fn new(kind: u8) -> Body {
        Body(vec![kind])
    }

    pub(crate) fn number(mut self, number: u64) -> Body {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Body {
        self.0.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn end(self) -> Vec<u8> {
        self.0
    }
}

/// Reads a body.
#[derive(Debug)]
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn kind(&mut self) -> Result<u8, Malformed> {
        self.take(1)?.first().copied().ok_or(Malformed)
    }

    pub(crate) fn number(&mut self) -> Result<u64, Malformed> {
        let bytes = self.take(8)?.try_into().map_err(|_| Malformed)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// A number that fits into a smaller type.
    pub(crate) fn small<T: TryFrom<u64>>(&mut self) -> Result<T, Malformed> {
        T::try_from(self.number()?).map_err(|_| Malformed)
    }

    /// At most `most` bytes.
    pub(crate) fn bytes(&mut self, most: usize) -> Result<&'a [u8], Malformed> {
        let length = self.take(4)?.try_into().map_err(|_| Malformed)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > most {
            return Err(Malformed);
        }
        self.take(length)
    }

    pub(crate) fn text(&mut self, most: usize) -> Result<String, Malformed> {
        Ok(String::from_utf8_lossy(self.bytes(most)?).into_owned())
    }

    /// Nothing follows.
    pub(crate) fn end(&self) -> Result<(), Malformed> {
        match self.0 {
            [] => Ok(()),
            _ => Err(Malformed),
        }
    }
}
