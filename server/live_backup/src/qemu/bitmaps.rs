//! Dirty bitmaps: which one may be believed.
//!
//! The name says everything from which a bitmap counts: `coldrise-REPOSITORY/SERIES/DISK/STATE`. So
//! another repository, another machine of the same QEMU, another assignment of disks or an
//! older state never match. The series of backups is the machine's name, and their states are points: the bitmap of the
//! latest one is believed. For other series see `since`.
//!
//! At the instant of a backup that bitmap stops and the bitmap of the new point starts. If the
//! backup then fails or is killed, both together have all changes since the latest backup:
//! the new one is merged into the old one, which counts on.

use coldrise_block::Result;
use coldrise_store::{DiskName, PointName, RepositoryId};
use serde_json::{Value, json};

use super::disks::{Bitmap, LiveDisk};
use super::monitor::OURS;
use crate::Since;

/// The names of the bitmaps of one series of a repository.
#[derive(Clone, Debug)]
pub(super) struct BitmapNames {
    prefix: String,
    /// The part of a disk that a bit of them stands for.
    pub(super) granularity_bytes: u64,
}

impl BitmapNames {
    pub(super) fn new(repository: &RepositoryId, series: &str, granularity_bytes: u64) -> Self {
        BitmapNames { prefix: format!("{OURS}{repository:.8}/{series}"), granularity_bytes }
    }

    fn of_disk(&self, disk: &DiskName) -> String {
        format!("{}/{disk}/", self.prefix)
    }

    /// The bitmap that counts from `point`.
    pub(super) fn name(&self, disk: &DiskName, point: &PointName) -> String {
        format!("{}{point}", self.of_disk(disk))
    }

    /// Removes the bitmaps of a disk that are of the rounds of sessions that have ended.
    pub(super) fn ended(
        repository: &RepositoryId,
        disk: &LiveDisk,
        since: &Since<'_>,
    ) -> Result<Vec<Value>> {
        let prefix = format!("{OURS}{repository:.8}/");
        let series = |bitmap: &'_ Bitmap| {
            let (series, _) = bitmap.name.strip_prefix(&prefix)?.split_once('/')?;
            Some(series.to_owned())
        };
        let all: Vec<String> = disk.bitmaps.iter().filter_map(series).collect();
        let ended = since.ended(all.iter().map(String::as_str))?;
        let of_ended = |bitmap: &&Bitmap| series(bitmap).is_some_and(|s| ended.contains(&&*s));
        let remove = |bitmap: &Bitmap| json!({ "type": "block-dirty-bitmap-remove", "data": { "node": disk.node, "name": bitmap.name } });
        Ok(disk.bitmaps.iter().filter(of_ended).map(remove).collect())
    }

    /// Copies the bitmap that counts from `point` to a new one, which then records, too. Nothing, if there is none that may
    /// be believed.
    pub(super) fn copy(
        &self,
        disk: &LiveDisk,
        point: &PointName,
        to: &str,
        granularity_bytes: u64,
    ) -> Vec<Value> {
        let from = self.name(&disk.name, point);
        let is_usable =
            |bitmap: &Bitmap| bitmap.name == from && bitmap.is_sound && bitmap.is_recording;
        if !disk.bitmaps.iter().any(is_usable) {
            return Vec::new();
        }
        let mut actions = switch(disk, None, to, granularity_bytes);
        actions.push(json!({
            "type": "block-dirty-bitmap-merge",
            "data": { "node": disk.node, "target": to, "bitmaps": [from] },
        }));
        actions
    }

    /// The steps for the bitmaps of a disk whose latest backup is `base`.
    pub(super) fn choose(&self, disk: &LiveDisk, base: Option<&PointName>) -> BitmapChoice {
        let prefix = self.of_disk(&disk.name);
        let ours = || disk.bitmaps.iter().filter(|bitmap| bitmap.name.starts_with(&prefix));
        let wanted = base.map(|base| self.name(&disk.name, base));
        let (mut believed, mut merged) = (None, None);
        let found = ours().find(|bitmap| Some(&bitmap.name) == wanted.as_ref() && bitmap.is_sound);
        if let Some(old) = found {
            let others: Vec<&Bitmap> = ours().filter(|bitmap| bitmap.name != old.name).collect();
            match others.as_slice() {
                _ if old.is_recording => believed = Some(old.name.clone()),
                [new] if new.is_recording && new.is_sound => {
                    believed = Some(old.name.clone());
                    merged = Some(new.name.clone());
                }
                _ => {}
            }
        }
        let is_kept =
            |name: &String| Some(name) == believed.as_ref() || Some(name) == merged.as_ref();
        let removed = ours().map(|bitmap| bitmap.name.clone()).filter(|name| !is_kept(name));
        let removed = removed.collect();
        BitmapChoice { node: disk.node.clone(), believed, merged, removed }
    }
}

