//! Checkpoints: which one may be believed.
//!
//! The name says from what its bitmaps count: `coldrise-REPOSITORY-SERIES-STATE`. So another repository or an older
//! state never matches. The series of backups is the machine's name, and their states are points; for others see `since`. libvirt keeps checkpoints of persistent domains only, but qcow2 images keep the
//! bitmaps of both over a clean end of QEMU: then the checkpoint is made known to libvirt again.

use std::collections::{BTreeMap, BTreeSet};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{PointName, RepositoryId};
use roxmltree::Document;

use super::disks::DomainDisk;
use crate::Since;
use coldrise_hypervisors::libvirt::PATIENCE;
use coldrise_hypervisors::virsh::Virsh;

/// The names of the checkpoints of one series of a repository.
#[derive(Clone, Debug)]
pub(super) struct CheckpointNames(String);

impl CheckpointNames {
    pub(super) fn new(repository: &RepositoryId, series: &str) -> CheckpointNames {
        CheckpointNames(format!("coldrise-{repository:.8}-{series}-"))
    }

    /// The checkpoint of `point`.
    pub(super) fn name(&self, point: &PointName) -> String {
        format!("{}{point}", self.0)
    }

    /// Not a checkpoint of machine `web-1` for the names of machine `web`.
    pub(super) fn is_ours(&self, name: &str) -> bool {
        name.strip_prefix(&self.0).is_some_and(|rest| PointName::parse(rest).is_ok())
    }
}

/// What libvirt knows of a domain before its backup.
pub(super) struct Known {
    /// Checkpoints of ours.
    pub(super) checkpoints: Vec<String>,
    /// All checkpoints.
    all: Vec<String>,
    /// Whether it has internal snapshots.
    has_snapshots: bool,
}

/// The checkpoints of a domain.
pub(super) struct Checkpoints<'a> {
    pub(super) virsh: &'a Virsh,
    pub(super) uuid: &'a str,
    pub(super) names: &'a CheckpointNames,
}

impl Known {
    /// Whether libvirt has a checkpoint of this name, of any series.
    pub(super) fn has(&self, name: &str) -> bool {
        self.all.iter().any(|known| known == name)
    }
}

