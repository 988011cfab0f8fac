//! The disks of a machine in QEMU.

use coldrise_block::{Error, ErrorKind, MAX_DISK_SIZE_BYTES, Result};
use coldrise_store::{DiskName, MAX_DISKS};
use serde_json::{Value, json};

use super::monitor::{Qemu, text};
use crate::DiskPick;

/// The first QEMU that survives a client of an export in an iothread.
const IOTHREADS_WORK: (u64, u64) = (9, 0);

/// Where QEMU keeps devices with an id.
const DEVICES: &str = "/machine/peripheral/";

/// A dirty bitmap, as QEMU lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bitmap {
    pub(super) name: String,
    pub(super) is_recording: bool,
    /// Neither in use nor damaged by a QEMU that was killed.
    pub(super) is_sound: bool,
    pub(super) dirty_bytes: u64,
}

/// A writable disk.
#[derive(Clone, Debug)]
pub(super) struct LiveDisk {
    pub(super) name: DiskName,
    /// The device's path in QEMU.
    pub(super) device: String,
    /// The block node that the device uses.
    pub(super) node: String,
    pub(super) size_bytes: u64,
    /// Whether the image keeps bitmaps over a clean end of QEMU.
    pub(super) keeps_bitmaps: bool,
    pub(super) bitmaps: Vec<Bitmap>,
}