/// The steps for the bitmaps of a disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BitmapChoice {
    node: String,
    /// Has all changes since the latest backup, once the actions are done.
    pub(super) believed: Option<String>,
    /// A failed backup's; it has the changes since its instant.
    merged: Option<String>,
    /// Count from another point, or were damaged.
    removed: Vec<String>,
}

impl BitmapChoice {
    /// For one transaction.
    pub(super) fn actions(&self) -> Vec<Value> {
        let node = &self.node;
        let action = |kind: &str, name: &String| json!({ "type": format!("block-dirty-bitmap-{kind}"), "data": { "node": node, "name": name } });
        let mut actions = Vec::new();
        if let (Some(old), Some(new)) = (&self.believed, &self.merged) {
            actions.push(action("enable", old));
            actions.push(json!({
                "type": "block-dirty-bitmap-merge",
                "data": { "node": node, "target": old, "bitmaps": [new] },
            }));
            actions.push(action("remove", new));
        }
        actions.extend(self.removed.iter().map(|name| action("remove", name)));
        actions
    }
}

/// At the instant: the old bitmap stops, the new one starts.
pub(super) fn switch(
    disk: &LiveDisk,
    old: Option<&String>,
    new: &str,
    granularity_bytes: u64,
) -> Vec<Value> {
    let node = &disk.node;
    let stop = old.map(|old| {
        json!({ "type": "block-dirty-bitmap-disable", "data": { "node": node, "name": old } })
    });
    let start = json!({
        "type": "block-dirty-bitmap-add",
        "data": {
            "node": node,
            "name": new,
            "granularity": granularity_bytes,
            "persistent": disk.keeps_bitmaps,
        },
    });
    stop.into_iter().chain([start]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "coldrise-01234567/web01/vda/20261101T000000Z";
    const NEW: &str = "coldrise-01234567/web01/vda/20261102T000000Z";

    fn bitmap(name: &str, is_recording: bool) -> Bitmap {
        Bitmap { name: name.to_owned(), is_recording, is_sound: true, dirty_bytes: 0 }
    }

    fn choose(bitmaps: &[Bitmap], base: Option<&str>) -> BitmapChoice {
        let names =
            BitmapNames { prefix: "coldrise-01234567/web01".into(), granularity_bytes: 65536 };
        let disk = LiveDisk {
            name: DiskName::parse("vda").unwrap(),
            device: String::new(),
            node: "vda".into(),
            size_bytes: 1,
            keeps_bitmaps: false,
            bitmaps: bitmaps.to_vec(),
        };
        let base = base.map(|base| PointName::parse(base).unwrap());
        names.choose(&disk, base.as_ref())
    }

    fn kinds(choice: &BitmapChoice) -> Vec<String> {
        let kind = |action: Value| action["type"].as_str().unwrap()[19..].to_owned();
        choice.actions().into_iter().map(kind).collect()
    }

    #[test]
    fn only_the_bitmap_of_the_latest_backup_is_believed() {
        let foreign = "coldrise-76543210/web01/vda/20261101T000000Z";
        let other_disk = "coldrise-01234567/web01/vdb/20261101T000000Z";
        let all = [bitmap(foreign, true), bitmap(other_disk, true), bitmap(OLD, true)];
        let choice = choose(&all, Some("20261101T000000Z"));
        assert_eq!((choice.believed.as_deref(), choice.actions().len()), (Some(OLD), 0));
        // A later backup that came another way, or none at all.
        for base in [Some("20261103T000000Z"), None] {
            let choice = choose(&all, base);
            assert_eq!((choice.believed.as_deref(), kinds(&choice)), (None, vec!["remove".into()]));
        }
    }

    #[test]
    fn after_a_failed_backup_the_old_bitmap_counts_on() {
        let choice = choose(&[bitmap(OLD, false), bitmap(NEW, true)], Some("20261101T000000Z"));
        assert_eq!(choice.believed.as_deref(), Some(OLD));
        assert_eq!(kinds(&choice), ["enable", "merge", "remove"]);
        // The same two after a stored backup.
        let choice = choose(&[bitmap(OLD, false), bitmap(NEW, true)], Some("20261102T000000Z"));
        assert_eq!(choice.believed.as_deref(), Some(NEW));
        assert_eq!((kinds(&choice), &choice.removed), (vec!["remove".into()], &vec![OLD.into()]));
    }

    #[test]
    fn bitmaps_with_gaps_are_removed() {
        let damaged = |name, is_recording| Bitmap { is_sound: false, ..bitmap(name, is_recording) };
        for all in [
            vec![bitmap(OLD, false)],
            vec![damaged(OLD, true)],
            vec![bitmap(OLD, false), damaged(NEW, true)],
            vec![bitmap(OLD, false), bitmap(NEW, false)],
            vec![bitmap(OLD, false), bitmap(NEW, true), bitmap(&NEW.replace("02T", "03T"), true)],
        ] {
            let choice = choose(&all, Some("20261101T000000Z"));
            assert_eq!(choice.believed, None, "{all:?}");
            assert_eq!(choice.removed.len(), all.len(), "{all:?}");
        }
    }
}