impl Checkpoints<'_> {
    /// Deletes those of the rounds of sessions that have ended.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not answer.
    pub(super) fn delete_ended(&self, known: &Known, since: &Since<'_>) -> Result<()> {
        let prefix = format!("coldrise-{:.8}-", since.repository().id());
        let series = |name: &'_ String| {
            let (series, _) = name.strip_prefix(&prefix)?.rsplit_once('-')?;
            Some((name.clone(), series.to_owned()))
        };
        let all: Vec<(String, String)> = known.all.iter().filter_map(series).collect();
        let ended = since.ended(all.iter().map(|(_, series)| series.as_str()))?;
        let of_ended = all.iter().filter(|(_, series)| ended.contains(&series.as_str()));
        of_ended.map(|(name, _)| name).try_for_each(|name| self.delete(name))
    }

    /// The disks of which an existing checkpoint has all changes since it was made.
    pub(super) fn covered(&self, name: &str) -> BTreeSet<String> {
        // The sizes of the changes are those of the bitmaps: libvirt fails if one is lost or damaged.
        let words = ["checkpoint-dumpxml", self.uuid, name, "--size", "--no-domain"];
        self.virsh.run(&words, PATIENCE).and_then(|text| targets(&text)).unwrap_or_else(|error| {
            tracing::info!("{}", error.full_message());
            BTreeSet::new()
        })
    }

    /// Deletes all of ours except that of `base`. Returns the disks of which that one has all changes since then;
    /// if it has not, it is deleted, too.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not answer.
    pub(super) fn choose(
        &self,
        base: Option<&PointName>,
        disks: &[DomainDisk],
        listed: &[String],
    ) -> Result<BTreeSet<String>> {
        let wanted = base.map(|base| self.names.name(base));
        for name in listed.iter().filter(|name| Some(*name) != wanted.as_ref()) {
            self.delete(name)?;
        }
        let Some(wanted) = wanted else { return Ok(BTreeSet::new()) };
        let is_known = listed.contains(&wanted) || self.define_again(&wanted, disks)?;
        if !is_known {
            return Ok(BTreeSet::new());
        }
        let covered = self.covered(&wanted);
        if covered.is_empty() {
            self.delete(&wanted)?;
        }
        Ok(covered)
    }

    /// Deletes all of ours that are `listed`, except `kept`.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt refuses.
    pub(super) fn keep_only(&self, kept: Option<&String>, listed: &[String]) -> Result<()> {
        listed.iter().filter(|name| Some(*name) != kept).try_for_each(|name| self.delete(name))
    }

    /// A remark on internal snapshots, if the domain has any since `base`; without one, if it has any.
    pub(super) fn snapshot_remark(
        &self,
        known: &Known,
        domain: &str,
        base: Option<&PointName>,
    ) -> Option<String> {
        // The current snapshot is the last one that was made, or reverted to.
        let is_new = |base: &PointName| {
            let current = self.virsh.run(&["snapshot-current", self.uuid], PATIENCE);
            current
                .is_ok_and(|xml| creation_s(&xml).is_some_and(|time| time >= base.unix_seconds()))
        };
        if !known.has_snapshots || !base.is_none_or(is_new) {
            return None;
        }
        Some(format!(
            "{domain} has internal snapshots: virsh snapshot-revert fails, and shuts the domain off, while the checkpoint of \
             this backup exists. Delete it first (virsh checkpoint-delete {domain} NAME; virsh checkpoint-list {domain} \
             has the NAME): the next backup then reads everything"
        ))
    }

    /// Makes checkpoints known to libvirt whose bitmaps, by their names, are in images of these disks.
    pub(super) fn adopt(&self, found: &BTreeMap<String, Vec<&DomainDisk>>, known: &mut Known) {
        let listed = &mut known.checkpoints;
        for (name, disks) in found.iter().filter(|(name, _)| self.names.is_ours(name)) {
            if listed.contains(name) {
                continue;
            }
            match self.define(name, disks, &[]) {
                Ok(()) => listed.push(name.clone()),
                Err(error) => tracing::info!("{}", error.full_message()),
            }
        }
    }

    /// Asks libvirt for checkpoints and snapshots.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not answer.
    pub(super) fn known(&self) -> Result<Known> {
        let snapshots: &[&str] = &["snapshot-list", self.uuid, "--internal", "--name"];
        let mut answers = self.virsh.ask(&[&self.list_words(), snapshots], PATIENCE)?.into_iter();
        let listed = answers.next().unwrap_or_else(|| Ok(String::new()))?;
        let snapshots = answers.next().and_then(Result::ok).unwrap_or_default();
        let has_snapshots = !snapshots.trim().is_empty();
        let all = listed.lines().map(|name| name.trim().to_owned()).collect();
        Ok(Known { checkpoints: self.ours(&listed), all, has_snapshots })
    }

    /// The command that lists all.
    pub(super) fn list_words(&self) -> [&str; 3] {
        ["checkpoint-list", self.uuid, "--name"]
    }

    /// Those of ours in a list.
    pub(super) fn ours(&self, listed: &str) -> Vec<String> {
        let ours = listed.lines().map(str::trim).filter(|name| self.names.is_ours(name));
        ours.map(str::to_owned).collect()
    }

    /// All of ours.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not answer.
    pub(super) fn listed(&self) -> Result<Vec<String>> {
        self.virsh.run(&self.list_words(), PATIENCE).map(|listed| self.ours(&listed))
    }

    /// With its bitmaps; if those are lost, without.
    fn delete(&self, name: &str) -> Result<()> {
        let deleted = self.virsh.run(&["checkpoint-delete", self.uuid, name], PATIENCE);
        deleted
            .or_else(|error| {
                tracing::info!("{}", error.full_message());
                let words = ["checkpoint-delete", self.uuid, name, "--metadata"];
                self.virsh.run(&words, PATIENCE)
            })
            .map(drop)
    }

    /// Makes a checkpoint known that libvirt forgot at the end of a transient domain. If its bitmaps are lost or
    /// damaged, what is left of them is deleted.
    fn define_again(&self, name: &str, disks: &[DomainDisk]) -> Result<bool> {
        let kept: Vec<&DomainDisk> = disks.iter().filter(|disk| disk.keeps_checkpoints()).collect();
        if kept.is_empty() {
            return Ok(false);
        }
        if self.define(name, &kept, &["--redefine-validate"]).is_ok() {
            return Ok(true);
        }
        if self.define(name, &kept, &[]).is_ok() {
            self.delete(name)?;
        }
        Ok(false)
    }

    fn define(&self, name: &str, disks: &[&DomainDisk], more: &[&str]) -> Result<()> {
        let xml = checkpoint_xml(name, disks.iter().map(|disk| &*disk.target), &[]).replace(
            "</name>",
            // Only libvirt's order of checkpoints depends on it.
            "</name><creationTime>1</creationTime>",
        );
        let words = [&["checkpoint-create", self.uuid, "/dev/stdin", "--redefine"], more];
        self.virsh.run_with(&words.concat(), Some(&xml), PATIENCE).map(drop)
    }
}

