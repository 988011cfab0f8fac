//! The file systems of a point by their names.

use std::collections::BTreeSet;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_files_protocol::{Device, Found, is_encrypted};
use serde::Serialize;

use super::attached::{AttachedDisks, device_name};
use super::client::Client;
use super::groups::sentence;
use super::names::{printable, shown};

/// A device of the point.
#[derive(Clone, Debug, Serialize)]
pub struct FileSystem {
    /// Its name in addresses, such as `vda1`.
    pub name: String,
    /// The file system, or what else it holds.
    pub format: String,
    /// The label.
    pub label: String,
    /// The length, in bytes.
    pub size_bytes: u64,
    /// Whether its files can be read.
    pub is_readable: bool,
    /// Why not, or what else is to say.
    pub note: Option<String>,
    #[serde(skip)]
    number: u64,
}

/// All devices of a point, or of one of its disks.
pub struct FileSystems(pub Vec<FileSystem>);

impl FileSystems {
    /// Asks for them.
    ///
    /// # Errors
    /// Those of the conversation.
    pub fn read(
        client: &mut Client<'_>,
        attached: &AttachedDisks<'_>,
        key: &[u8],
    ) -> Result<FileSystems> {
        let (devices, groups) = client.devices(key)?;
        let mut systems: Vec<_> = devices.iter().map(|device| named(device, attached)).collect();
        for group in &groups {
            let sentence = sentence(group, &devices, attached);
            for affected in &group.affected {
                let system = systems.iter_mut().find(|system| system.number == affected.device);
                let Some(system) = system else { continue };
                system.note = Some(match affected.is_whole && group.copies.is_empty() {
                    true => format!("{sentence}; this volume is read without it"),
                    false => sentence.clone(),
                });
                if !affected.is_whole {
                    client.explain(affected.device, sentence.clone());
                }
            }
        }
        Ok(FileSystems(systems))
    }

    fn readable(&self) -> impl Iterator<Item = &FileSystem> {
        self.0.iter().filter(|system| system.is_readable)
    }

    /// Devices that may hold more file systems than are listed: an encrypted disk that was not opened, or
    /// physical volumes that LVM refuses.
    fn unopened(&self) -> Option<&str> {
        let is_unopened = |system: &&FileSystem| match system.format.as_str() {
            format if is_encrypted(format) => true,
            "lvm" => system.note.as_deref().is_some_and(|note| note.contains("LVM: ")),
            _ => false,
        };
        self.0.iter().find(is_unopened).map(|system| system.name.as_str())
    }
}

fn named(device: &Device, attached: &AttachedDisks<'_>) -> FileSystem {
    FileSystem {
        name: device_name(device, attached),
        format: printable(&device.format),
        label: shown(&device.label),
        size_bytes: device.size_bytes,
        is_readable: device.is_readable,
        note: Some(printable(&device.note)).filter(|note| !note.is_empty()),
        number: device.number,
    }
}

/// Chooses and opens the file system of that name; without one the system's root, else the only one.
/// Returns its number for requests.
///
/// # Errors
/// `NotFound` and `InvalidInput`; the message names the file systems. `Unsupported` if it cannot be
/// read, or may be on an encrypted disk or in a volume group that is not read.
pub fn choose(client: &mut Client<'_>, systems: &FileSystems, name: Option<&str>) -> Result<u64> {
    let open = |client: &mut Client<'_>, system: &FileSystem| {
        client.open(system.number).map_err(|error| {
            let name = &system.name;
            let error = error.context(format!("{name} ({}) is not readable here", system.format));
            // It says already why.
            match &system.note {
                Some(_) => error,
                None => error.advise(
                    "it may be damaged: boot the point, or attach its disk to a machine, and check it there",
                ),
            }
        })
    };
    if let Some(name) = name {
        let found = systems.0.iter().find(|system| system.name == name).ok_or_else(|| {
            let name = shown(name.as_bytes());
            let text = format!("there is no file system {name}; there are: {}", list(systems));
            match systems.unopened() {
                Some(other) => {
                    let text = format!("{text}; it may be in {other}, which cannot be read");
                    Error::new(ErrorKind::Unsupported, text)
                }
                None => Error::new(ErrorKind::NotFound, text),
            }
        })?;
        if !found.is_readable {
            let why = found.note.as_deref().unwrap_or("there is no file system");
            let text = format!("{name} ({}) cannot be read: {why}", found.format);
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        return open(client, found).map(|_| found.number);
    }
    let readable: Vec<_> = systems.readable().collect();
    let (mut roots, mut first_error) = (Vec::new(), None);
    for system in &readable {
        match open(client, system) {
            Ok(Found::Unix | Found::Windows) => roots.push(*system),
            Ok(Found::Nothing) => {}
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                first_error = first_error.or(Some(error))
            }
            Err(error) => return Err(error),
        }
    }
    match (roots.as_slice(), readable.as_slice(), first_error, systems.unopened()) {
        ([root], ..) | ([], [root], None, None) => Ok(root.number),
        ([], [_], None, Some(other)) => {
            let text = format!(
                "no system was found on the readable disks; it may be in {other}; there are: {}",
                list(systems)
            );
            Err(Error::new(ErrorKind::Unsupported, text))
        }
        ([], [_], Some(error), _) => Err(error),
        ([], [], ..) => {
            let text =
                format!("there is no file system that can be read; there are: {}", list(systems));
            Err(Error::new(ErrorKind::Unsupported, text))
        }
        _ => {
            let text = format!(
                "say which file system, as in MACHINE/POINT:{}/PATH; there are: {}",
                readable.first().map_or("vda1", |system| system.name.as_str()),
                list(systems)
            );
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    }
}

fn list(systems: &FileSystems) -> String {
    // The same note may be of many.
    let mut listed = BTreeSet::new();
    let shown = systems.0.iter().map(|system| match &system.note {
        Some(note) if listed.insert(note) => format!("{} ({}: {note})", system.name, system.format),
        _ => format!("{} ({})", system.name, system.format),
    });
    let names: Vec<_> = shown.collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
