//! The files that RocksDB writes record by record: its log, `NUMBER.log`, and its manifest,
//! the list of its files.
//!
//! Of the format (RocksDB's wiki: *Write Ahead Log File Format*; numbers are little endian):
//!
//! ```text
//! file:      blocks of 32 KiB; pieces do not begin in the last 6 bytes of one
//! piece:     CRC-32C of what follows the length, masked (4), length (2), kind (1: 1 for a
//!            whole record, 2 for its beginning, 3 for what is between, 4 for its end), bytes
//! CURRENT:   the manifest's name, a line break
//! ```
//!
//! A piece that does not match its checksum ends what RocksDB reads: in the log silently,
//! in the manifest with an error. One bit that flipped is put right here by that checksum,
//! in place: what is written is the byte as it was. A wrong bit would match in 1 of 16,000
//! cases in which it was no single bit, and values authenticate on their own.

use std::fs::File;
use std::io::ErrorKind::NotFound;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::mend::{files_ending, COPY_ENDING};

pub(super) const BLOCK_BYTES: usize = 32 << 10;
const HEADER_BYTES: usize = 7;
const WHOLE: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;
const MASK_DELTA: u32 = 0xa282_ead8;
/// CRC-32C's polynomial, its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;
const CURRENT: &str = "CURRENT";
const MANIFEST_PREFIX: &str = "MANIFEST-";
/// Of a database that is being written: between reading the name and looking for the file.
const MAX_TRIES: u32 = 5;

/// Puts flipped bits right in the logs, the manifest, and the name of it. Durable on return;
/// how many files there were. Nobody else writes the database.
///
/// # Errors
/// What the operating system says.
pub(crate) fn mend_records(database: &Path) -> Result<u64> {
    let mut paths = files_ending(database, "log")?;
    let mut mended = mend_current(database)?;
    // Where it cannot be named, opening says so.
    paths.extend(manifest(database).ok());
    for path in paths {
        let what = || format!("reading {}", path.display());
        let mut bytes = std::fs::read(&path).context(what)?;
        let places = mend_bits(&mut bytes);
        if places.is_empty() {
            continue;
        }
        let file = File::options().write(true).open(&path).context(what)?;
        let put = |place: &usize| file.write_all_at(&bytes[*place..*place + 1], *place as u64);
        places
            .iter()
            .try_for_each(put)
            .and_then(|()| file.sync_all())
            .context(|| format!("mending {}", path.display()))?;
        tracing::warn!(path = %path.display(), ?places, "flipped bits were put right");
        mended += 1;
    }
    Ok(mended)
}

/// The manifest that `CURRENT` names.
///
/// # Errors
/// `Corrupt` where it names none that is there; what the operating system says.
pub(super) fn manifest(database: &Path) -> Result<PathBuf> {
    let path = database.join(CURRENT);
    let mut tries = 0;
    loop {
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == NotFound => Vec::new(),
            text => text.context(|| format!("reading {}", path.display()))?,
        };
        if let Some(manifest) = named(database, &text)? {
            return Ok(manifest);
        }
        tries += 1;
        if tries == MAX_TRIES {
            let why = match line_name(&text) {
                Some(name) => format!("names {name}, which is missing"),
                None if text.is_empty() => "is missing or empty".to_owned(),
                None => "is damaged".to_owned(),
            };
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("{} {why}: run coldrise repair", path.display()),
            ));
        }
    }
}

fn named(database: &Path, text: &[u8]) -> Result<Option<PathBuf>> {
    let Some(name) = line_name(text) else { return Ok(None) };
    let path = database.join(name);
    let is_there = path.try_exists().context(|| format!("looking for {}", path.display()))?;
    Ok(is_there.then_some(path))
}

/// The name of a manifest in a line.
fn line_name(text: &[u8]) -> Option<&str> {
    let name = text.strip_suffix(b"\n").and_then(|name| std::str::from_utf8(name).ok());
    name.filter(|name| number(name).is_some())
}

fn number(name: &str) -> Option<u64> {
    name.strip_prefix(MANIFEST_PREFIX)?.parse().ok()
}

