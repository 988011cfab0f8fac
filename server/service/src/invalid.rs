//! Errors of input.

use coldrise_block::{Error, ErrorKind};

/// `InvalidInput` with this text.
pub(crate) fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}
