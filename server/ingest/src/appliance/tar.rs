//! The members of a tar archive, read in place; and the headers of one that is written.
//!
//! Reads the plain format of POSIX (ustar), its extended headers (pax) and GNU's long names and sizes. Files only: an
//! archive with links, devices or sparse members is refused.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};

/// Bytes of a header, and the alignment of members.
pub(crate) const BLOCK_BYTES: u64 = 512;
/// Maximum number of headers in an archive.
const MAX_HEADERS: usize = 4096;
/// Longest extended header or long name, in bytes.
const MAX_EXTENDED_BYTES: u64 = 1 << 20;
const NAME: std::ops::Range<usize> = 0..100;
const SIZE: std::ops::Range<usize> = 124..136;
const CHECKSUM: std::ops::Range<usize> = 148..156;
const TYPE: usize = 156;
const MAGIC: std::ops::Range<usize> = 257..263;
const PREFIX: std::ops::Range<usize> = 345..500;
/// Set in the first byte of a number that is binary.
const IS_BINARY: u8 = 0x80;

/// A file in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Its name, without a leading `./`.
    pub(crate) name: String,
    /// Its first byte in the archive.
    pub(crate) offset_bytes: u64,
    pub(crate) length_bytes: u64,
}

fn refused(path: &Path, kind: ErrorKind, why: impl std::fmt::Display) -> Error {
    Error::new(kind, format!("{}: {why}", path.display()))
}

/// The files of the archive `file`, which has `length_bytes`.
///
/// # Errors
/// `InvalidInput` for another file than a tar archive, for two members of one name, and for links and devices;
/// `Io` for an archive that ends within a member.
pub(crate) fn members(file: &File, length_bytes: u64, path: &Path) -> Result<Vec<Member>> {
    let invalid = |why: &str| refused(path, ErrorKind::InvalidInput, why);
    let mut found: Vec<Member> = Vec::new();
    let mut names = BTreeSet::new();
    let mut extended = Extended::default();
    let mut at = 0;
    for number in 0.. {
        if number == MAX_HEADERS {
            return Err(invalid("the archive has too many members"));
        }
        if at + BLOCK_BYTES > length_bytes {
            // Some programs leave out the end of the archive. A missing member shows by its name.
            break;
        }
        let mut header = [0; BLOCK_BYTES as usize];
        file.read_exact_at(&mut header, at)
            .context(|| format!("reading {} at offset {at}", path.display()))?;
        if header.iter().all(|byte| *byte == 0) {
            break;
        }
        if number_of(&header[CHECKSUM]) != Some(checksum(&header)) {
            let why =
                if number == 0 { "it is not a tar archive" } else { "the archive is damaged" };
            return Err(invalid(why));
        }
        let kind = header[TYPE];
        let stated = number_of(&header[SIZE]).ok_or_else(|| invalid("the archive is damaged"))?;
        // The size of an extended header is its own.
        let is_extended = matches!(kind, b'x' | b'g' | b'L' | b'K');
        let member_bytes = extended.size_bytes.filter(|_| !is_extended).unwrap_or(stated);
        let begin = at + BLOCK_BYTES;
        let end = begin.checked_add(member_bytes).filter(|end| *end <= length_bytes);
        let Some(end) = end else {
            let why = format!(
                "the archive is truncated: at offset {at} a member of {member_bytes} bytes begins"
            );
            return Err(refused(path, ErrorKind::Io, why));
        };
        at = end.next_multiple_of(BLOCK_BYTES);
        if is_extended {
            if member_bytes > MAX_EXTENDED_BYTES {
                return Err(invalid("the archive has an extended header that is too long"));
            }
            let mut content = vec![0; member_bytes as usize];
            file.read_exact_at(&mut content, begin)
                .context(|| format!("reading {} at offset {begin}", path.display()))?;
            extended.take(kind, &content).map_err(invalid)?;
            continue;
        }
        let Extended { name, .. } = std::mem::take(&mut extended);
        let name = match name {
            Some(name) => name,
            None => header_name(&header),
        };
        let name = String::from_utf8(name).map_err(|_| invalid("a member's name is not UTF-8"))?;
        let name = name.strip_prefix("./").unwrap_or(&name).to_owned();
        match kind {
            b'0' | b'7' | 0 => {}
            b'5' => continue,
            _ => {
                let why = format!("its member '{}' is not a plain file", name.escape_debug());
                return Err(invalid(&why));
            }
        }
        if !names.insert(name.clone()) {
            let why = format!("it has two members of the name '{}'", name.escape_debug());
            return Err(invalid(&why));
        }
        found.push(Member { name, offset_bytes: begin, length_bytes: member_bytes });
    }
    Ok(found)
}

/// What extended headers say about the next member.
#[derive(Default)]
struct Extended {
    name: Option<Vec<u8>>,
    size_bytes: Option<u64>,
}