/// Makes `CURRENT` name a manifest that is there; 1 where it did not. Where there are
/// several a crash came while RocksDB went from one to the next: both tell the same, and the
/// name that is one bit off is the one that counted.
fn mend_current(database: &Path) -> Result<u64> {
    let what = || format!("mending {}", database.join(CURRENT).display());
    let text = match std::fs::read(database.join(CURRENT)) {
        Err(error) if error.kind() == NotFound => Vec::new(),
        text => text.context(what)?,
    };
    if named(database, &text)?.is_some() {
        return Ok(0);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(database).context(what)? {
        let name = entry.context(what)?.file_name().into_string().unwrap_or_default();
        found.extend(number(&name).map(|number| (number, format!("{name}\n"))));
    }
    let distance = |line: &str| -> u32 {
        let differing = line.bytes().zip(&text).map(|(a, b)| (a ^ b).count_ones());
        differing.sum::<u32>() + 8 * line.len().abs_diff(text.len()) as u32
    };
    found.sort();
    let nearest = found.iter().find(|(_, line)| distance(line) == 1);
    let Some((_, line)) = nearest.or(found.last()) else { return Ok(0) };
    put_current(database, line)?;
    tracing::warn!(names = line.trim_end(), "CURRENT was made anew");
    Ok(1)
}

fn put_current(database: &Path, line: &str) -> Result<()> {
    let path = database.join(CURRENT);
    let copy = path.with_extension(COPY_ENDING);
    std::fs::write(&copy, line)
        .and_then(|()| File::open(&copy)?.sync_all())
        .and_then(|()| std::fs::rename(&copy, &path))
        .and_then(|()| File::open(database)?.sync_all())
        .context(|| format!("writing {}", path.display()))
}

/// Makes a manifest of these edits and lets `CURRENT` name it, durably: until then the
/// database is as it was.
pub(super) fn put_manifest(
    database: &Path,
    number: u64,
    edits: impl Iterator<Item = Vec<u8>>,
) -> Result<()> {
    let name = format!("{MANIFEST_PREFIX}{number:06}");
    let path = database.join(&name);
    let mut bytes = Vec::new();
    for edit in edits {
        bytes.extend(record(bytes.len(), &edit));
    }
    std::fs::write(&path, &bytes)
        .and_then(|()| File::open(&path)?.sync_all())
        .and_then(|()| File::open(database)?.sync_all())
        .context(|| format!("writing {}", path.display()))?;
    put_current(database, &format!("{name}\n"))
}

/// What is at a place.
enum Found {
    /// A piece of this kind, which ends there.
    Piece(u8, usize),
    /// Nothing up to there: the rest of a block.
    Rest(usize),
    /// A piece that is damaged, or was never finished.
    Damaged,
    End,
}

fn look(bytes: &[u8], at: usize) -> Found {
    let left = BLOCK_BYTES - at % BLOCK_BYTES;
    if left < HEADER_BYTES {
        return Found::Rest(at + left);
    }
    let Some(header) = bytes.get(at..at + HEADER_BYTES) else { return Found::End };
    let kind = header[6];
    match piece(bytes, at, length(header)) {
        Some(piece)
            if (WHOLE..=LAST).contains(&kind) && stored(header) == checksum(kind, piece) =>
        {
            Found::Piece(kind, at + HEADER_BYTES + piece.len())
        }
        _ => Found::Damaged,
    }
}

fn stored(header: &[u8]) -> u32 {
    header.first_chunk::<4>().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn length(header: &[u8]) -> u16 {
    u16::from_le_bytes([header[4], header[5]])
}

/// The bytes of a piece of a length, where it has room for as many.
fn piece(bytes: &[u8], at: usize, length: u16) -> Option<&[u8]> {
    let (start, length) = (at + HEADER_BYTES, usize::from(length));
    let has_room = HEADER_BYTES + length <= BLOCK_BYTES - at % BLOCK_BYTES;
    bytes.get(start..start + length).filter(|_| has_room)
}

/// Of a kind and the bytes after it, as it is stored.
fn checksum(kind: u8, piece: &[u8]) -> u32 {
    masked(crc32c::crc32c_append(crc32c::crc32c(&[kind]), piece))
}

fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(MASK_DELTA)
}

fn unmasked(stored: u32) -> u32 {
    stored.wrapping_sub(MASK_DELTA).rotate_left(15)
}

/// Where the last whole record ends: behind it an edit counts, behind anything else none.
pub(super) fn sound_end(bytes: &[u8]) -> usize {
    let (mut at, mut end) = (0, 0);
    loop {
        at = match look(bytes, at) {
            Found::Piece(kind, next) => {
                if matches!(kind, WHOLE | LAST) {
                    end = next;
                }
                next
            }
            Found::Rest(next) => next,
            Found::Damaged | Found::End => return end,
        }
    }
}

/// The records of a file up to the first piece that is damaged, or was never finished; and
/// whether that is all of it.
pub(super) fn records(bytes: &[u8]) -> (Vec<Vec<u8>>, bool) {
    let (mut at, mut found, mut begun) = (0, Vec::new(), Vec::new());
    loop {
        at = match look(bytes, at) {
            Found::Piece(kind, next) => {
                if matches!(kind, WHOLE | FIRST) {
                    begun.clear();
                }
                begun.extend_from_slice(&bytes[at + HEADER_BYTES..next]);
                if matches!(kind, WHOLE | LAST) {
                    found.push(std::mem::take(&mut begun));
                }
                next
            }
            Found::Rest(next) => next,
            Found::End => return (found, begun.is_empty()),
            Found::Damaged => return (found, false),
        }
    }
}

/// A record as it is written at `offset`: in several pieces where a block ends within it.
pub(super) fn record(offset: usize, content: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest, mut is_first) = (Vec::new(), content, true);
    loop {
        let left = BLOCK_BYTES - (offset + bytes.len()) % BLOCK_BYTES;
        if left < HEADER_BYTES {
            bytes.resize(bytes.len() + left, 0);
            continue;
        }
        let (piece, after) = rest.split_at(rest.len().min(left - HEADER_BYTES));
        let kind = match (is_first, after.is_empty()) {
            (true, true) => WHOLE,
            (true, false) => FIRST,
            (false, true) => LAST,
            (false, false) => MIDDLE,
        };
        bytes.extend_from_slice(&checksum(kind, piece).to_le_bytes());
        bytes.extend_from_slice(&(piece.len() as u16).to_le_bytes());
        bytes.push(kind);
        bytes.extend_from_slice(piece);
        (rest, is_first) = (after, false);
        if rest.is_empty() {
            return bytes;
        }
    }
}

