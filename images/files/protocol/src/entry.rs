//! The entry of one file in an answer.

use crate::MAX_PATH_BYTES;
use crate::fields::{Body, Fields, Malformed};

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EntryKind {
    /// An ordinary file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// A device, a pipe or a socket.
    Special,
}

impl EntryKind {
    const ALL: [EntryKind; 4] =
        [EntryKind::File, EntryKind::Folder, EntryKind::Link, EntryKind::Special];

    fn code(self) -> u64 {
        EntryKind::ALL.iter().position(|kind| *kind == self).unwrap_or_default() as u64
    }

    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            EntryKind::File => "file",
            EntryKind::Folder => "folder",
            EntryKind::Link => "link",
            EntryKind::Special => "special",
        }
    }
}

/// A file, a folder or a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Relative to the path that was asked for; empty for that path itself.
    pub path: Vec<u8>,
    /// The kind.
    pub kind: EntryKind,
    /// The permission bits, 12 of them.
    pub mode: u32,
    /// The numbers of owner and group.
    pub owner: u32,
    /// See `owner`.
    pub group: u32,
    /// The length of a file in bytes, else 0.
    pub size_bytes: u64,
    /// The time of the last change of its content, in seconds since 1970.
    pub modified_s: i64,
    /// The nanoseconds of that time.
    pub modified_ns: u32,
    /// Where a link leads.
    pub target: Vec<u8>,
}

impl Entry {
    pub(crate) fn write(&self, body: Body) -> Body {
        body.bytes(&self.path)
            .number(self.kind.code())
            .number(u64::from(self.mode))
            .number(u64::from(self.owner))
            .number(u64::from(self.group))
            .number(self.size_bytes)
            .number(u64::from_le_bytes(self.modified_s.to_le_bytes()))
            .number(u64::from(self.modified_ns))
            .bytes(&self.target)
    }

    pub(crate) fn read(fields: &mut Fields<'_>) -> Result<Entry, Malformed> {
        let path = fields.bytes(MAX_PATH_BYTES)?.to_vec();
        let kind = EntryKind::ALL.get(fields.small::<usize>()?).copied().ok_or(Malformed)?;
        Ok(Entry {
            path,
            kind,
            mode: fields.small::<u32>()? & 0o7777,
            owner: fields.small()?,
            group: fields.small()?,
            size_bytes: match (kind, fields.number()?) {
                (EntryKind::File, size) => size,
                _ => 0,
            },
            modified_s: i64::from_le_bytes(fields.number()?.to_le_bytes()),
            modified_ns: fields.small::<u32>()?.min(999_999_999),
            target: fields.bytes(MAX_PATH_BYTES)?.to_vec(),
        })
    }
}
