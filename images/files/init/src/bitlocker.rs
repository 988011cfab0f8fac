//! Keys of BitLocker: recovery keys in a file of keys, and the clear key of a volume whose protection is suspended.
//!
//! ```text
//! sector 0   "-FVE-FS-" at 3, or To Go: "MSWIN4.1"; then a GUID and three offsets (u64) of the metadata
//! metadata   block header of 64 bytes; header of 48 bytes, which begins with the length of itself and the entries (u32)
//! entry      length, type, value, version (u16 each), content
//! key of the volume's key   type 2: GUID, time (8 bytes), u16, protection (u16), entries
//! ```

use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where the GUID stands in the first sector of a BitLocker To Go volume.
pub(crate) const TO_GO_PLACE: usize = 424;
/// The GUID before the metadata's offsets.
pub(crate) const GUID: [u8; 16] =
    [0x3b, 0xd6, 0x67, 0x49, 0x29, 0x2e, 0xd8, 0x4a, 0x83, 0x99, 0xf6, 0xa3, 0x39, 0xe3, 0xd0, 1];
const PLACE: usize = 160;
const AREA_BYTES: usize = 64 << 10;
const HEADERS_BYTES: usize = 64 + 48;
const ENTRY_BYTES: usize = 8;
/// In an entry of type 2.
const PROTECTION_PLACE: usize = 34;
const INNER_PLACE: usize = 36;
const CLEAR_KEY: usize = 0;
const STARTUP_KEY: usize = 0x0200;

/// The recovery keys in a text, each 8 groups of 6 digits with `-` between them. The text may be the file that Windows
/// saves, which is UTF-16.
pub(crate) fn recovery_keys(text: &[u8]) -> Vec<String> {
    let text: String =
        text.iter().filter(|byte| **byte != 0).map(|byte| char::from(*byte)).collect();
    let words = text.split(|c: char| !c.is_ascii_digit() && c != '-');
    let is_key =
        |word: &&str| word.len() == 8 * 7 - 1 && word.split('-').all(|group| group.len() == 6);
    words.filter(is_key).map(str::to_owned).collect()
}

/// The number of the first group of a recovery key that cannot be right: each is a multiple of 11.
pub(crate) fn mistyped_group(key: &str) -> Option<usize> {
    let is_wrong = |group: &str| group.parse::<u32>().is_ok_and(|number| number % 11 != 0);
    key.split('-').position(is_wrong).map(|index| index + 1)
}

/// The clear key of a volume whose protection is suspended, as a file of a startup key. cryptsetup up to 2.8 refuses a volume
/// with a clear key, though it is the same as a startup key that lies in the metadata. So the volume, which is a throwaway copy,
/// is changed to say that.
pub(crate) fn clear_key(device: &Path) -> Result<Option<Vec<u8>>> {
    let volume = File::options().read(true).write(true).open(device)?;
    let mut sector = [0; 512];
    volume.read_exact_at(&mut sector, 0)?;
    let is_to_go = sector.get(TO_GO_PLACE..).is_some_and(|bytes| bytes.starts_with(&GUID));
    let place = if is_to_go { TO_GO_PLACE } else { PLACE } + GUID.len();
    let offset = sector.get(place..).and_then(|bytes| bytes.first_chunk()).copied();
    let offset = offset.map(u64::from_le_bytes).unwrap_or_default();
    let mut area = vec![0; AREA_BYTES];
    volume.read_exact_at(&mut area, offset)?;
    let Some((place, key)) = find_clear_key(&area) else { return Ok(None) };
    let place = offset.saturating_add(place as u64);
    volume.write_all_at(&(STARTUP_KEY as u16).to_le_bytes(), place)?;
    Ok(Some(key))
}

/// The place of the clear key's protection in the metadata, and the key as a file of a startup key.
fn find_clear_key(area: &[u8]) -> Option<(usize, Vec<u8>)> {
    for (place, entry) in entries(area, HEADERS_BYTES) {
        let protection = number(entry, PROTECTION_PLACE);
        // It may be changed already.
        let is_clear = matches!(protection, Some(CLEAR_KEY | STARTUP_KEY));
        if number(entry, 2) != Some(2) || !is_clear {
            continue;
        }
        let key =
            entries(entry, INNER_PLACE).into_iter().find(|(_, inner)| number(inner, 4) == Some(1));
        if let (Some(guid), Some((_, key))) = (entry.get(8..24), key) {
            let file = startup_key(guid, key)?;
            return Some((place + PROTECTION_PLACE, file));
        }
    }
    None
}

/// The entries from a place on, with their places.
fn entries(bytes: &[u8], mut place: usize) -> Vec<(usize, &[u8])> {
    let mut found = Vec::new();
    while let Some(length) = number(bytes, place).filter(|length| *length >= ENTRY_BYTES) {
        let Some(entry) = bytes.get(place..place + length) else { break };
        found.push((place, entry));
        place += length;
    }
    found
}

fn number(bytes: &[u8], place: usize) -> Option<usize> {
    let number = bytes.get(place..)?.first_chunk()?;
    Some(u16::from_le_bytes(*number).into())
}

/// A file (.BEK) with a startup key: a header with the GUID of what it opens, and an entry around that of the key.
fn startup_key(guid: &[u8], key: &[u8]) -> Option<Vec<u8>> {
    let inner_bytes = u16::try_from(ENTRY_BYTES + 24 + key.len()).ok()?;
    let file_bytes = 48 + u32::from(inner_bytes);
    let mut file = Vec::new();
    for number in [file_bytes, 1, 48, file_bytes] {
        file.extend_from_slice(&number.to_le_bytes());
    }
    file.extend_from_slice(guid);
    file.extend_from_slice(&[0; 16]);
    for number in [inner_bytes, 6, 9, 1] {
        file.extend_from_slice(&number.to_le_bytes());
    }
    file.extend_from_slice(&[0; 24]);
    file.extend_from_slice(key);
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_keys_are_found_in_the_file_that_windows_saves() {
        let key = "235818-357951-253979-013365-241120-245575-342914-591910";
        assert_eq!(recovery_keys(format!("{key}\r\n").as_bytes()), [key]);
        let saved = format!(
            "Identifier:\r\n\t64311DEA-4587-4029-924A-BA299647998E\r\nRecovery Key:\r\n\t{key}\r\n"
        );
        let wide: Vec<u8> = saved.encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert_eq!(recovery_keys(&[b"\xff\xfe", wide.as_slice()].concat()), [key]);
        assert_eq!(recovery_keys(b"235818-357951"), [""; 0]);
        assert_eq!(mistyped_group(key), None);
        assert_eq!(mistyped_group(&key.replace("013365", "013356")), Some(4));
    }
}