/// Puts flipped bits right, one in each piece, up to the first piece that is otherwise
/// damaged; the places of the bytes.
fn mend_bits(bytes: &mut [u8]) -> Vec<usize> {
    let (mut at, mut places) = (0, Vec::new());
    loop {
        at = match look(bytes, at) {
            Found::Piece(_, next) | Found::Rest(next) => next,
            Found::End => return places,
            Found::Damaged => {
                let Some((place, bit)) = flipped(bytes, at) else { return places };
                bytes[place] ^= bit;
                places.push(place);
                continue;
            }
        }
    }
}

/// The bit of a piece that makes its checksum right.
fn flipped(bytes: &[u8], at: usize) -> Option<(usize, u8)> {
    let header = &bytes[at..at + HEADER_BYTES];
    let (kind, length, wanted) = (header[6], length(header), stored(header));
    for bit in 0..16 {
        let tried = length ^ (1 << bit);
        if piece(bytes, at, tried).is_some_and(|piece| checksum(kind, piece) == wanted) {
            return Some((at + 4 + bit / 8, 1 << (bit % 8)));
        }
    }
    let piece = piece(bytes, at, length)?;
    for bit in 0..8 {
        let tried = kind ^ (1 << bit);
        if (WHOLE..=LAST).contains(&tried) && checksum(tried, piece) == wanted {
            return Some((at + 6, 1 << bit));
        }
    }
    if !(WHOLE..=LAST).contains(&kind) {
        return None;
    }
    let differing = wanted ^ checksum(kind, piece);
    if differing.count_ones() == 1 {
        let bit = differing.trailing_zeros();
        return Some((at + bit as usize / 8, 1 << (bit % 8)));
    }
    // What a bit changes in the checksum depends on how far from the end it is, and on
    // nothing else.
    let change = unmasked(wanted) ^ unmasked(checksum(kind, piece));
    let mut changes: [u32; 8] = std::array::from_fn(|bit| shifted(1 << bit));
    for place in (0..piece.len()).rev() {
        if let Some(bit) = changes.iter().position(|of_bit| *of_bit == change) {
            return Some((at + HEADER_BYTES + place, 1 << bit));
        }
        changes = changes.map(shifted);
    }
    None
}

