//! Volume groups of LVM: which logical volumes they have, what they lack, and which are there several times.
//!
//! LVM is asked before it activates anything: of two groups with one name it would take parts of both.

use std::collections::BTreeSet;
use std::io::Result;
use std::process::Command;

use coldrise_files_protocol::{Affected, Group};

use crate::block::Block;
use crate::command::{last_line, output};

/// There is no udev here.
pub(crate) const CONFIG: &str =
    "activation/udev_sync=0 activation/udev_rules=0 devices/obtain_device_list_from_udev=0";
/// Kinds of volumes that are whole without one of their parts.
const REDUNDANT: [&str; 6] = ["raid1", "raid4", "raid5", "raid6", "raid10", "mirror"];
/// A line for each group, then for each of its physical and of its logical volumes; they have one, two and four fields.
const REPORT: &str = "fullreport --noheadings --separator | --units b --nosuffix --configreport vg -o vg_name \
    --configreport pv -o pv_uuid,pv_missing --configreport lv -o lv_dm_path,lv_health_status,lv_layout,lv_size \
    --configreport pvseg -S pv_name= --configreport seg -S lv_name=";

/// A volume group.
pub(crate) struct VolumeGroup {
    pub(crate) name: String,
    /// The UUIDs of its physical volumes, and whether each is missing.
    physical: Vec<(String, bool)>,
    pub(crate) logical: Vec<LogicalVolume>,
}

/// A logical volume that is for use, not a part of another one.
pub(crate) struct LogicalVolume {
    /// Its name among mapped devices.
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
    /// Whether a part of it is on a missing physical volume.
    pub(crate) is_partial: bool,
    is_redundant: bool,
}

/// All groups.
pub(crate) fn read() -> Result<Vec<VolumeGroup>> {
    let mut command = Command::new("/bin/lvm");
    command.args(REPORT.split_whitespace()).args(["--config", CONFIG]);
    let done = output(command, b"")?;
    let groups = parse(&String::from_utf8_lossy(&done.stdout));
    // One that is damaged hides no other.
    match groups.is_empty() && !done.status.success() {
        true => Err(last_line(&done)),
        false => Ok(groups),
    }
}

fn parse(report: &str) -> Vec<VolumeGroup> {
    let mut groups: Vec<VolumeGroup> = Vec::new();
    for line in report.lines() {
        let fields: Vec<&str> = line.trim().split('|').collect();
        match (fields.as_slice(), groups.last_mut()) {
            ([name], _) => groups.push(VolumeGroup {
                name: (*name).to_owned(),
                physical: Vec::new(),
                logical: Vec::new(),
            }),
            ([uuid, missing], Some(group)) => {
                group.physical.push(((*uuid).to_owned(), !missing.is_empty()));
            }
            // Pools are of use only through the volumes in them.
            ([path, health, layout, size], Some(group)) if !layout.contains("pool") => {
                group.logical.push(LogicalVolume {
                    name: path.rsplit('/').next().unwrap_or_default().to_owned(),
                    size_bytes: size.parse().unwrap_or_default(),
                    is_partial: *health == "partial",
                    is_redundant: layout.split(',').any(|kind| REDUNDANT.contains(&kind)),
                });
            }
            _ => {}
        }
    }
    groups
}

/// The numbers of the devices with these unique names, for each copy of all of them.
pub(crate) fn copies(all: &[&[u8]], blocks: &[Block]) -> Vec<Vec<u64>> {
    let places = |unique: &&[u8]| -> Vec<u64> {
        let holds = |(_, block): &(usize, &Block)| !unique.is_empty() && block.unique == **unique;
        blocks.iter().enumerate().filter(holds).map(|(number, _)| number as u64).collect()
    };
    let all: Vec<Vec<u64>> = all.iter().map(places).collect();
    let count = all.iter().map(Vec::len).max().unwrap_or_default();
    // A clone of a part shares the rest.
    let nth = |place: usize| all.iter().filter_map(move |of| of.get(place).or(of.last()));
    (0..count).map(|place| nth(place).copied().collect()).collect()
}

/// The names of groups that are there several times, or that have another one's name.
pub(crate) fn repeated(groups: &[VolumeGroup], blocks: &[Block]) -> BTreeSet<String> {
    let is_repeated = |group: &&VolumeGroup| of_name(groups, &group.name, blocks).len() > 1;
    groups.iter().filter(is_repeated).map(|group| group.name.clone()).collect()
}

/// The copies of all groups with that name.
fn of_name(groups: &[VolumeGroup], name: &str, blocks: &[Block]) -> Vec<Vec<u64>> {
    let same = groups.iter().filter(|group| group.name == name);
    let copies = same.flat_map(|group| {
        let uuids = group.physical.iter().map(|(uuid, _)| uuid.replace('-', ""));
        let uuids: Vec<String> = uuids.collect();
        copies(&uuids.iter().map(String::as_bytes).collect::<Vec<_>>(), blocks)
    });
    copies.collect()
}

/// The problems of the groups. The blocks are those after the activation.
pub(crate) fn troubles(groups: &[VolumeGroup], blocks: &[Block]) -> Vec<Group> {
    let mut troubles: Vec<Group> = Vec::new();
    for group in groups {
        let number = |volume: &LogicalVolume| {
            blocks.iter().position(|block| block.volume == volume.name.as_bytes())
        };
        let affected = group.logical.iter().filter_map(|volume| {
            let place = number(volume)?;
            // A mirror whose log was lost may need the missing copy.
            let can_be_read = |block: &Block| !block.node.is_empty() && block.note.is_empty();
            let is_whole = volume.is_redundant && blocks.get(place).is_some_and(can_be_read);
            Some((volume, Affected { device: place as u64, is_whole }))
        });
        let mut trouble = Group {
            name: group.name.clone().into_bytes(),
            missing: Vec::new(),
            copies: of_name(groups, &group.name, blocks),
            affected: Vec::new(),
        };
        if trouble.copies.len() > 1 {
            let held = trouble.copies.iter().flatten();
            let physical = held.map(|device| Affected { device: *device, is_whole: false });
            trouble.affected = affected.map(|(_, one)| one).chain(physical).collect();
        } else {
            trouble.copies.clear();
            let missing = group.physical.iter().filter(|(_, is_missing)| *is_missing);
            trouble.missing = missing.map(|(uuid, _)| uuid.clone()).collect();
            let partial = affected.filter(|(volume, _)| volume.is_partial);
            trouble.affected = partial.map(|(_, one)| one).collect();
        }
        if trouble.copies.len() > 1 || !trouble.missing.is_empty() {
            troubles.push(trouble);
        }
    }
    troubles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_groups_with_their_volumes() {
        let report = "  vg0\n  aaaa-1|\n  bbbb-2|missing\n  /dev/mapper/vg0-my--home||linear|4096\n\
                      /dev/mapper/vg0-root|partial|raid,raid1|8192\n  /dev/mapper/vg0-pool||thin,pool|1\n  vg1\n";
        let groups = parse(report);
        let names: Vec<_> = groups.iter().map(|group| group.name.as_str()).collect();
        assert_eq!(names, ["vg0", "vg1"]);
        assert_eq!(groups[0].physical, [("aaaa-1".to_owned(), false), ("bbbb-2".to_owned(), true)]);
        let volumes = &groups[0].logical;
        assert_eq!((volumes.len(), volumes[0].name.as_str()), (2, "vg0-my--home"));
        assert!(volumes[1].is_partial && volumes[1].is_redundant && !volumes[0].is_partial);
    }
}
