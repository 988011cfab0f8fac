//! Disks, partitions and volumes, and their file systems.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use coldrise_files_protocol::{Answer, Failure, Found, Group, MAX_DEVICES};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::block::{Block, disks, number_in};
use crate::command::run;
use crate::port::Port;
use crate::signature::Content;
use crate::{Refusal, abandoned, modules, shown_disks, text, volumes};

/// How long the disks may take to appear.
const PATIENCE: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_millis(5);

/// Waits for as many disks as the kernel's command line says.
pub(crate) fn await_disks() -> Result<()> {
    let wanted = std::env::var("disks").ok().and_then(|count| count.parse().ok()).unwrap_or(0);
    let until = Instant::now() + PATIENCE;
    while disks()?.len() < wanted && Instant::now() < until {
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// A file system that is mounted.
pub(crate) struct Opened {
    /// The folder that is `/` for requests.
    pub(crate) root: PathBuf,
    pub(crate) found: Found,
}

#[derive(Default)]
pub(crate) struct Devices {
    blocks: Vec<Block>,
    groups: Vec<Group>,
    opened: BTreeMap<u64, Opened>,
    /// The number of the first disk that is shown.
    first: u64,
}

impl Devices {
    /// Finds the devices, once, and tells them. A key opens containers at any time.
    pub(crate) fn tell(&mut self, port: &mut Port, key: &[u8]) -> std::result::Result<(), Refusal> {
        // Missing members of a group may be in a container: LVM does not add it to volumes that are active.
        if !key.is_empty() && !self.groups.is_empty() {
            self.close()?;
        }
        if self.blocks.is_empty() {
            self.find()?;
        }
        volumes::assemble(&mut self.blocks, &mut self.groups, key);
        for (number, block) in self.blocks.iter().enumerate().take(MAX_DEVICES) {
            port.send(&Answer::Device(block.described(number))).map_err(|_| abandoned())?;
        }
        let arrays = volumes::repeated_arrays(&self.blocks);
        for group in self.groups.iter().chain(&arrays).take(MAX_DEVICES) {
            port.send(&Answer::Group(group.clone())).map_err(|_| abandoned())?;
        }
        Ok(())
    }

    /// Closes everything, and shows other disks.
    pub(crate) fn select(&mut self, first: u64, count: u64) -> std::result::Result<(), Refusal> {
        self.close()?;
        shown_disks::select(first, count)?;
        self.first = first;
        Ok(())
    }

    fn close(&mut self) -> std::result::Result<(), Refusal> {
        for number in std::mem::take(&mut self.opened).into_keys() {
            unmount(format!("/run/{number}"), UnmountFlags::empty())?;
        }
        volumes::close(&self.blocks)?;
        // It remembers the newest state of a file system, and would refuse an older one.
        modules::unload(c"btrfs")?;
        self.blocks.clear();
        self.groups.clear();
        Ok(())
    }

    fn find(&mut self) -> Result<()> {
        for (disk, node) in disks()? {
            let disk = disk.saturating_sub(self.first);
            let mut partitions = BTreeMap::new();
            for child in std::fs::read_dir(Path::new("/sys/block").join(&node))? {
                let child = child?;
                if let Some(number) = number_in(&child.path().join("partition")) {
                    partitions.insert(number, child.file_name().to_string_lossy().into_owned());
                }
            }
            if partitions.is_empty() {
                self.blocks.push(Block::read(&node, Some(disk), 0, Vec::new()));
            }
            for (number, node) in partitions {
                self.blocks.push(Block::read(&node, Some(disk), number, Vec::new()));
            }
        }
        Ok(())
    }

    /// Mounts a device, read-only. The device itself is writable, so the kernel replays the journal.
    pub(crate) fn open(&mut self, number: u64) -> std::result::Result<&Opened, Refusal> {
        if !self.opened.contains_key(&number) {
            let index = usize::try_from(number).unwrap_or(usize::MAX);
            let block =
                self.blocks.get(index).ok_or_else(|| Refusal::not_found("no such device"))?;
            let folder = PathBuf::from(format!("/run/{number}"));
            std::fs::create_dir_all(&folder)?;
            let mounted = mount_block(block, &self.blocks, &folder);
            mounted.map_err(|error| Refusal(Failure::Unreadable, text(&error)))?;
            self.opened.insert(number, look_into(folder));
        }
        self.opened.get(&number).ok_or_else(|| Refusal::not_found("no such device"))
    }
}

fn mount_block(block: &Block, all: &[Block], folder: &Path) -> Result<()> {
    match block.content {
        Content::Mountable(kind, options) => {
            modules::load(kind)?;
            if kind == "vfat" {
                modules::load("nls_cp437")?;
                modules::load("nls_ascii")?;
            }
            let mut options = options.to_owned();
            if kind == "btrfs" {
                // The others may hold the rest of the same file system.
                let others = all.iter().filter(|other| other.content == block.content);
                let others: Vec<_> =
                    others.map(|other| format!("device={}", other.path().display())).collect();
                options = others.join(",");
            }
            let flags = MountFlags::RDONLY
                | MountFlags::NOSUID
                | MountFlags::NODEV
                | MountFlags::NOEXEC
                | MountFlags::NOATIME;
            let options = std::ffi::CString::new(options)?;
            Ok(mount(block.path(), folder, kind, flags, Some(options.as_c_str()))?)
        }
        Content::Ntfs => {
            modules::load("fuse")?;
            let mut command = Command::new("/bin/ntfs-3g");
            command.arg("-o").arg("ro").arg(block.path()).arg(folder);
            run(command, b"")
        }
        _ => Err(Error::new(ErrorKind::Unsupported, "there is no file system that can be read")),
    }
}

/// Which system lies there. In Btrfs it may be in a subvolume.
fn look_into(folder: PathBuf) -> Opened {
    let has = |place: &Path, path: &str| place.join(path).symlink_metadata().is_ok();
    for below in ["", "@", "root", "@/.snapshots/1/snapshot"] {
        let place = if below.is_empty() { folder.clone() } else { folder.join(below) };
        if has(&place, "etc/fstab") || has(&place, "etc/os-release") {
            return Opened { root: place, found: Found::Unix };
        }
    }
    let found = match has(&folder, "Windows/System32") {
        true => Found::Windows,
        false => Found::Nothing,
    };
    Opened { root: folder, found }
}