impl Extended {
    fn take(&mut self, kind: u8, content: &[u8]) -> std::result::Result<(), &'static str> {
        match kind {
            b'L' => self.name = Some(until_nul(content).to_vec()),
            b'x' => {
                self.take_records(content).ok_or("the archive has a damaged extended header")?
            }
            // The name of a link, and what holds for all members.
            _ => {}
        }
        Ok(())
    }

    /// Records `LENGTH KEY=VALUE\n`; LENGTH counts all of it.
    fn take_records(&mut self, mut content: &[u8]) -> Option<()> {
        while !until_nul(content).is_empty() {
            let space = content.iter().position(|byte| *byte == b' ')?;
            let length: usize = std::str::from_utf8(&content[..space]).ok()?.parse().ok()?;
            let record = content.get(space + 1..length)?.strip_suffix(b"\n")?;
            content = &content[length..];
            let equals = record.iter().position(|byte| *byte == b'=')?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => self.name = Some(value.to_vec()),
                b"size" => self.size_bytes = Some(std::str::from_utf8(value).ok()?.parse().ok()?),
                // The member's bytes are not the file's.
                _ if key.starts_with(b"GNU.sparse.") => return None,
                _ => {}
            }
        }
        Some(())
    }
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn header_name(header: &[u8; BLOCK_BYTES as usize]) -> Vec<u8> {
    let name = until_nul(&header[NAME]);
    let prefix = until_nul(&header[PREFIX]);
    // GNU's older format has other fields there.
    if header[MAGIC] != *b"ustar\0" || prefix.is_empty() {
        return name.to_vec();
    }
    [prefix, b"/", name].concat()
}

/// A number: octal digits, or binary ("base 256").
fn number_of(field: &[u8]) -> Option<u64> {
    let (first, rest) = field.split_first()?;
    if first & IS_BINARY != 0 {
        let first = u64::from(first & !IS_BINARY);
        return rest.iter().try_fold(first, |number, byte| {
            number.checked_mul(256).map(|number| number | u64::from(*byte))
        });
    }
    let text = std::str::from_utf8(until_nul(field)).ok()?.trim();
    if text.is_empty() {
        return Some(0);
    }
    u64::from_str_radix(text, 8).ok()
}

/// The sum of all bytes, with spaces in place of the sum itself.
fn checksum(header: &[u8; BLOCK_BYTES as usize]) -> u64 {
    let all: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
    let own: u64 = header[CHECKSUM].iter().map(|byte| u64::from(*byte)).sum();
    all - own + CHECKSUM.len() as u64 * u64::from(b' ')
}

/// The header of a file that all may read. Sizes from 8 GiB on are binary, as GNU tar and VMware write them.
///
/// # Errors
/// `InvalidInput` for a name of more than 100 bytes.
pub(crate) fn header(
    name: &str,
    length_bytes: u64,
    modified_unix_seconds: u64,
) -> Result<[u8; BLOCK_BYTES as usize]> {
    if name.len() > NAME.len() {
        let text = format!("'{name}' is too long a name for a tar archive: at most 100 bytes");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let mut header = [0; BLOCK_BYTES as usize];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(NAME.start, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    let octal = |number: u64| format!("{number:011o}\0");
    if octal(length_bytes).len() == SIZE.len() {
        put(SIZE.start, octal(length_bytes).as_bytes());
    } else {
        put(SIZE.start, &[IS_BINARY, 0, 0, 0]);
        put(SIZE.start + 4, &length_bytes.to_be_bytes());
    }
    // Eleven digits last until 2242.
    put(136, octal(modified_unix_seconds.min((1 << 33) - 1)).as_bytes());
    put(TYPE, b"0");
    put(MAGIC.start, b"ustar\x0000");
    let sum = checksum(&header);
    header[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_sizes_are_binary() {
        for length_bytes in [0, 1, (8 << 30) - 1, 8 << 30, 3 << 40] {
            let header = header("acme-disk1.vmdk", length_bytes, 1_800_000_000).unwrap();
            assert_eq!(number_of(&header[SIZE]), Some(length_bytes));
            assert_eq!(header[SIZE.start] == IS_BINARY, length_bytes >= 8 << 30);
            assert_eq!(number_of(&header[CHECKSUM]), Some(checksum(&header)));
        }
        assert!(header(&"x".repeat(101), 0, 0).is_err());
        assert_eq!(number_of(&[0xff; 12]), None);
        assert_eq!(number_of(b"     17 \0"), Some(15));
    }

    #[test]
    fn records_state_the_next_name_and_size() {
        let mut extended = Extended::default();
        let text = b"15 path=a.vmdk\n20 size=10000000000\n";
        extended.take(b'x', text).unwrap();
        assert_eq!(extended.name.as_deref(), Some(b"a.vmdk".as_slice()));
        assert_eq!(extended.size_bytes, Some(10_000_000_000));
        for damaged in ["5 a=b\n", "99 a=b\n", "6 a=b\n0 c=d\n", "x", "22 GNU.sparse.major=1\n"] {
            assert!(Extended::default().take(b'x', damaged.as_bytes()).is_err(), "{damaged}");
        }
    }
}
