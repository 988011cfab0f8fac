//! Valid file names, and the errors for invalid ones.

use coldrise_block::{Error, ErrorKind, Result};

/// Maximum length of a name, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 255;
/// Maximum nesting depth of folders.
pub(super) const MAX_DEPTH: usize = 32;

/// Rejects an invalid file name.
pub(super) fn check_name(name: &str) -> Result<()> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::new(
            ErrorKind::NameTooLong,
            format!("a name of {} bytes: at most {MAX_NAME_BYTES} are allowed", name.len()),
        ));
    }
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(Error::new(ErrorKind::InvalidInput, format!("{name:?} is not a file name")));
    }
    Ok(())
}

pub(super) fn missing(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no file {name:?}"))
}

pub(super) fn is_folder(name: &str) -> Error {
    Error::new(ErrorKind::IsAFolder, format!("{name:?} is a folder"))
}

pub(super) fn no_folder(name: &str) -> Error {
    Error::new(ErrorKind::NotAFolder, format!("{name:?} is not a folder"))
}

pub(super) fn not_empty(name: &str) -> Error {
    Error::new(ErrorKind::NotEmpty, format!("the folder {name:?} is not empty"))
}

pub(super) fn too_deep() -> Error {
    let text = format!("folders can be nested at most {MAX_DEPTH} deep");
    Error::new(ErrorKind::NameTooLong, text)
}
