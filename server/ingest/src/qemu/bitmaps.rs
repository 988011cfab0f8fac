//! Changes the persistent dirty bitmaps of a qcow2 image that no program has open.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::questions::ask;
use super::{refused, QemuImage};

/// A change of an image's bitmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BitmapChange {
    /// Adds an empty one, which counts from now on.
    Add,
    /// Removes one.
    Remove,
}

/// Makes the change under QEMU's own lock for writing, which is held for some 10 ms. Opens neither the backing file nor
/// any other file. The bitmap's name begins with a letter.
///
/// # Errors
/// `Busy` if a program has the image open for writing; `ToolFailed` with QEMU's reason. The bitmaps are then as before.
pub(crate) fn change_bitmap(path: &Path, change: BitmapChange, bitmap: &str) -> Result<()> {
    let mut image = QemuImage::new("qcow2", path, &[], None)?;
    for file in &mut image.files {
        file.is_writable = true;
    }
    let word = match change {
        BitmapChange::Add => "--add",
        BitmapChange::Remove => "--remove",
    };
    let what = format!("changing the bitmaps of {}", path.display());
    // A change that began is not cancelled.
    let answer = ask(&["bitmap", word], &image, &[bitmap], &what, &AtomicBool::new(false))?;
    if answer.status.is_some_and(|status| status.success()) {
        return Ok(());
    }
    if answer.messages.contains("\" lock") {
        return Err(Error::new(ErrorKind::Busy, answer.messages)).context(|| what);
    }
    Err(refused(&what, answer.messages))
}
