//! The disks of a point that the machine has, and the names of their devices.

use coldrise_files_protocol::Device;

use super::names::shown;

/// The disks of a point that the machine has.
#[derive(Clone, Copy, Debug)]
pub struct AttachedDisks<'a> {
    /// MACHINE/POINT, for advice.
    pub address: &'a str,
    /// Their names, in order.
    pub names: &'a [String],
    /// Whether the point has no others.
    pub is_all: bool,
}

impl<'a> AttachedDisks<'a> {
    /// The disk of a device.
    pub(super) fn disk(&self, device: &Device) -> Option<&'a String> {
        device.disk.and_then(|disk| self.names.get(usize::try_from(disk).ok()?))
    }
}

/// The name of a device in addresses.
pub(super) fn device_name(device: &Device, attached: &AttachedDisks<'_>) -> String {
    match attached.disk(device) {
        Some(disk) if device.partition == 0 => disk.clone(),
        Some(disk) if disk.ends_with(|c: char| c.is_ascii_digit()) => {
            format!("{disk}p{}", device.partition)
        }
        Some(disk) => format!("{disk}{}", device.partition),
        // Other letters would not get through an address.
        None => shown(&device.volume).replace('/', "-"),
    }
}