/// A checkpoint of some disks and not of others.
pub(super) fn checkpoint_xml<'a>(
    name: &str,
    disks: impl Iterator<Item = &'a str>,
    others: &[String],
) -> String {
    let disk = |target: &str, kind: &str| {
        format!(
            "<disk name='{}' checkpoint='{kind}'/>",
            coldrise_hypervisors::libvirt::escaped(target)
        )
    };
    let chosen: String = disks.map(|target| disk(target, "bitmap")).collect();
    let others: String = others.iter().map(|target| disk(target, "no")).collect();
    format!(
        "<domaincheckpoint><name>{name}</name><disks>{chosen}{others}</disks></domaincheckpoint>"
    )
}

/// When a snapshot was made, in seconds since 1970.
fn creation_s(snapshot: &str) -> Option<u64> {
    let document = Document::parse(snapshot).ok()?;
    let is_time = |node: &roxmltree::Node<'_, '_>| node.has_tag_name("creationTime");
    document.root_element().children().find(is_time)?.text()?.trim().parse().ok()
}

/// The disks with a bitmap.
fn targets(checkpoint: &str) -> Result<BTreeSet<String>> {
    let document = Document::parse(checkpoint).map_err(|error| {
        Error::with_source(ErrorKind::ToolFailed, "libvirt's XML of a checkpoint", error)
    })?;
    let has_bitmap = |node: &roxmltree::Node<'_, '_>| {
        node.has_tag_name("disk")
            && node.attribute("checkpoint") == Some("bitmap")
            && node.has_attribute("size")
    };
    let disks = document.descendants().filter(has_bitmap);
    Ok(disks.filter_map(|disk| disk.attribute("name")).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::{CheckpointNames, targets};

    #[test]
    fn only_checkpoints_of_this_machine_and_repository_are_ours() {
        let names = CheckpointNames("coldrise-01234567-web-".to_owned());
        assert!(names.is_ours("coldrise-01234567-web-20261101T000000Z"));
        for other in [
            "coldrise-01234567-web-01-20261101T000000Z",
            "coldrise-76543210-web-20261101T000000Z",
            "coldrise-01234567-web-",
            "web-20261101T000000Z",
        ] {
            assert!(!names.is_ours(other), "{other}");
        }
    }

    #[test]
    fn disks_with_a_bitmap_are_reported() {
        let text = "<domaincheckpoint><disks><disk name='vda' checkpoint='bitmap' size='0'/>\
                    <disk name='vdb' checkpoint='no'/><disk name='vdc' checkpoint='bitmap'/></disks></domaincheckpoint>";
        assert_eq!(targets(text).unwrap().into_iter().collect::<Vec<_>>(), ["vda"]);
        assert!(targets("<x").is_err());
    }
}
