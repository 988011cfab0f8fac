//! Files as answers.

use coldrise_files::{Entry, EntryKind, path_hex, shown};
use serde::Serialize;

/// A file, a folder or a link.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct FileEntry {
    /// The name, with escapes for what is not printable text.
    name: String,
    /// The path, which begins with `/`, with the same escapes.
    path: String,
    /// The bytes of a path with escapes, in hexadecimal digits: ask for that path by these.
    path_hex: Option<String>,
    /// `file`, `folder`, `link`, or `special`: a device, a pipe or a socket.
    kind: &'static str,
    /// The permission bits, in octal digits.
    mode: String,
    owner: u32,
    group: u32,
    /// Of a file.
    size_bytes: u64,
    /// The last change of its content, in milliseconds since 1970; null if the time is out of all bounds.
    modified_ms: Option<i64>,
    /// Where a link leads.
    target: Option<String>,
}

impl FileEntry {
    /// An entry under that path.
    pub(super) fn new(entry: &Entry, path: &[u8]) -> FileEntry {
        FileEntry {
            name: shown(last_name(path)),
            path: shown(path),
            path_hex: path_hex(path),
            kind: entry.kind.word(),
            mode: format!("{:04o}", entry.mode),
            owner: entry.owner,
            group: entry.group,
            size_bytes: entry.size_bytes,
            modified_ms: modified_ms(entry.modified_s, entry.modified_ns),
            target: (entry.kind == EntryKind::Link).then(|| shown(&entry.target)),
        }
    }
}

/// A folder on the way to a path.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct FolderAbove {
    name: String,
    path: String,
    path_hex: Option<String>,
}

/// The folders on the way to a path, from the top, with the path itself.
pub(super) fn way(path: &[u8]) -> Vec<FolderAbove> {
    let mut way = vec![FolderAbove { name: "/".to_owned(), path: "/".to_owned(), path_hex: None }];
    let mut above = Vec::new();
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        above.push(b'/');
        above.extend_from_slice(name);
        way.push(FolderAbove {
            name: shown(name),
            path: shown(&above),
            path_hex: path_hex(&above),
        });
    }
    way
}

pub(super) fn last_name(path: &[u8]) -> &[u8] {
    path.split(|byte| *byte == b'/').rfind(|name| !name.is_empty()).unwrap_or_default()
}

/// A time that a calendar has.
pub(super) fn modified_ms(seconds: i64, nanoseconds: u32) -> Option<i64> {
    jiff::Timestamp::from_second(seconds).ok()?;
    Some(seconds * 1000 + i64::from(nanoseconds) / 1_000_000)
}
