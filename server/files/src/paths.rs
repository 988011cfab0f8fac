//! Checks that the entries of a walk form a tree.
//!
//! An archive of entries that passed can be extracted without leaving its folder: no name is `..` or
//! absolute, each lies in a folder that came before, and no name comes twice. So nothing can be
//! written through a link of the same archive.

use std::collections::HashSet;

use coldrise_block::Result;
use coldrise_files_protocol::{Entry, EntryKind, MAX_DEPTH};

use super::names::{nonsense, shown};

/// Maximum length of all names in the folders that are open at one time, in bytes.
const MAX_NAMES_BYTES: usize = 256 << 20;

/// The folders that can still get entries: each lies in the one before.
#[derive(Default)]
pub(super) struct OpenFolders {
    folders: Vec<OpenFolder>,
    has_begun: bool,
    names_bytes: usize,
}

struct OpenFolder {
    name: Vec<u8>,
    names: HashSet<Vec<u8>>,
    names_bytes: usize,
}

impl OpenFolder {
    fn new(name: &[u8]) -> OpenFolder {
        OpenFolder { name: name.to_vec(), names: HashSet::new(), names_bytes: 0 }
    }
}

impl OpenFolders {
    /// Accepts the next entry.
    ///
    /// # Errors
    /// `ToolFailed` if it does not belong here.
    pub(super) fn admit(&mut self, entry: &Entry) -> Result<()> {
        let refuse = || nonsense(&format!("the name {} in the wrong place", shown(&entry.path)));
        if !self.has_begun {
            self.has_begun = true;
            if !entry.path.is_empty() {
                return Err(refuse());
            }
            if entry.kind == EntryKind::Folder {
                self.folders.push(OpenFolder::new(b""));
            }
            return Ok(());
        }
        let names: Vec<&[u8]> = entry.path.split(|byte| *byte == b'/').collect();
        let (name, above) = names.split_last().ok_or_else(refuse)?;
        if !is_name(name) || names.len() > MAX_DEPTH + 2 {
            return Err(refuse());
        }
        // The first folder is the top, without a name.
        let open = self.folders.iter().skip(1).map(|folder| folder.name.as_slice());
        if self.folders.len() <= above.len() || !above.iter().copied().eq(open.take(above.len())) {
            return Err(refuse());
        }
        for closed in self.folders.drain(above.len() + 1..) {
            self.names_bytes = self.names_bytes.saturating_sub(closed.names_bytes);
        }
        let folder = self.folders.last_mut().ok_or_else(refuse)?;
        folder.names_bytes += name.len();
        self.names_bytes += name.len();
        if self.names_bytes > MAX_NAMES_BYTES {
            return Err(nonsense("too many names"));
        }
        if !folder.names.insert(name.to_vec()) {
            return Err(nonsense(&format!("the name {} twice", shown(&entry.path))));
        }
        if entry.kind == EntryKind::Folder {
            self.folders.push(OpenFolder::new(name));
        }
        Ok(())
    }
}

fn is_name(name: &[u8]) -> bool {
    !name.is_empty() && name != b"." && name != b".." && !name.contains(&0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An entry that matters only by its path.
    pub(crate) fn entry(path: &str, kind: EntryKind) -> Entry {
        Entry {
            path: path.as_bytes().to_vec(),
            kind,
            mode: 0o644,
            owner: 0,
            group: 0,
            size_bytes: 0,
            modified_s: 0,
            modified_ns: 0,
            target: Vec::new(),
        }
    }

    fn admits(paths: &[(&str, EntryKind)]) -> bool {
        let mut folders = OpenFolders::default();
        paths.iter().all(|(path, kind)| folders.admit(&entry(path, *kind)).is_ok())
    }

    #[test]
    fn only_entries_that_form_a_tree_are_admitted() {
        use EntryKind::{File, Folder, Link};
        let top = ("", Folder);
        assert!(admits(&[
            top,
            ("a", Folder),
            ("a/b", Folder),
            ("a/b/c", File),
            ("a/d", File),
            ("e", Link)
        ]));
        for refused in [
            [top, ("..", File), ("x", File)],
            [top, ("/etc", File), ("x", File)],
            [top, ("a/../b", File), ("x", File)],
            [top, ("a", Link), ("a/b", File)],
            [top, ("a", Link), ("a", Folder)],
            [top, ("b/c", File), ("x", File)],
            [top, ("", File), ("x", File)],
            [top, ("a\0b", File), ("x", File)],
            [("", File), ("a", File), ("x", File)],
            [("a", File), ("b", File), ("x", File)],
        ] {
            assert!(!admits(&refused), "{refused:?}");
        }
        // A folder that was left gets nothing more.
        assert!(!admits(&[top, ("a", Folder), ("b", Folder), ("a/c", File)]));
    }
}
