//! Files as answers.

use coldrise_files::{Entry, EntryKind, path_hex, shown};
use serde::Serialize;

/// A file, a folder or a link.
#[derive(Serialize)]
pub(super) struct ListedEntry {
    /// Its path, with escapes for what is not printable text.
    path: String,
    /// The path's bytes, in hexadecimal digits, where it needed escapes.
    path_hex: Option<String>,
    kind: &'static str,
    /// In octal digits.
    mode: String,
    owner: u32,
    group: u32,
    size_bytes: u64,
    /// UTC.
    modified: String,
    target: Option<String>,
}

impl ListedEntry {
    /// Lists an entry under that path.
    pub(super) fn new(entry: &Entry, path: &[u8]) -> ListedEntry {
        ListedEntry {
            path: shown(path),
            path_hex: path_hex(path),
            kind: entry.kind.word(),
            mode: format!("{:04o}", entry.mode),
            owner: entry.owner,
            group: entry.group,
            size_bytes: entry.size_bytes,
            modified: moment(entry.modified_s),
            target: (entry.kind == EntryKind::Link).then(|| shown(&entry.target)),
        }
    }

    /// Whether it is not a folder.
    pub(super) fn is_no_folder(&self) -> bool {
        self.kind != EntryKind::Folder.word()
    }

    /// Its row in a table for people.
    pub(super) fn row(&self) -> Vec<String> {
        let slash = if self.is_no_folder() { "" } else { "/" };
        let target = self.target.as_ref().map(|target| format!(" -> {target}")).unwrap_or_default();
        vec![
            self.mode.clone(),
            format!("{}:{}", self.owner, self.group),
            self.size_bytes.to_string(),
            self.modified.clone(),
            format!("{}{slash}{target}", self.path),
        ]
    }
}

/// The headings of the rows.
pub(super) const HEADINGS: [&str; 5] = ["MODE", "OWNER", ">BYTES", "MODIFIED", "NAME"];

/// A time in UTC.
pub(super) fn moment(unix_s: i64) -> String {
    let moment = jiff::Timestamp::from_second(unix_s);
    moment.map_or_else(|_| "unknown".to_owned(), |moment| moment.to_string())
}
