//! A zip file that is written from the beginning to the end (APPNOTE 6.3.10, with the 64-bit fields where needed).
//!
//! Names are UTF-8. A name can hold what is harmful or impossible elsewhere: a backslash separates folders
//! on Windows, a colon names a drive there, a dot or a space at the end is dropped, `?` and the like are refused, and
//! `CON` and the like are devices, with any ending. Such bytes, and the last letter of such a device, are written as
//! `%HH`, so that different names stay different.

use std::io::Write;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_files_protocol::{Entry, EntryKind};
use flate2::write::DeflateEncoder;
use flate2::{Compression, Crc};

use super::tar::WRITING;

/// Sizes from here on have 64 bits. Compressed content can be a little longer than the file.
const LARGE_BYTES: u64 = 0xf000_0000;
const MAX_32: u64 = 0xffff_ffff;
/// Maximum size of the directory at the end, which stays in memory until then.
const MAX_DIRECTORY_BYTES: usize = 256 << 20;
/// Maximum length of a name, in bytes.
const MAX_NAME_BYTES: usize = 0xffff;
/// Names of devices on Windows, beside COM1 to COM9 and LPT1 to LPT9.
const DEVICES: [&str; 6] = ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"];
/// The sizes follow the content; the name is UTF-8.
const FLAGS: u16 = 1 << 3 | 1 << 11;
const DEFLATED: u16 = 8;
/// Version 4.5 of the format, which has 64-bit fields.
const NEEDED_VERSION: u16 = 45;
/// The attributes are those of Unix.
const MADE_BY: u16 = 3 << 8 | NEEDED_VERSION;

/// Counts what it passes on.
struct Counter<W: Write> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for Counter<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

enum Output<W: Write> {
    /// Between files.
    Plain(Counter<W>),
    /// In a file.
    Deflating(DeflateEncoder<Counter<W>>),
    /// While one becomes the other, and after an error.
    Nothing,
}

/// The last entry, whose content is being written.
struct Member {
    name: Vec<u8>,
    attributes: u32,
    moment: Moment,
    /// Where its header is.
    offset: u64,
    /// Where its content begins.
    content: u64,
    is_large: bool,
    /// The checksum of the content so far.
    crc: Crc,
    size_bytes: u64,
}

/// A zip file that is being written.
pub(super) struct Zip<W: Write> {
    output: Output<W>,
    member: Option<Member>,
    directory: Vec<u8>,
    members: u64,
}

impl<W: Write> Zip<W> {
    pub(super) fn new(out: W) -> Zip<W> {
        let output = Output::Plain(Counter { out, bytes: 0 });
        Zip { output, member: None, directory: Vec::new(), members: 0 }
    }

    /// Adds an entry under that path; that of a folder ends with a slash.
    pub(super) fn add(&mut self, entry: &Entry, path: &[u8], mode: u32) -> Result<()> {
        let mut out = self.complete()?;
        let kind = match entry.kind {
            EntryKind::Folder => 0o40000,
            EntryKind::Link => 0o120000,
            EntryKind::File | EntryKind::Special => 0o100000,
        };
        let is_folder = u32::from(entry.kind == EntryKind::Folder);
        let name = portable(path);
        if name.len() > MAX_NAME_BYTES || self.directory.len() > MAX_DIRECTORY_BYTES {
            let text = "there are too many files for a zip file, or a name is too long";
            return Err(Error::new(ErrorKind::Unsupported, text).advise("make a tar file"));
        }
        let member = Member {
            attributes: (kind | mode) << 16 | is_folder << 4,
            moment: Moment::of(entry.modified_s),
            offset: out.bytes,
            content: 0,
            is_large: entry.size_bytes >= LARGE_BYTES,
            crc: Crc::new(),
            size_bytes: 0,
            name,
        };
        let mut header = b"PK\x03\x04".to_vec();
        put16(
            &mut header,
            &[NEEDED_VERSION, FLAGS, DEFLATED, member.moment.time, member.moment.day],
        );
        // Checksum and sizes follow the content.
        let size = if member.is_large { MAX_32 as u32 } else { 0 };
        put32(&mut header, &[0, size, size]);
        let mut extra = member.moment.extra.clone();
        if member.is_large {
            put16(&mut extra, &[1, 16]);
            put64(&mut extra, &[0, 0]);
        }
        put16(&mut header, &[member.name.len() as u16, extra.len() as u16]);
        header.extend_from_slice(&member.name);
        header.extend_from_slice(&extra);
        out.write_all(&header).context(WRITING)?;
        let content = out.bytes;
        self.output = Output::Deflating(DeflateEncoder::new(out, Compression::fast()));
        self.member = Some(Member { content, ..member });
        if entry.kind == EntryKind::Link {
            self.write(&entry.target)?;
        }
        Ok(())
    }

