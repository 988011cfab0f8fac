//! Secrets of targets and hypervisors in files: `STATE/secrets/NAME`.

use std::io::Read;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags};

/// Maximum size of a secret, in bytes.
const MAX_BYTES: usize = 4096;

/// Checks the name of a file: no path leads out of the folder.
///
/// # Errors
/// `InvalidInput`.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let is_allowed = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    if name.is_empty() || name.len() > 100 || name.starts_with('.') || !name.bytes().all(is_allowed)
    {
        let text = "give the name of a file in the folder `secrets` of the service's state";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(())
}

/// Reads a secret: from the file if one is named, else the stored one.
///
/// # Errors
/// Errors of the operating system; `InvalidInput` if the file is empty, too large or no text.
pub(super) fn secret(
    state: &Path,
    file: Option<&str>,
    stored: Option<&str>,
) -> Result<Option<String>> {
    let Some(file) = file else { return Ok(stored.map(str::to_owned)) };
    check_name(file)?;
    let path = state.join("secrets").join(file);
    let what = || format!("reading the secret {}", path.display());
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&path, flags, Mode::empty()).map_err(std::io::Error::from);
    let mut bytes = Vec::new();
    let file = std::fs::File::from(opened.context(what)?);
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).context(what)?;
    let text = String::from_utf8(bytes).unwrap_or_default();
    let text = text.strip_suffix('\n').unwrap_or(&text);
    if text.is_empty() || text.len() > MAX_BYTES {
        let text = format!("{}: a secret is 1 to {MAX_BYTES} bytes of text", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(Some(text.to_owned()))
}
