//! The differences between two trees, by kind, length, time and target.

use std::collections::BTreeMap;

use coldrise_files_protocol::{Entry, EntryKind};

/// The content of a tree.
#[derive(Default)]
pub struct Snapshot {
    entries: BTreeMap<Vec<u8>, State>,
}

#[derive(PartialEq, Eq)]
struct State {
    kind: EntryKind,
    size_bytes: u64,
    /// Of files.
    modified: Option<(i64, u32)>,
    target: Vec<u8>,
}

/// The change of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// It is only in the second tree.
    Added,
    /// It is only in the first tree.
    Removed,
    /// It is in both, and differs.
    Changed,
}

/// A name that differs.
#[derive(Debug)]
pub struct Change<'a> {
    /// The path below the tree.
    pub path: &'a [u8],
    /// The change.
    pub kind: ChangeKind,
    /// What it is, in the second tree if it is there.
    pub entry_kind: EntryKind,
    /// Its length before and after, in bytes.
    pub sizes: (Option<u64>, Option<u64>),
}

impl Snapshot {
    /// Adds an entry of a walk.
    pub fn add(&mut self, entry: &Entry) {
        let is_file = entry.kind == EntryKind::File;
        let state = State {
            kind: entry.kind,
            size_bytes: entry.size_bytes,
            modified: is_file.then_some((entry.modified_s, entry.modified_ns)),
            target: entry.target.clone(),
        };
        self.entries.insert(entry.path.clone(), state);
    }

    /// The content of `to` instead, by path.
    pub fn changes<'a>(&'a self, to: &'a Snapshot) -> Vec<Change<'a>> {
        let mut changes = Vec::new();
        for (path, before) in &self.entries {
            let after = to.entries.get(path);
            if after == Some(before) {
                continue;
            }
            changes.push(Change {
                path,
                kind: after.map_or(ChangeKind::Removed, |_| ChangeKind::Changed),
                entry_kind: after.unwrap_or(before).kind,
                sizes: (Some(before.size_bytes), after.map(|after| after.size_bytes)),
            });
        }
        let added = to.entries.iter().filter(|(path, _)| !self.entries.contains_key(*path));
        changes.extend(added.map(|(path, after)| Change {
            path,
            kind: ChangeKind::Added,
            entry_kind: after.kind,
            sizes: (None, Some(after.size_bytes)),
        }));
        changes.sort_by_key(|change| change.path);
        changes
    }
}
