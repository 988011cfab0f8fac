//! Changes the persistent dirty bitmaps of a qcow2 image that no program has open.

use std::sync::atomic::AtomicBool;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::{ProgramEnd, ScratchSpace};

use super::questions::ask;
use super::{QemuImage, refused};

/// A change of an image's bitmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BitmapChange {
    /// Adds an empty one, which counts from now on.
    Add,
    /// Removes one.
    Remove,
}

/// Makes the change under QEMU's own lock for writing, which is held for some 10 ms. `image` is opened without its backing
/// file and any other file. The bitmap's name begins with a letter.
///
/// # Errors
/// `Busy` if a program has the image open for writing; `ToolFailed` with QEMU's reason. The bitmaps are then as before.
pub(crate) fn change_bitmap(
    space: &ScratchSpace,
    mut image: QemuImage,
    change: BitmapChange,
    bitmap: &str,
) -> Result<()> {
    for file in &mut image.files {
        file.is_writable = true;
    }
    let word = match change {
        BitmapChange::Add => "--add",
        BitmapChange::Remove => "--remove",
    };
    let path = image.files.first().map(|file| file.path.display().to_string());
    let what = format!("changing the bitmaps of {}", path.unwrap_or_default());
    // A change that began is not cancelled.
    let answer = ask(space, &["bitmap", word], &image, &[bitmap], &what, &AtomicBool::new(false))?;
    if answer.end == ProgramEnd::Code(0) {
        return Ok(());
    }
    if answer.messages.contains("\" lock") {
        return Err(Error::new(ErrorKind::Busy, answer.messages)).context(|| what);
    }
    Err(refused(&what, answer.messages))
}
