//! Writes pictures of machines' screens.

use std::fs::OpenOptions;
use std::io::{ErrorKind as IoErrorKind, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::BootCheckDocument;
use serde::Serialize;

use crate::report::Report;

#[derive(Serialize)]
struct Written<'a> {
    address: &'a str,
    screenshot: &'a Path,
    size_bytes: u64,
}

/// Writes the picture of a stored boot check; `-` is stdout.
///
/// # Errors
/// `NotFound` if there is no picture, `AlreadyExists` if the file exists and `may_overwrite` is
/// false, `InvalidInput` for a picture on a terminal.
pub(super) fn write(
    path: &Path,
    may_overwrite: bool,
    address: &str,
    check: Option<(BootCheckDocument, Option<Vec<u8>>)>,
) -> Result<Report> {
    let Some((_, Some(picture))) = check else {
        let error = Error::new(ErrorKind::NotFound, format!("{address} has no stored screenshot"));
        return Err(error.advise(format!("coldrise check-boot {address} makes one")));
    };
    if path == Path::new("-") {
        let mut stdout = std::io::stdout().lock();
        if stdout.is_terminal() {
            let error =
                Error::new(ErrorKind::InvalidInput, "a picture cannot be written to a terminal");
            return Err(error.advise("redirect stdout, or name a file"));
        }
        let written = stdout.write_all(&picture).and_then(|()| stdout.flush());
        written.context(|| "writing the screenshot to stdout")?;
        return Ok(Report::silent());
    }
    write_private(path, &picture, may_overwrite)?;
    let written = Written { address, screenshot: path, size_bytes: picture.len() as u64 };
    Ok(Report::done(&written, format!("wrote {}", path.display())))
}

/// A picture of a machine is for its owner only. Does not follow a symbolic link as the last part
/// of `path` if the file must be new.
///
/// # Errors
/// `AlreadyExists`, and errors of the operating system.
pub(super) fn write_private(path: &Path, bytes: &[u8], may_overwrite: bool) -> Result<()> {
    let writing = || format!("writing the screenshot {}", path.display());
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    let file = match may_overwrite {
        true => options.create(true).truncate(true).open(path),
        false => options.create_new(true).open(path),
    };
    match file {
        Err(error) if error.kind() == IoErrorKind::AlreadyExists => {
            let text = format!("{} exists", path.display());
            Err(Error::new(ErrorKind::AlreadyExists, text).advise("--force overwrites it"))
        }
        file => file.and_then(|mut file| file.write_all(bytes)).context(writing),
    }
}
