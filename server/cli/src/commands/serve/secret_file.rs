//! Passwords of servers, read from files.

use std::path::Path;

use coldrise_block::{Error, ErrorKind, Result, public_password_warning, read_small_file};

/// Maximum size of the file, in bytes.
const MAX_SECRET_BYTES: u64 = 4096;

/// The first line of a file. Warns if others can read it.
///
/// # Errors
/// `InvalidInput` if it is empty; errors of reading the file.
pub(super) fn first_line(path: &Path) -> Result<String> {
    let text = String::from_utf8(read_small_file(path, MAX_SECRET_BYTES)?).unwrap_or_default();
    if let Some(warning) = public_password_warning(path) {
        tracing::warn!("{warning}");
    }
    match text.lines().next().filter(|line| !line.is_empty()) {
        Some(line) => Ok(line.to_owned()),
        None => {
            let text = format!("{}: its first line must be the password", path.display());
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    }
}
