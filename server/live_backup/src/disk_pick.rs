//! Which disks of a machine are backed up, and under which names.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::DiskName;

/// A user's choice: a disk's name in the repository, and the name of a device, drive or block node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskPick {
    /// The disk's name in the repository.
    pub(crate) disk: DiskName,
    /// The device's id, the drive's id or the block node's name.
    pub(crate) device: String,
}

impl DiskPick {
    /// Parses `DISK=DEVICE` of several disks.
    ///
    /// # Errors
    /// `InvalidInput`; the message says what is accepted. No device and no disk may be there twice.
    pub(crate) fn parse_all(words: &[String]) -> Result<Vec<DiskPick>> {
        let mut picks: Vec<DiskPick> = Vec::with_capacity(words.len());
        for word in words {
            let pick = DiskPick::parse(word)?;
            if picks.iter().any(|other| other.disk == pick.disk || other.device == pick.device) {
                let text = format!("'{word}': this disk or device is there twice");
                return Err(Error::new(ErrorKind::InvalidInput, text));
            }
            picks.push(pick);
        }
        Ok(picks)
    }

    fn parse(words: &str) -> Result<DiskPick> {
        match words.split_once('=') {
            Some((disk, device)) if !device.is_empty() => {
                Ok(DiskPick { disk: DiskName::parse(disk)?, device: device.to_owned() })
            }
            _ => {
                let text =
                    format!("'{words}' names no device: write DISK=DEVICE, such as vda=disk0");
                Err(Error::new(ErrorKind::InvalidInput, text))
            }
        }
    }
}