    /// Adds content of the last file.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if let (Output::Deflating(encoder), Some(member)) = (&mut self.output, &mut self.member) {
            member.crc.update(bytes);
            member.size_bytes += bytes.len() as u64;
            encoder.write_all(bytes).context(WRITING)?;
        }
        Ok(())
    }

    /// Completes the last entry.
    fn complete(&mut self) -> Result<Counter<W>> {
        let mut out = match std::mem::replace(&mut self.output, Output::Nothing) {
            Output::Plain(out) => out,
            Output::Deflating(encoder) => encoder.finish().context(WRITING)?,
            Output::Nothing => {
                return Err(Error::new(
                    ErrorKind::Poisoned,
                    "writing the archive has failed before",
                ));
            }
        };
        let Some(member) = self.member.take() else { return Ok(out) };
        let packed = out.bytes - member.content;
        let (crc, size) = (member.crc.sum(), member.size_bytes);
        let mut descriptor = b"PK\x07\x08".to_vec();
        put32(&mut descriptor, &[crc]);
        match member.is_large {
            true => put64(&mut descriptor, &[packed, size]),
            false => put32(&mut descriptor, &[packed as u32, size as u32]),
        }
        out.write_all(&descriptor).context(WRITING)?;
        self.list(&member, crc, packed, size);
        Ok(out)
    }

    /// Adds an entry to the directory at the end.
    fn list(&mut self, member: &Member, crc: u32, packed: u64, size: u64) {
        let mut extra = member.moment.extra.clone();
        let is_far = member.offset >= MAX_32;
        let large = if member.is_large { vec![size, packed] } else { Vec::new() };
        let large: Vec<u64> = large.into_iter().chain(is_far.then_some(member.offset)).collect();
        if !large.is_empty() {
            put16(&mut extra, &[1, 8 * large.len() as u16]);
            put64(&mut extra, &large);
        }
        let short =
            |number: u64, is_long: bool| if is_long { MAX_32 as u32 } else { number as u32 };
        let directory = &mut self.directory;
        directory.extend_from_slice(b"PK\x01\x02");
        let moment = &member.moment;
        put16(directory, &[MADE_BY, NEEDED_VERSION, FLAGS, DEFLATED, moment.time, moment.day]);
        put32(directory, &[crc, short(packed, member.is_large), short(size, member.is_large)]);
        put16(directory, &[member.name.len() as u16, extra.len() as u16, 0, 0, 0]);
        put32(directory, &[member.attributes, short(member.offset, is_far)]);
        directory.extend_from_slice(&member.name);
        directory.extend_from_slice(&extra);
        self.members += 1;
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> Result<W> {
        let mut out = self.complete()?;
        let (start, length) = (out.bytes, self.directory.len() as u64);
        out.write_all(&self.directory).context(WRITING)?;
        let end = out.bytes;
        let mut last = Vec::new();
        let is_long = self.members >= 0xffff || start + length >= MAX_32;
        if is_long {
            last.extend_from_slice(b"PK\x06\x06");
            put64(&mut last, &[44]);
            put16(&mut last, &[MADE_BY, NEEDED_VERSION]);
            put32(&mut last, &[0, 0]);
            put64(&mut last, &[self.members, self.members, length, start]);
            last.extend_from_slice(b"PK\x06\x07");
            put32(&mut last, &[0]);
            put64(&mut last, &[end]);
            put32(&mut last, &[1]);
        }
        let count = if is_long { 0xffff } else { self.members as u16 };
        let short = |number: u64| if is_long { MAX_32 as u32 } else { number as u32 };
        last.extend_from_slice(b"PK\x05\x06");
        put16(&mut last, &[0, 0, count, count]);
        put32(&mut last, &[short(length), short(start)]);
        put16(&mut last, &[0]);
        out.write_all(&last).context(WRITING)?;
        Ok(out.out)
    }
}

fn put16(bytes: &mut Vec<u8>, numbers: &[u16]) {
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
}

fn put32(bytes: &mut Vec<u8>, numbers: &[u32]) {
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
}

fn put64(bytes: &mut Vec<u8>, numbers: &[u64]) {
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
}

/// The time of the last change.
struct Moment {
    /// The time of day, in steps of two seconds, as DOS has it.
    time: u16,
    day: u16,
    /// The field of Unix, in seconds since 1970.
    extra: Vec<u8>,
}

