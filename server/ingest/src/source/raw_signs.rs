//! Signs that a raw disk is not raw.
//!
//! Formats are never guessed: a guest can write any content into its disk, so a disk that
//! begins like an image is still read in its declared format. Certain cases are refused,
//! likely ones remarked upon, because they are usually mistakes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::vhd::{COOKIE, is_fixed_vhd};

/// The first bytes of images, with the name of their format.
const STARTS: [(&[u8], &str); 6] = [
    (b"QFI\xfb", "qcow2"),
    (b"KDMV", "vmdk"),
    (b"COWD", "vmdk"),
    (b"# Disk DescriptorFile", "vmdk"),
    (COOKIE, "vhd"),
    (b"vhdxfile", "vhdx"),
];
const LONGEST_START: usize = 21;

/// Refuses a file that is exactly a fixed VHD: read as raw, its footer would become the
/// end of the disk.
pub(super) fn refuse_fixed_vhd(file: &File, path: &Path, length: u64) -> Result<()> {
    if !is_fixed_vhd(file, length).context(|| format!("reading {}", path.display()))? {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "{0} is a fixed VHD, not a raw disk: use vhd:{0}. If it is a raw disk that only \
             ends like one, name an NBD export of it: qemu-nbd --read-only --format=raw \
             --socket=/run/disk.sock {0}, and nbd+unix:///?socket=/run/disk.sock",
            path.display()
        ),
    ))
}

/// The remark on a raw disk that begins like an image.
pub(super) fn remark_on_start(file: &File, path: &Path) -> Result<Option<String>> {
    let mut start = [0; LONGEST_START];
    let read = file.read_at(&mut start, 0).context(|| format!("reading {}", path.display()))?;
    let format = STARTS.iter().find(|(sign, _)| start[..read].starts_with(sign));
    Ok(format.map(|(_, word)| {
        format!(
            "{0} begins as a {word} image does; it was read as a raw disk, as requested. If it \
             is an image, write {word}:{0}",
            path.display()
        )
    }))
}
