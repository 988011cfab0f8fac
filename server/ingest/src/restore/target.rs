//! The target of a restore and its format.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_formats::Format;

use crate::source::{ImageFormat, is_nbd_uri};

/// The target of a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestoreTarget {
    /// A new image file, or an existing block device.
    Path(PathBuf),
    /// An export of an NBD server, at least as large as the disk.
    Nbd(String),
}

impl RestoreTarget {
    /// An NBD URI, or else a path.
    pub fn parse(text: &str) -> Result<RestoreTarget> {
        if text.is_empty() || text.contains('\0') {
            return Err(Error::new(ErrorKind::InvalidInput, "the target is empty or contains NUL"));
        }
        if is_nbd_uri(text) {
            return Ok(RestoreTarget::Nbd(text.to_string()));
        }
        if text.contains("://") {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("'{text}': only NBD URIs can be written to"),
            ));
        }
        Ok(RestoreTarget::Path(PathBuf::from(text)))
    }
}

impl std::fmt::Display for RestoreTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RestoreTarget::Path(path) => write!(f, "{}", path.display()),
            RestoreTarget::Nbd(uri) => f.write_str(uri),
        }
    }
}

pub(super) fn is_block_device(path: &Path) -> Result<bool> {
    match std::fs::metadata(path) {
        Ok(metadata) => {
            let kind = metadata.file_type();
            if !kind.is_file() && !kind.is_block_device() {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("{} is neither a file nor a block device", path.display()),
                ));
            }
            Ok(kind.is_block_device())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_for_devices(path) => {
            Ok(false)
        }
        Err(error) => Err(Error::io(format!("looking at {}", path.display()), error)),
    }
}

/// A mistyped device must not become a file in memory. /dev/shm is meant for files.
fn is_for_devices(path: &Path) -> bool {
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    folder.is_some_and(|folder| folder.starts_with("/dev") && !folder.starts_with("/dev/shm"))
}

/// The format of `target`: the requested one, else the one of the file's extension.
pub(super) fn target_format(target: &RestoreTarget, asked: Option<Format>) -> Result<Format> {
    let path = match target {
        RestoreTarget::Path(path) if !is_block_device(path)? => path,
        _ => {
            return match asked {
                None | Some(Format::Raw) => Ok(Format::Raw),
                Some(format) => Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "{target} is written in place, as raw: {format} needs a file as target"
                    ),
                )),
            };
        }
    };
    let by_name = || ImageFormat::from_extension(path).map(usual_form);
    asked.or_else(by_name).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidInput,
            format!(
                "'{target}': the format cannot be determined from the file's name: use --format raw, qcow2, \
                 vmdk, vhd or vhdx"
            ),
        )
    })
}

/// The usual form of a format in other programs, which users expect: one compact
/// file.
fn usual_form(format: ImageFormat) -> Format {
    match format {
        ImageFormat::Raw => Format::Raw,
        ImageFormat::Qcow2 => Format::Qcow2Sparse,
        ImageFormat::Vmdk => Format::VmdkSparse,
        ImageFormat::Vhd => Format::VhdDynamic,
        ImageFormat::Vhdx => Format::VhdxDynamic,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_path_below_dev_is_an_error() {
        let missing = is_block_device(Path::new("/dev/coldrise-none")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        assert!(!is_block_device(Path::new("/dev/shm/coldrise-none")).unwrap());
        assert!(!is_block_device(Path::new("/coldrise-none")).unwrap());
    }

    #[test]
    fn a_plain_word_means_the_same_as_a_source_and_as_a_target() {
        for format in ImageFormat::ALL {
            assert_eq!(usual_form(format).word(), format.word());
        }
    }
}
