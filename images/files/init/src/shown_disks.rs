//! Disks of several points in one machine: only those of one point are shown at a time.
//!
//! The file systems, volume groups and arrays of two points have the same unique names, and the kernel
//! would take one for the other. So the driver is bound to the disks of one point only.

use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::block::disks;

const BUS: &str = "/sys/bus/virtio";
const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_blk";
/// The kind of device of a disk, in /sys.
const DISK: &str = "0x0002";
/// How long disks may take to appear and to vanish.
const PATIENCE: Duration = Duration::from_secs(20);
const INTERVAL: Duration = Duration::from_millis(2);

/// Shows no disk before the first request to, if the kernel's command line says `select=1`.
pub(crate) fn prepare() -> Result<()> {
    match std::env::var("select") {
        Ok(_) => std::fs::write(Path::new(BUS).join("drivers_autoprobe"), "0"),
        Err(_) => Ok(()),
    }
}

/// Shows the disks with the numbers from `first` on, and no other.
pub(crate) fn select(first: u64, count: u64) -> Result<()> {
    let all = devices()?;
    for name in &all {
        if Path::new(DRIVER).join(name).exists() {
            std::fs::write(Path::new(DRIVER).join("unbind"), name)?;
        }
    }
    await_numbers(&[])?;
    let numbers: Vec<u64> = (first..first.saturating_add(count)).take(all.len()).collect();
    for number in &numbers {
        let name = usize::try_from(*number).ok().and_then(|number| all.get(number));
        let name = name.ok_or_else(|| Error::new(ErrorKind::NotFound, "no such disk"))?;
        std::fs::write(Path::new(DRIVER).join("bind"), name)?;
    }
    await_numbers(&numbers)
}

/// The names of the disks' devices on their bus, in the order in which QEMU has them.
fn devices() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for device in std::fs::read_dir(Path::new(BUS).join("devices"))? {
        let device = device?;
        let name = device.file_name().to_string_lossy().into_owned();
        let kind = std::fs::read_to_string(device.path().join("device")).unwrap_or_default();
        let number: Option<u64> = name.strip_prefix("virtio").and_then(|n| n.parse().ok());
        if let (DISK, Some(number)) = (kind.trim(), number) {
            found.push((number, name));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// Waits until exactly these disks are there, with their nodes.
fn await_numbers(numbers: &[u64]) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let shown = disks()?;
        let node = |name: &String| PathBuf::from("/dev").join(name).exists();
        if shown.keys().eq(numbers) && shown.values().all(node) {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(Error::other("the disks did not appear"));
        }
        std::thread::sleep(INTERVAL);
    }
}
