//! The boot loaders on the EFI system partitions of a machine.

use std::sync::Arc;

use coldrise_block::{Disk, Result};
use coldrise_session::{SessionDocument, open_live_disk};
use coldrise_store::{DiskName, Repository};

use super::fat::{Entry, Fat, Folder};
use super::partitions::{Partition, system_partitions};

/// Loaders of systems by the names of their files, in the order in which they are tried. A shim comes before the loader that
/// it verifies.
const KNOWN: [&str; 6] = [
    "bootmgfw.efi",
    "shimx64.efi",
    "grubx64.efi",
    "systemd-bootx64.efi",
    "refind_x64.efi",
    "loader.efi",
];
/// Programs beside loaders that start no system.
const TOOLS: [&str; 6] = ["fb", "mm", "fwup", "memtest", "shell", "memdisk"];
/// The loader that firmware finds without a boot entry.
const FALLBACK: &str = r"\EFI\BOOT\BOOTX64.EFI";
/// Maximum number of boot entries for one machine.
const MAX_LOADERS: usize = 8;
/// Maximum number of folders of loaders that are looked into, per partition, and of programs in each.
const MAX_FOLDERS: usize = 64;
const MAX_PROGRAMS: usize = 64;
/// Maximum length of a loader's path, in characters.
const MAX_PATH_CHARS: usize = 200;

/// A boot loader on an EFI system partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loader {
    /// The disk.
    pub disk: DiskName,
    /// Such as `\EFI\debian\shimx64.efi`.
    pub path: String,
    pub(super) partition: Partition,
}

/// The boot loaders on the disks of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The loaders that need a boot entry, the best first.
    pub loaders: Vec<Loader>,
    /// Whether there is a loader that firmware finds by itself.
    pub has_fallback: bool,
    /// Whether the variables have keys: the firmware starts only loaders that are signed with them.
    pub secure_boot: bool,
    /// Why the stored variables do not count, if there are any.
    pub unfit: Option<String>,
    /// Disks that could not be read, each with the reason.
    pub unread: Vec<String>,
}

/// Looks for boot loaders on the disks of a session.
pub(super) fn loaders(repository: &Arc<Repository>, session: &SessionDocument) -> Found {
    let mut found = Found::default();
    let mut ranked = Vec::new();
    for disk in &session.disks {
        let opened = open_live_disk(repository, &session.name, &disk.name);
        let looked = opened.and_then(|open| of_disk(open.as_ref(), &disk.name, &mut ranked));
        match looked {
            Ok(has_fallback) => found.has_fallback |= has_fallback,
            Err(error) => found.unread.push(format!("{}: {}", disk.name, error.full_message())),
        }
    }
    found.loaders = best(ranked, found.has_fallback);
    found
}

/// The loaders in the order of boot.
fn best(mut ranked: Vec<(usize, Loader)>, has_fallback: bool) -> Vec<Loader> {
    // Without another way to start, a file of an unknown name may be the loader.
    ranked.retain(|(rank, _)| *rank < KNOWN.len() || !has_fallback);
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.into_iter().map(|(_, loader)| loader).take(MAX_LOADERS).collect()
}

/// Adds the loaders of a disk, with their ranks. Returns whether one of its partitions has the fallback.
fn of_disk(disk: &dyn Disk, name: &DiskName, ranked: &mut Vec<(usize, Loader)>) -> Result<bool> {
    let mut has_fallback = false;
    for partition in system_partitions(disk)? {
        let Some(start) = partition.start_bytes() else { continue };
        let Some(fat) = Fat::open(disk, start)? else { continue };
        for path in programs(&fat)? {
            has_fallback |= path.eq_ignore_ascii_case(FALLBACK);
            if let Some(rank) = rank(&path) {
                let loader = Loader { disk: name.clone(), path, partition: partition.clone() };
                ranked.push((rank, loader));
            }
        }
    }
    Ok(has_fallback)
}

/// The paths of all EFI programs in folders of `\EFI`.
fn programs(fat: &Fat<'_>) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    let Some(efi) = folder(fat.list(fat.root())?, "efi") else { return Ok(paths) };
    for vendor in fat.list(efi.1)?.into_iter().take(MAX_FOLDERS) {
        let Some(at) = vendor.folder else { continue };
        let (mut path, mut entries) = (format!(r"\{}\{}", efi.0, vendor.name), fat.list(at)?);
        if vendor.name.eq_ignore_ascii_case("microsoft") {
            let Some(boot) = folder(entries, "boot") else { continue };
            (path, entries) = (format!(r"{path}\{}", boot.0), fat.list(boot.1)?);
        }
        let files = entries.into_iter().filter(|entry| entry.folder.is_none());
        let files = files.filter(|file| file.name.to_ascii_lowercase().ends_with(".efi"));
        paths.extend(files.take(MAX_PROGRAMS).map(|file| format!(r"{path}\{}", file.name)));
    }
    paths.retain(|path| path.chars().count() <= MAX_PATH_CHARS);
    Ok(paths)
}

/// The folder of this name, with its name as stored.
fn folder(entries: Vec<Entry>, name: &str) -> Option<(String, Folder)> {
    let mut named = entries.into_iter().filter(|entry| entry.name.eq_ignore_ascii_case(name));
    named.find_map(|entry| entry.folder.map(|folder| (entry.name, folder)))
}

/// The place of a loader in the order of boot; `None` for programs that start no system, or need no boot entry.
fn rank(path: &str) -> Option<usize> {
    let path = path.to_ascii_lowercase();
    let (folder, file) = path.rsplit_once('\\')?;
    if folder == r"\efi\boot" || TOOLS.iter().any(|tool| file.starts_with(tool)) {
        return None;
    }
    // Beside Windows' boot manager lie its tests of memory.
    let is_windows = folder == r"\efi\microsoft\boot";
    match KNOWN.iter().position(|known| *known == file) {
        Some(0) => is_windows.then_some(0),
        None => (!is_windows).then_some(KNOWN.len()),
        known => known,
    }
}

#[cfg(test)]
#[path = "loaders_tests.rs"]
mod tests;