/// The remainder after one more byte of zeroes.
fn shifted(remainder: u32) -> u32 {
    (0..8).fold(remainder, |value, _| (value >> 1) ^ (POLYNOMIAL & 0_u32.wrapping_sub(value & 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rocks::{Database, Family, ReadMode};

    /// A database whose values are in the log, in records of one piece and of several.
    fn database(folder: &Path) -> PathBuf {
        let path = folder.join("db");
        let database = Database::open_primary(&path, folder, true).unwrap();
        for round in 0..3_u8 {
            let mut batch = database.batch();
            for (i, bytes) in [10, 40_000, 100].into_iter().enumerate() {
                let value: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8 ^ round).collect();
                batch.put(Family::Catalog, &[round, i as u8], &value).unwrap();
            }
            database.write(batch, true).unwrap();
        }
        // Without the flush of a clean end.
        std::mem::forget(database);
        let copy = folder.join("copy");
        std::fs::create_dir(&copy).unwrap();
        for entry in std::fs::read_dir(&path).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name() != "LOCK" {
                std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
            }
        }
        copy
    }

    fn count(path: &Path, folder: &Path) -> Result<usize> {
        let database = Database::open_primary(path, folder, false)?;
        let is_there =
            |key: &[u8; 2]| database.get(Family::Catalog, key, ReadMode::Cached).unwrap().is_some();
        let keys = (0..3_u8).flat_map(|round| (0..3_u8).map(move |i| [round, i]));
        Ok(keys.filter(is_there).count())
    }

    #[test]
    fn any_flipped_bit_of_the_log_and_the_manifest_is_put_right() {
        let folder = tempfile::tempdir().unwrap();
        let path = database(folder.path());
        let mut logs = files_ending(&path, "log").unwrap();
        logs.retain(|log| std::fs::metadata(log).unwrap().len() > 0);
        let [log] = &logs[..] else { panic!("{logs:?}") };
        for file in [log, &manifest(&path).unwrap()] {
            let sound = std::fs::read(file).unwrap();
            assert!(mend_bits(&mut sound.clone()).is_empty());
            assert_eq!(sound_end(&sound), sound.len());
            let step = (sound.len() / 4000).max(1);
            for place in (0..sound.len()).step_by(step).chain(0..200) {
                let mut bytes = sound.clone();
                bytes[place] ^= 1 << (place % 8);
                assert_eq!(mend_bits(&mut bytes), [place], "byte {place} of {}", file.display());
                assert!(bytes == sound);
            }
            // Two bits of one piece are left as they are, and RocksDB judges.
            let mut bytes = sound.clone();
            bytes[HEADER_BYTES] ^= 1;
            bytes[HEADER_BYTES + 9] ^= 0x10;
            let damaged = bytes.clone();
            assert!(mend_bits(&mut bytes).is_empty() && bytes == damaged);
        }
        let sound = std::fs::read(log).unwrap();
        let mut bytes = sound.clone();
        bytes[50_000] ^= 4;
        std::fs::write(log, &bytes).unwrap();
        assert_eq!(mend_records(&path).unwrap(), 1);
        assert!(std::fs::read(log).unwrap() == sound);
        assert_eq!(count(&path, folder.path()).unwrap(), 9);
    }

    #[test]
    fn a_log_that_was_cut_short_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = database(folder.path());
        let log = files_ending(&path, "log").unwrap().pop().unwrap();
        let sound = std::fs::read(&log).unwrap();
        for length in [sound.len() - 1, sound.len() - 5, sound.len() / 2, 3, 0] {
            let mut bytes = sound[..length].to_vec();
            assert!(mend_bits(&mut bytes).is_empty() && bytes == sound[..length]);
            let end = sound_end(&bytes);
            assert!(end <= length && sound_end(&sound[..end]) == end);
        }
    }

    #[test]
    fn the_name_of_the_manifest_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = database(folder.path());
        let current = path.join(CURRENT);
        let sound = std::fs::read(&current).unwrap();
        assert_eq!(mend_records(&path).unwrap(), 0);
        // One that RocksDB had begun, or given up.
        std::fs::write(path.join("MANIFEST-000001"), b"").unwrap();
        std::fs::write(path.join("MANIFEST-999999"), b"").unwrap();
        for bit in 0..sound.len() * 8 {
            let mut text = sound.clone();
            text[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&current, &text).unwrap();
            if manifest(&path).is_ok() {
                continue; // it names another one
            }
            assert_eq!(mend_records(&path).unwrap(), 1);
            assert_eq!(std::fs::read(&current).unwrap(), sound, "bit {bit}");
        }
        std::fs::remove_file(path.join("MANIFEST-999999")).unwrap();
        for text in [&b""[..], b"nonsense", b"MANIFEST-777777\n"] {
            std::fs::write(&current, text).unwrap();
            let error = Database::open_secondary(&path, folder.path()).err().unwrap();
            assert!(error.full_message().contains("coldrise repair"), "{error:?}");
            assert_eq!(mend_records(&path).unwrap(), 1);
            assert_eq!(std::fs::read(&current).unwrap(), sound);
        }
        std::fs::remove_file(&current).unwrap();
        assert_eq!(mend_records(&path).unwrap(), 1);
        assert_eq!(count(&path, folder.path()).unwrap(), 9);
    }
}
