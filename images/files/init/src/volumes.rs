//! Volumes over other devices: arrays and logical volumes; `containers` has the encrypted ones.

use std::io::{Error, Result};
use std::path::Path;
use std::process::Command;

use coldrise_files_protocol::{Affected, Group};

use crate::block::{Block, mapped_devices, node_of};
use crate::command::run;
use crate::containers::{OPEN, unlock};
use crate::groups::{self, VolumeGroup};
use crate::modules;
use crate::signature::Content;

/// Volumes lie in each other at most so deep.
const MAX_ROUNDS: usize = 4;
/// The kernel's modules for levels of RAID: of arrays and of logical volumes.
const LEVELS: [&str; 4] = ["raid0", "raid1", "raid10", "raid456"];

/// Assembles what can be assembled, and says which volume groups have something wrong.
pub(crate) fn assemble(blocks: &mut Vec<Block>, troubles: &mut Vec<Group>, key: &[u8]) {
    for _ in 0..MAX_ROUNDS {
        let before = blocks.len();
        let unlocked = unlock(blocks, key);
        assemble_arrays(blocks);
        add_arrays(blocks);
        activate_volumes(blocks, troubles);
        if blocks.len() == before && !unlocked {
            return;
        }
    }
}

fn assemble_arrays(blocks: &mut [Block]) {
    let is_left = |block: &&mut Block| block.content == Content::Array && block.note.is_empty();
    let mut members: Vec<&mut Block> = blocks.iter_mut().filter(is_left).collect();
    if members.is_empty() {
        return;
    }
    for module in LEVELS.iter().chain(&["linear"]) {
        let _ = modules::load(module);
    }
    for member in &members {
        let mut command = Command::new("/bin/mdadm");
        command.arg("--incremental").arg(member.path());
        let _ = run(command, b"");
    }
    // Those that lack members.
    let mut command = Command::new("/bin/mdadm");
    command.args(["--incremental", "--run", "--scan"]);
    let _ = run(command, b"");
    members.iter_mut().for_each(|member| member.note = "a member of an array".to_owned());
}

fn activate_volumes(blocks: &mut Vec<Block>, troubles: &mut Vec<Group>) {
    let is_left = |block: &Block| block.content == Content::Lvm && block.note.is_empty();
    if !blocks.iter().any(is_left) {
        return;
    }
    let activated = modules::load("dm-mod").and_then(|()| {
        for module in ["dm-mirror", "dm-snapshot", "dm-raid", "dm-thin-pool"].iter().chain(&LEVELS)
        {
            let _ = modules::load(module);
        }
        let found = groups::read()?;
        let activated = activate_groups(&found, blocks);
        *troubles = groups::troubles(&found, blocks);
        // The troubles explain the error.
        activated.or_else(|error| if troubles.is_empty() { Err(error) } else { Ok(()) })
    });
    let note = match activated {
        Ok(()) => "a physical volume of LVM".to_owned(),
        Err(error) => format!("a physical volume of LVM: {error}"),
    };
    blocks.iter_mut().filter(|block| is_left(block)).for_each(|block| block.note.clone_from(&note));
}

/// Activates the groups that are there once, and adds the volumes of all.
fn activate_groups(found: &[VolumeGroup], blocks: &mut Vec<Block>) -> Result<()> {
    let repeated = groups::repeated(found, blocks);
    let names = || found.iter().map(|group| &group.name).filter(|name| !repeated.contains(*name));
    let mut command = Command::new("/bin/lvm");
    command.args(["vgchange", "--activate", "y", "--activationmode", "partial", "--noudevsync"]);
    command.args(["--config", groups::CONFIG]).args(names());
    let done = if names().next().is_some() { run(command, b"") } else { Ok(()) };
    for group in found {
        let is_repeated = repeated.contains(&group.name);
        for volume in &group.logical {
            let node = if is_repeated { None } else { node_of(&volume.name) };
            let name = volume.name.clone().into_bytes();
            let place = blocks.iter().position(|block| block.volume == name);
            let block = match node {
                Some(node) => Block::read(&node, None, 0, name),
                None if is_repeated || volume.is_partial => Block::unread(name, volume.size_bytes),
                None => continue,
            };
            match place.and_then(|place| blocks.get_mut(place)) {
                // Now there may be something in it. Else it may be in use, or what is in it is open.
                Some(known) if matches!(known.content, Content::Unreadable(_)) => *known = block,
                Some(_) => {}
                None => blocks.push(block),
            }
        }
    }
    done
}

/// Arrays that are there several times. The kernel has assembled the first of each.
pub(crate) fn repeated_arrays(blocks: &[Block]) -> Vec<Group> {
    let repeated = arrays().into_iter().filter_map(|node| {
        let array = blocks.iter().position(|block| block.node == node)? as u64;
        let members = Path::new("/sys/block").join(&node).join("slaves");
        let is_member = |block: &&Block| members.join(&block.node).exists();
        let unique: Vec<&[u8]> =
            blocks.iter().filter(is_member).map(|block| block.unique.as_slice()).collect();
        let copies = groups::copies(&unique, blocks);
        let devices = copies.iter().flatten().copied().chain([array]);
        let affected = devices.map(|device| Affected { device, is_whole: true }).collect();
        let name = node.into_bytes();
        (copies.len() > 1).then_some(Group { name, missing: Vec::new(), copies, affected })
    });
    repeated.collect()
}

/// Ends all volumes over these devices.
pub(crate) fn close(blocks: &[Block]) -> Result<()> {
    let has = |content: Content| blocks.iter().any(|block| block.content == content);
    // Volumes lie in each other: the upper ones end first.
    for round in 0..MAX_ROUNDS {
        let mapped = mapped_devices();
        let arrays = arrays();
        if mapped.is_empty() && arrays.is_empty() {
            break;
        }
        if has(Content::Lvm) {
            let mut command = Command::new("/bin/lvm");
            command.args([
                "vgchange",
                "--activate",
                "n",
                "--noudevsync",
                "--config",
                groups::CONFIG,
            ]);
            let done = run(command, b"");
            if round + 1 == MAX_ROUNDS {
                done?;
            }
        }
        for (_, name) in mapped.iter().filter(|(_, name)| name.starts_with(OPEN)) {
            let mut command = Command::new("/bin/cryptsetup");
            command.args(["close", name]);
            let _ = run(command, b"");
        }
        for node in &arrays {
            let mut command = Command::new("/bin/mdadm");
            command.arg("--stop").arg(Path::new("/dev").join(node));
            let _ = run(command, b"");
        }
    }
    match mapped_devices().is_empty() && arrays().is_empty() {
        true => Ok(()),
        false => Err(Error::other("volumes could not be closed")),
    }
}

/// The kernel's names of the arrays.
fn arrays() -> Vec<String> {
    let all = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let names = all.map(|device| device.file_name().to_string_lossy().into_owned());
    names.filter(|node| Path::new("/sys/block").join(node).join("md/level").is_file()).collect()
}

/// Adds arrays that have appeared.
fn add_arrays(blocks: &mut Vec<Block>) {
    for node in arrays() {
        if !blocks.iter().any(|block| block.node == node) {
            blocks.push(Block::read(&node, None, 0, node.clone().into_bytes()));
        }
    }
}