/// The writable disks: all, or the picked ones. Also returns the names of those that were not picked.
///
/// # Errors
/// `NotFound` if a picked device or any disk is absent; `InvalidInput` if a disk needs a name.
pub(super) fn find(qemu: &mut Qemu, picks: &[DiskPick]) -> Result<(Vec<LiveDisk>, Vec<String>)> {
    let entries = qemu.list("query-block", Value::Null)?;
    let entries: Vec<&Value> = entries.iter().filter(|entry| is_writable_disk(entry)).collect();
    let mut disks = Vec::new();
    for pick in picks {
        let Some(entry) = entries.iter().find(|entry| names(entry).contains(&pick.device.as_str()))
        else {
            let known: Vec<&str> = entries.iter().map(|entry| shown_name(entry)).collect();
            let text = format!(
                "the machine has no writable disk '{}'; it has: {}",
                pick.device,
                known.join(", ")
            );
            return Err(Error::new(ErrorKind::NotFound, text));
        };
        disks.push(live_disk(entry, pick.disk.clone())?);
    }
    let is_taken = |entry: &&&Value| disks.iter().any(|disk| disk.device == device_path(entry));
    let others: Vec<&Value> = entries.iter().filter(|entry| !is_taken(entry)).copied().collect();
    if !picks.is_empty() {
        return Ok((disks, others.into_iter().map(|entry| shown_name(entry).to_owned()).collect()));
    }
    for entry in others {
        disks.push(live_disk(entry, default_name(entry)?)?);
    }
    if disks.is_empty() || disks.len() > MAX_DISKS {
        let text = format!("the machine has {} writable disks; 1 to {MAX_DISKS} work", disks.len());
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    Ok((disks, Vec::new()))
}

/// Not floppies, CDs, read-only disks, and block nodes without a device.
fn is_writable_disk(entry: &Value) -> bool {
    !text(entry, "qdev").is_empty()
        && entry["removable"] == json!(false)
        && entry["inserted"]["ro"] == json!(false)
}

/// The path of a disk's device. QEMU gives the id, or the path of an object within the device.
pub(super) fn device_path(entry: &Value) -> String {
    match text(entry, "qdev") {
        id if !id.is_empty() && !id.contains('/') => format!("{DEVICES}{id}"),
        path => path.to_owned(),
    }
}

/// The id of the device, if the user gave one.
fn device_id(entry: &Value) -> &str {
    let path = text(entry, "qdev");
    let inner = path.strip_prefix(DEVICES);
    inner
        .or((!path.contains('/')).then_some(path))
        .and_then(|id| id.split('/').next())
        .unwrap_or_default()
}

/// All names that a user may use for a disk.
fn names(entry: &Value) -> [&str; 4] {
    let node = text(&entry["inserted"], "node-name");
    [node, device_id(entry), text(entry, "device"), text(entry, "qdev")]
}

/// The node's name, if a user chose it; else the device's or the drive's id.
fn shown_name(entry: &Value) -> &str {
    let all = names(entry);
    let is_chosen = |name: &&&str| !name.is_empty() && !name.starts_with('#');
    all.iter().find(is_chosen).copied().unwrap_or_default()
}

fn default_name(entry: &Value) -> Result<DiskName> {
    let name = shown_name(entry);
    DiskName::parse(name).map_err(|error| {
        let advice = format!("name the machine's disks yourself: DISK={name}, for each");
        error.context("a disk of the machine").advise(advice)
    })
}

fn live_disk(entry: &Value, name: DiskName) -> Result<LiveDisk> {
    let inserted = &entry["inserted"];
    let node = text(inserted, "node-name").to_owned();
    let size_bytes = inserted["image"]["virtual-size"].as_u64().unwrap_or(0);
    if size_bytes == 0 || size_bytes > MAX_DISK_SIZE_BYTES || node.is_empty() {
        let text = format!("{name}: QEMU says that '{node}' has {size_bytes} bytes");
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let compatibility = &inserted["image"]["format-specific"]["data"]["compat"];
    let listed = inserted["dirty-bitmaps"].as_array();
    let bitmap = |entry: &Value| Bitmap {
        name: text(entry, "name").to_owned(),
        is_recording: entry["recording"] == json!(true),
        is_sound: entry["busy"] != json!(true) && entry["inconsistent"] != json!(true),
        dirty_bytes: entry["count"].as_u64().unwrap_or(0),
    };
    Ok(LiveDisk {
        name,
        device: device_path(entry),
        size_bytes,
        keeps_bitmaps: text(inserted, "drv") == "qcow2" && *compatibility == json!("1.1"),
        bitmaps: listed.into_iter().flatten().map(bitmap).collect(),
        node,
    })
}

/// Refuses to export a disk with an iothread in a QEMU that would crash: its NBD server ends the
/// connection of a client in the wrong thread, and an assertion kills the machine.
///
/// # Errors
/// `Unsupported`, with advice.
pub(super) fn check_iothreads(qemu: &mut Qemu, disks: &[LiveDisk]) -> Result<()> {
    let (major, minor) = qemu.version()?;
    if (major, minor) >= IOTHREADS_WORK {
        return Ok(());
    }
    let has_iothreads = !qemu.list("query-iothreads", Value::Null)?.is_empty();
    for disk in disks {
        if has_iothreads && may_use_iothread(qemu, &disk.device)? {
            let text = format!(
                "{}: the disk has an iothread, and exporting such a disk crashes QEMU {major}.{minor} \
                 (9.0 is the first that survives it)",
                disk.name
            );
            return Err(Error::new(ErrorKind::Unsupported, text).advise(
                "add --push: QEMU then copies the disk into a scratch file, which is safe; or \
                 start the machine without iothread= on its disks",
            ));
        }
    }
    Ok(())
}

/// The iothread of a SCSI disk belongs to its controller, above the bus.
fn may_use_iothread(qemu: &mut Qemu, device: &str) -> Result<bool> {
    if has_property(qemu, device, "iothread")? {
        return Ok(!qom_text(qemu, device, "iothread")?.is_empty());
    }
    if !has_property(qemu, device, "parent_bus")? {
        return Ok(false);
    }
    let bus = qom_text(qemu, device, "parent_bus")?;
    let controller = bus.rsplit_once('/').map_or("", |(controller, _)| controller);
    Ok(controller.starts_with("/machine/")
        && has_property(qemu, controller, "iothread")?
        && !qom_text(qemu, controller, "iothread")?.is_empty())
}

fn has_property(qemu: &mut Qemu, path: &str, name: &str) -> Result<bool> {
    let properties = qemu.list("qom-list", json!({ "path": path }))?;
    Ok(properties.iter().any(|entry| text(entry, "name") == name))
}

fn qom_text(qemu: &mut Qemu, path: &str, name: &str) -> Result<String> {
    let value = qemu.ask("qom-get", json!({ "path": path, "property": name }))?;
    Ok(value.as_str().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(qdev: &str, device: &str, node: &str) -> Value {
        json!({
            "qdev": qdev, "device": device, "removable": false,
            "inserted": { "ro": false, "node-name": node, "image": { "virtual-size": 512 } },
        })
    }

    #[test]
    fn disks_are_called_as_the_user_called_them() {
        for (qdev, device, node, name) in [
            ("/machine/peripheral/d0/virtio-backend", "", "vda", "vda"),
            ("/machine/peripheral/d0/virtio-backend", "", "#block123", "d0"),
            ("d0", "", "#block123", "d0"),
            ("/machine/unattached/device[17]", "virtio0", "#block123", "virtio0"),
        ] {
            assert_eq!(default_name(&entry(qdev, device, node)).unwrap().as_str(), name);
        }
        let error = default_name(&entry("/machine/x", "", "Disk One")).unwrap_err();
        assert!(error.full_message().contains("DISK=Disk One"), "{error:?}");
    }

    #[test]
    fn floppies_and_read_only_disks_are_not_backed_up() {
        let disk = entry("/machine/peripheral/d0", "", "vda");
        assert!(is_writable_disk(&disk));
        let mut other = disk.clone();
        other["removable"] = json!(true);
        assert!(!is_writable_disk(&other));
        let mut other = disk.clone();
        other["inserted"]["ro"] = json!(true);
        assert!(!is_writable_disk(&other));
        assert!(!is_writable_disk(&json!({ "device": "sd0", "removable": false })));
    }

    #[test]
    fn invalid_disk_sizes_of_qemu_are_refused() {
        let name = || DiskName::parse("vda").unwrap();
        for size in [json!(0), json!("x"), json!(u64::MAX), Value::Null] {
            let mut odd = entry("/machine/peripheral/d0", "", "vda");
            odd["inserted"]["image"]["virtual-size"] = size;
            assert_eq!(live_disk(&odd, name()).unwrap_err().kind(), ErrorKind::Unsupported);
        }
        let mut odd = entry("/machine/peripheral/d0", "", "vda");
        odd["inserted"]["dirty-bitmaps"] = json!([7, { "name": 3 }]);
        assert!(live_disk(&odd, name()).unwrap().bitmaps.iter().all(|b| b.name.is_empty()));
    }
}
