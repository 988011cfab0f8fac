//! Passwords of servers, read from files.

use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};

/// The first line of a file.
///
/// # Errors
/// `InvalidInput` if it is empty; errors of reading the file.
pub(super) fn first_line(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).context(|| format!("reading {}", path.display()))?;
    match text.lines().next().filter(|line| !line.is_empty()) {
        Some(line) => Ok(line.to_owned()),
        None => {
            let text = format!("{}: its first line must be the password", path.display());
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    }
}
