//! Volumes over other devices: encrypted containers, arrays, logical volumes.

use std::io::{Error, Result};
use std::path::Path;
use std::process::Command;

use crate::devices::{run, Block};
use crate::modules;
use crate::signature::Content;

/// Volumes lie in each other at most so deep.
const MAX_ROUNDS: usize = 4;
/// The names of open containers begin so.
const OPEN: &str = "open-";
/// There is no udev here.
const LVM_CONFIG: &str =
    "activation/udev_sync=0 activation/udev_rules=0 devices/obtain_device_list_from_udev=0";

/// Assembles what can be assembled.
pub(crate) fn assemble(blocks: &mut Vec<Block>, key: &[u8]) {
    for _ in 0..MAX_ROUNDS {
        let before = blocks.len();
        let unlocked = unlock(blocks, key);
        assemble_arrays(blocks);
        activate_volumes(blocks);
        add_new(blocks);
        if blocks.len() == before && !unlocked {
            return;
        }
    }
}

/// Opens the containers that the key opens; what each holds takes its place.
fn unlock(blocks: &mut [Block], key: &[u8]) -> bool {
    let mut is_any = false;
    for block in blocks.iter_mut().filter(|block| block.content == Content::Luks) {
        if key.is_empty() {
            block.note = "encrypted: give its passphrase with --key-file".to_owned();
            continue;
        }
        let name = format!("{OPEN}{}", block.node);
        let mut command = Command::new("/bin/cryptsetup");
        command.args(["open", "--type", "luks", "--key-file", "-", "--disable-external-tokens"]);
        command.arg(block.path()).arg(&name);
        let opened = modules::load("dm-crypt").and_then(|()| {
            for module in ["xts", "aesni-intel", "essiv", "cbc", "algif_skcipher", "algif_hash"] {
                // Which of them are needed depends on the container.
                let _ = modules::load(module);
            }
            run(command, key)
        });
        match opened.map(|()| node_of(&name)) {
            Ok(Some(node)) => {
                let (disk, partition) = (block.disk, block.partition);
                *block = Block::read(&node, disk, partition, block.volume.clone());
                is_any = true;
            }
            Ok(None) => block.note = "encrypted, and its content did not appear".to_owned(),
            Err(error) => block.note = format!("encrypted: {error}"),
        }
    }
    is_any
}

fn assemble_arrays(blocks: &mut [Block]) {
    let is_left = |block: &&mut Block| block.content == Content::Array && block.note.is_empty();
    let mut members: Vec<&mut Block> = blocks.iter_mut().filter(is_left).collect();
    if members.is_empty() {
        return;
    }
    for module in ["raid0", "raid1", "raid10", "raid456", "linear"] {
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

fn activate_volumes(blocks: &mut [Block]) {
    let is_left = |block: &&mut Block| block.content == Content::Lvm && block.note.is_empty();
    let mut members: Vec<&mut Block> = blocks.iter_mut().filter(is_left).collect();
    if members.is_empty() {
        return;
    }
    let mut command = Command::new("/bin/lvm");
    command.args(["vgchange", "--activate", "y", "--activationmode", "partial", "--noudevsync"]);
    command.args(["--config", LVM_CONFIG]);
    let activated = modules::load("dm-mod").and_then(|()| {
        for module in ["dm-mirror", "dm-snapshot", "dm-raid", "dm-thin-pool"] {
            let _ = modules::load(module);
        }
        run(command, b"")
    });
    let note = match activated {
        Ok(()) => "a physical volume of LVM".to_owned(),
        Err(error) => format!("a physical volume of LVM: {error}"),
    };
    members.iter_mut().for_each(|member| member.note.clone_from(&note));
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
            command.args(["vgchange", "--activate", "n", "--noudevsync", "--config", LVM_CONFIG]);
            let done = run(command, b"");
            if round + 1 == MAX_ROUNDS {
                done?;
            }
        }
        for (_, name, _) in mapped.iter().filter(|(_, name, _)| name.starts_with(OPEN)) {
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

/// The kernel's name of a mapped device.
fn node_of(mapped: &str) -> Option<String> {
    mapped_devices().into_iter().find(|(_, name, _)| name == mapped).map(|(node, _, _)| node)
}

/// The mapped devices: the kernel's name, name and unique name.
fn mapped_devices() -> Vec<(String, String, String)> {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let all = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let mapped = all.filter(|device| device.path().join("dm").is_dir());
    let mut mapped: Vec<_> = mapped
        .map(|device| {
            let field = |name| read(device.path().join("dm").join(name)).trim().to_owned();
            (device.file_name().to_string_lossy().into_owned(), field("name"), field("uuid"))
        })
        .collect();
    mapped.sort();
    mapped
}

/// Adds logical volumes and arrays that have appeared.
fn add_new(blocks: &mut Vec<Block>) {
    for (node, name, unique) in mapped_devices() {
        // Parts of volumes have a longer one.
        let is_volume = unique.strip_prefix("LVM-").is_some_and(|rest| !rest.contains('-'));
        if is_volume && !blocks.iter().any(|block| block.node == node) {
            blocks.push(Block::read(&node, None, 0, name.into_bytes()));
        }
    }
    for node in arrays() {
        if !blocks.iter().any(|block| block.node == node) {
            blocks.push(Block::read(&node, None, 0, node.clone().into_bytes()));
        }
    }
}
