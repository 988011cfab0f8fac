//! Checks of a qcow2 before QEMU opens it.

use std::path::Path;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::FileFacts;

/// All checked fields lie before this byte; the shortest header, that of version 2, has 72 bytes.
const LOOKED_AT_BYTES: usize = 80;
const MAGIC: &[u8] = b"QFI\xfb";
/// Incompatible feature: the content lies in another file.
const DATA_FILE: u64 = 1 << 2;

/// Refuses an image that refers to another file, is encrypted, or is truncated. QEMU itself refuses
/// unknown features and names them.
pub(super) fn check_qcow2(path: &Path, file: &FileFacts) -> Result<()> {
    let header = &file.head;
    // QEMU refuses anything else with its own message.
    if header.len() < LOOKED_AT_BYTES || !header.starts_with(MAGIC) {
        return Ok(());
    }
    let refused =
        |why| Err(Error::new(ErrorKind::Unsupported, format!("{} {why}", path.display())));
    let number = |at: usize| header[at..at + 4].try_into().map_or(0, u32::from_be_bytes);
    let long = |at: usize| header[at..at + 8].try_into().map_or(0, u64::from_be_bytes);
    if number(32) != 0 {
        return refused(
            "is encrypted by QEMU, and its key is unknown here: serve it with qemu-nbd, which \
             takes the key (--object secret,…), and back up that NBD export",
        );
    }
    // Version 2 has no feature bits: other fields begin there.
    if number(4) >= 3 && long(72) & DATA_FILE != 0 {
        return refused(
            "keeps its content in another file (a qcow2 data file): back it up through an NBD \
             export, or convert it with qemu-img first",
        );
    }
    // Bytes past the end read as zeroes. A missing L1 table would mean an empty disk.
    let tables_end = long(40).saturating_add(8 * u64::from(number(36)));
    let length = file.length_bytes;
    if tables_end > length {
        return Err(Error::new(
            ErrorKind::Io,
            format!(
                "{} is truncated or damaged: its L1 table ends at byte {tables_end} of {length}",
                path.display()
            ),
        ));
    }
    Ok(())
}
