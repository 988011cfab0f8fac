//! Sentences about volume groups that lack a physical volume, and about groups and arrays that are there several times.

use coldrise_files_protocol::{Device, Group, is_encrypted};

use super::attached::{AttachedDisks, device_name};
use super::names::{printable, shown};

/// Maximum length of a sentence, in characters: a machine may claim anything.
const MAX_CHARS: usize = 2000;

/// The message about an incomplete group, with the command to type.
pub(super) fn sentence(group: &Group, devices: &[Device], attached: &AttachedDisks<'_>) -> String {
    let name = shown(&group.name);
    let text = match group.copies.as_slice() {
        [] => format!("{name} lacks {}", lacks(group, devices, attached)),
        copies => repeated(&name, copies, devices, attached),
    };
    text.chars().take(MAX_CHARS).collect()
}

fn lacks(group: &Group, devices: &[Device], attached: &AttachedDisks<'_>) -> String {
    let (is, uuids) = match group.missing.as_slice() {
        [uuid] => ("a physical volume that is", format!("UUID {uuid}")),
        all => ("physical volumes that are", format!("UUIDs {}", all.join(", "))),
    };
    let (names, uuids) = (attached.names.join(", "), printable(&uuids));
    if !attached.is_all {
        let AttachedDisks { address, names: given, .. } = attached;
        let all = format!("coldrise files ls {address}:");
        let more = format!("{address}/{},DISK:", given.join(","));
        return format!(
            "{is} not on {names} ({uuids}): use all disks of the point ({all}), or name its disk, too ({more})"
        );
    }
    let is_locked = |device: &&Device| is_encrypted(&device.format);
    let locked: Vec<_> =
        devices.iter().filter(is_locked).map(|d| device_name(d, attached)).collect();
    let lacks = format!("{is} on no disk of this point ({names}; {uuids})");
    match locked.is_empty() {
        true => lacks,
        false => format!(
            "{lacks}; it may be in {}, which is encrypted: coldrise files --key-file opens it",
            locked.join(" or ")
        ),
    }
}

fn repeated(
    name: &str,
    copies: &[Vec<u64>],
    devices: &[Device],
    attached: &AttachedDisks<'_>,
) -> String {
    let found = |number: &u64| devices.iter().find(|device| device.number == *number);
    let held = copies.iter().map(|copy| copy.iter().filter_map(found).collect::<Vec<_>>());
    let held: Vec<Vec<&Device>> = held.collect();
    let mut places: Vec<_> =
        held.iter().flatten().map(|device| device_name(device, attached)).collect();
    places.sort();
    places.dedup();
    let times = match copies.len() {
        2 => "twice".to_owned(),
        count => format!("{count} times"),
    };
    let text = format!("{name} is there {times}, on {}", enumerated(&places, "and"));
    let disks = held.iter().map(|copy| disks_of(copy, attached));
    let mut disks: Vec<String> = disks.map(Option::unwrap_or_default).collect();
    disks.sort();
    disks.dedup();
    if disks.len() < copies.len() || disks.iter().any(String::is_empty) {
        return format!(
            "{text}: boot the point, or attach one of its disks to a machine that can read it"
        );
    }
    let typed: Vec<_> =
        disks.iter().map(|disks| format!("{}/{disks}:", attached.address)).collect();
    let one = if held.iter().all(|copy| copy.len() == 1) { "its disk" } else { "its disks" };
    format!("{text}: say which one by {one}, as in coldrise files ls {}", enumerated(&typed, "or"))
}

/// The disks of devices, as an address names them.
fn disks_of(copy: &[&Device], attached: &AttachedDisks<'_>) -> Option<String> {
    let disks: Option<Vec<&String>> = copy.iter().map(|device| attached.disk(device)).collect();
    let mut disks = disks?;
    disks.sort();
    disks.dedup();
    Some(disks.into_iter().map(String::as_str).collect::<Vec<_>>().join(","))
}

/// `a, b and c`.
fn enumerated(words: &[String], last: &str) -> String {
    match words.split_last() {
        Some((end, rest)) if !rest.is_empty() => format!("{} {last} {end}", rest.join(", ")),
        _ => words.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(number: u64, disk: Option<u64>, partition: u64) -> Device {
        Device {
            number,
            disk,
            partition,
            volume: b"md0".to_vec(),
            format: "lvm".to_owned(),
            label: Vec::new(),
            size_bytes: 0,
            is_readable: false,
            note: String::new(),
        }
    }

    fn said(missing: &[&str], copies: &[&[u64]], is_all: bool) -> String {
        let devices = [
            device(0, Some(0), 2),
            device(1, Some(1), 0),
            device(2, Some(1), 1),
            device(3, None, 0),
        ];
        let names = ["vda".to_owned(), "vdb".to_owned()];
        let attached = AttachedDisks { address: "web01/latest", names: &names, is_all };
        let group = Group {
            name: b"vg0".to_vec(),
            missing: missing.iter().map(|uuid| (*uuid).to_owned()).collect(),
            copies: copies.iter().map(|copy| copy.to_vec()).collect(),
            affected: Vec::new(),
        };
        sentence(&group, &devices, &attached)
    }

    #[test]
    fn incomplete_and_ambiguous_groups_are_reported_with_advice() {
        for (said, expected) in [
            (
                said(&["x"], &[], true),
                "vg0 lacks a physical volume that is on no disk of this point (vda, vdb; UUID x)",
            ),
            (
                said(&["x", "y"], &[], true),
                "vg0 lacks physical volumes that are on no disk of this point (vda, vdb; UUIDs x, y)",
            ),
            (
                said(&["x"], &[], false),
                "vg0 lacks a physical volume that is not on vda, vdb (UUID x): use all disks of the point \
                 (coldrise files ls web01/latest:), or name its disk, too (web01/latest/vda,vdb,DISK:)",
            ),
            (
                said(&[], &[&[0], &[1]], true),
                "vg0 is there twice, on vda2 and vdb: say which one by its disk, as in \
                 coldrise files ls web01/latest/vda: or web01/latest/vdb:",
            ),
            // Their disks do not tell them apart.
            (
                said(&[], &[&[1], &[2], &[3]], true),
                "vg0 is there 3 times, on md0, vdb and vdb1: boot the point, or attach one of its disks to a machine that can read it",
            ),
        ] {
            assert_eq!(said, expected);
        }
    }
}
