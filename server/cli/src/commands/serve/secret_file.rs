//! Passwords of servers, read from files.

use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_recovery::secret_file::warn_if_public;

/// The first line of a file. Warns if others can read it.
///
/// # Errors
/// `InvalidInput` if it is empty; errors of reading the file.
pub(super) fn first_line(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).context(|| format!("reading {}", path.display()))?;
    warn_if_public(path);
    match text.lines().next().filter(|line| !line.is_empty()) {
        Some(line) => Ok(line.to_owned()),
        None => {
            let text = format!("{}: its first line must be the password", path.display());
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    }
}
