//! The file systems of a point by their names.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_files::{Device, Found};
use serde::Serialize;

use super::client::Client;
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
    /// Asks for them. `disks` are the names of the attached disks, in order.
    ///
    /// # Errors
    /// Those of the conversation.
    pub fn read(client: &mut Client<'_>, disks: &[String], key: &[u8]) -> Result<FileSystems> {
        let devices = client.devices(key)?;
        Ok(FileSystems(devices.into_iter().map(|device| named(device, disks)).collect()))
    }

    fn readable(&self) -> impl Iterator<Item = &FileSystem> {
        self.0.iter().filter(|system| system.is_readable)
    }
}

fn named(device: Device, disks: &[String]) -> FileSystem {
    let disk = device.disk.and_then(|disk| disks.get(usize::try_from(disk).ok()?));
    let name = match disk {
        Some(disk) if device.partition == 0 => disk.clone(),
        Some(disk) if disk.ends_with(|c: char| c.is_ascii_digit()) => {
            format!("{disk}p{}", device.partition)
        }
        Some(disk) => format!("{disk}{}", device.partition),
        // Other letters would not get through an address.
        None => shown(&device.volume).replace('/', "-"),
    };
    let note = Some(printable(&device.note)).filter(|note| !note.is_empty());
    FileSystem {
        name,
        format: printable(&device.format),
        label: shown(&device.label),
        size_bytes: device.size_bytes,
        is_readable: device.is_readable,
        note,
        number: device.number,
    }
}

/// Chooses and opens the file system of that name; without one the system's root, else the only one.
/// Returns its number for requests.
///
/// # Errors
/// `NotFound` and `InvalidInput`; the message names the file systems. `Unsupported` if it cannot be
/// read.
pub fn choose(client: &mut Client<'_>, systems: &FileSystems, name: Option<&str>) -> Result<u64> {
    let open = |client: &mut Client<'_>, system: &FileSystem| {
        client.open(system.number).map_err(|error| {
            let name = &system.name;
            error.context(format!("{name} ({}) is not readable here", system.format)).advise(
                "it may be damaged: boot the point, or attach its disk to a machine, and check it there",
            )
        })
    };
    if let Some(name) = name {
        let found = systems.0.iter().find(|system| system.name == name).ok_or_else(|| {
            let text = format!(
                "there is no file system {}; there are: {}",
                shown(name.as_bytes()),
                list(systems)
            );
            Error::new(ErrorKind::NotFound, text)
        })?;
        if !found.is_readable {
            let why = found.note.as_deref().unwrap_or("there is no file system");
            let text = format!("{name} holds {}: {why}", found.format);
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
    match (roots.as_slice(), readable.as_slice(), first_error) {
        ([root], _, _) | ([], [root], None) => Ok(root.number),
        ([], [_], Some(error)) => Err(error),
        ([], [], _) => {
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
    let names: Vec<_> = systems
        .0
        .iter()
        .map(|system| match &system.note {
            Some(note) if !system.is_readable => {
                format!("{} ({}: {note})", system.name, system.format)
            }
            _ => format!("{} ({})", system.name, system.format),
        })
        .collect();
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}
