//! Whether the guest has mounted file systems of a disk, by its agent's word.

use coldrise_block::{Error, ErrorKind, Result};
use serde_json::Value;

/// Refuses a disk of which file systems are mounted. `systems` is the answer to `guest-get-fsinfo`; `name` is
/// the disk's serial number.
///
/// # Errors
/// `Busy`, with the places where they are mounted; `ToolFailed` for an odd answer.
pub(super) fn check_unmounted(systems: &Value, name: &str) -> Result<()> {
    let Some(systems) = systems.as_array() else {
        let text = "the guest agent's answer to guest-get-fsinfo is not understood";
        return Err(Error::new(ErrorKind::ToolFailed, text));
    };
    let places: Vec<String> = systems
        .iter()
        .filter(|system| {
            let disks = system["disk"].as_array();
            disks.is_some_and(|disks| disks.iter().any(|disk| is_named(&disk["serial"], name)))
        })
        .map(|system| {
            let place = system["mountpoint"].as_str().unwrap_or("?");
            place.chars().filter(|c| !c.is_control()).take(100).collect()
        })
        .take(5)
        .collect();
    if places.is_empty() {
        return Ok(());
    }
    let text = format!("the guest has mounted disk {name} at {}", places.join(", "));
    Err(Error::new(ErrorKind::Busy, text)
        .advise("unmount it in the guest; with --force it is detached nevertheless"))
}

/// The guest sees the serial number as it is, or behind the maker and the model.
fn is_named(serial: &Value, name: &str) -> bool {
    let serial = serial.as_str().unwrap_or_default();
    serial == name || serial.strip_suffix(name).is_some_and(|rest| rest.ends_with('_'))
}

#[cfg(test)]
mod tests {
    use super::check_unmounted;
    use serde_json::json;

    #[test]
    fn only_mounted_disks_of_this_name_are_refused() {
        let systems = json!([
            { "mountpoint": "/", "disk": [{ "serial": "root" }, {}] },
            { "mountpoint": "/mnt\u{7}", "disk": [{ "serial": "0QEMU_QEMU_HARDDISK_web01-vda" }] },
            { "mountpoint": "/old", "disk": [] },
        ]);
        let error = check_unmounted(&systems, "web01-vda").unwrap_err();
        assert!(error.full_message().contains("at /mnt"), "{error:?}");
        assert!(check_unmounted(&systems, "root").is_err());
        assert!(check_unmounted(&systems, "vda").is_ok());
        assert!(check_unmounted(&json!({}), "vda").is_err());
    }
}