impl Moment {
    /// DOS knows the years from 1980 to 2107.
    fn of(unix_s: i64) -> Moment {
        const FIRST: i64 = 315_532_800;
        const LAST: i64 = 4_354_819_199;
        let second = unix_s.clamp(FIRST, LAST);
        let (mut year, mut days) = (1980, (second - FIRST) / 86_400);
        let is_leap = |year: i64| year % 4 == 0 && year != 2100;
        while days >= 365 + i64::from(is_leap(year)) {
            days -= 365 + i64::from(is_leap(year));
            year += 1;
        }
        let lengths = [31, 28 + i64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let mut month = 1;
        for length in lengths {
            if days < length {
                break;
            }
            days -= length;
            month += 1;
        }
        let of_day = second.rem_euclid(86_400);
        let time = (of_day / 3600) << 11 | (of_day / 60 % 60) << 5 | (of_day % 60 / 2);
        let mut extra = Vec::new();
        if let Ok(unix_s) = i32::try_from(unix_s) {
            put16(&mut extra, &[0x5455, 5]);
            extra.push(1);
            extra.extend_from_slice(&unix_s.to_le_bytes());
        }
        Moment {
            time: u16::try_from(time).unwrap_or_default(),
            day: u16::try_from((year - 1980) << 9 | month << 5 | (days + 1)).unwrap_or_default(),
            extra,
        }
    }
}

/// A path as UTF-8 that means the same everywhere.
fn portable(path: &[u8]) -> Vec<u8> {
    let mut name = Vec::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        let text = chunk.valid().as_bytes();
        for (index, byte) in text.iter().copied().enumerate() {
            let rest = text.get(index + 1..).unwrap_or_default();
            let is_escape =
                byte == b'%' && rest.iter().take(2).filter(|b| b.is_ascii_hexdigit()).count() == 2;
            // The end of a name, which may be the end of the path.
            let is_last = match rest.first() {
                Some(next) => *next == b'/',
                None => chunk.invalid().is_empty(),
            };
            let is_dropped = matches!(byte, b'.' | b' ') && is_last;
            match byte {
                b'\\' | b':' | b'<' | b'>' | b'"' | b'|' | b'?' | b'*' => escape(byte, &mut name),
                byte if is_device(&text[..=index], rest) => escape(byte, &mut name),
                byte if byte.is_ascii_control() || is_escape || is_dropped => {
                    escape(byte, &mut name)
                }
                byte => name.push(byte),
            }
        }
        chunk.invalid().iter().for_each(|byte| escape(*byte, &mut name));
    }
    name
}

/// Whether a name up to its ending is that of a device on Windows. `before` ends with its last letter.
fn is_device(before: &[u8], rest: &[u8]) -> bool {
    if !matches!(rest.first(), None | Some(b'/' | b'.' | b' ')) {
        return false;
    }
    let stem = before.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    DEVICES.iter().any(|device| stem.eq_ignore_ascii_case(device.as_bytes()))
        || stem.split_last_chunk().is_some_and(|(port, [number])| {
            (port.eq_ignore_ascii_case(b"COM") || port.eq_ignore_ascii_case(b"LPT"))
                && matches!(number, b'1'..=b'9')
        })
}

fn escape(byte: u8, name: &mut Vec<u8>) {
    name.extend_from_slice(format!("%{byte:02X}").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::super::paths::tests::entry;
    use super::*;

    #[test]
    fn names_mean_the_same_everywhere() {
        for (path, name) in [
            (b"a/\xc3\x9cbung 1.txt".as_slice(), "a/\u{dc}bung 1.txt"),
            (b"..\\..\\x", "..%5C..%5Cx"),
            (b"C:x", "C%3Ax"),
            (b"a\xff", "a%FF"),
            (b"a\nb", "a%0Ab"),
            (b"a%5Cb", "a%255Cb"),
            (b"100%", "100%"),
            (b".. /x./y ", "..%20/x%2E/y%20"),
            (b"a.\xff", "a.%FF"),
            (b"<img src=\"x\">|?*", "%3Cimg src=%22x%22%3E%7C%3F%2A"),
            (b"con/Aux.txt/COM1 .x/lpt9", "co%6E/Au%78.txt/COM%31 .x/lpt%39"),
            (b"icon/console/aux1/COM0/COM10/conf", "icon/console/aux1/COM0/COM10/conf"),
        ] {
            assert_eq!(String::from_utf8(portable(path)).unwrap(), name, "{path:?}");
        }
    }

    #[test]
    fn sizes_of_large_files_have_64_bits() {
        let mut zip = Zip::new(Vec::new());
        let entry = Entry { size_bytes: 5 << 30, ..entry("big", EntryKind::File) };
        zip.add(&entry, b"big", 0o644).unwrap();
        zip.write(b"the end").unwrap();
        let bytes = zip.finish().unwrap();
        let at = bytes.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
        let (header, rest) = bytes[at..].split_at(46 + 3 + 9);
        assert_eq!(header[20..28], [0xff; 8], "the sizes stand elsewhere");
        assert_eq!(rest[..4], [1, 0, 16, 0]);
        assert_eq!(rest[4..12], 7_u64.to_le_bytes());
        // The descriptor before the directory.
        assert_eq!(bytes[at - 8..at], 7_u64.to_le_bytes());
        assert_eq!(bytes[at - 24..at - 20], *b"PK\x07\x08");
    }

    #[test]
    fn moments_are_those_of_dos() {
        // 2026-11-23T20:49:31Z.
        let moment = Moment::of(1_795_466_971);
        assert_eq!(moment.day, (2026 - 1980) << 9 | 11 << 5 | 23);
        assert_eq!(moment.time, 20 << 11 | 49 << 5 | 15);
        assert_eq!(Moment::of(1_709_164_800).day, 44 << 9 | 2 << 5 | 29);
        assert_eq!(
            (Moment::of(0).day, Moment::of(i64::MAX).day),
            (1 << 5 | 1, 127 << 9 | 12 << 5 | 31)
        );
    }
}
