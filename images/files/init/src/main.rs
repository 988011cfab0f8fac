//! The only program in the machine that reads file systems: its init.
//!
//! It answers on one virtio port until the machine is ended from outside. If it ends or the kernel
//! crashes, the machine ends: nothing in it is worth keeping.
#![forbid(unsafe_code)]

mod bitlocker;
mod block;
mod command;
mod containers;
mod devices;
mod groups;
mod modules;
mod port;
mod shown_disks;
mod signature;
mod tree;
mod volumes;

use std::io::{Error, Result};

use coldrise_files_protocol::{Answer, Failure, Request};
use rustix::mount::{MountFlags, mount};

use devices::Devices;
use port::{Abandoned, Port};

fn main() -> Result<()> {
    for (kind, place) in
        [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/run")]
    {
        std::fs::create_dir_all(place)?;
        mount(kind, place, kind, MountFlags::empty(), None)?;
    }
    for name in ["virtio_pci", "virtio_console"] {
        modules::load(name)?;
    }
    shown_disks::prepare()?;
    modules::load("virtio_blk")?;
    devices::await_disks()?;
    let mut port = Port::open()?;
    let mut devices = Devices::default();
    loop {
        let request = port.request()?;
        // An abandoned answer ends here: the next request follows a greeting.
        let _ = answer(&mut port, &mut devices, &request);
    }
}

/// An error returned to the client.
struct Refusal(Failure, String);

impl Refusal {
    fn not_found(what: &str) -> Refusal {
        Refusal(Failure::NotFound, what.to_owned())
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        use rustix::io::Errno;
        let failure = match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOENT) => Failure::NotFound,
            Some(Errno::NOTDIR | Errno::LOOP | Errno::INVAL) => Failure::WrongKind,
            _ => Failure::Unreadable,
        };
        Refusal(failure, text(&error))
    }
}

impl From<rustix::io::Errno> for Refusal {
    fn from(error: rustix::io::Errno) -> Refusal {
        Error::from(error).into()
    }
}

/// The system's words for an error, without its number.
fn text(error: &Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

fn answer(
    port: &mut Port,
    devices: &mut Devices,
    request: &Request,
) -> std::result::Result<(), Abandoned> {
    let done = match request {
        Request::Devices(key) => devices.tell(port, key),
        Request::Open(device) => devices
            .open(*device)
            .and_then(|opened| port.send(&Answer::Opened(opened.found)).map_err(|_| abandoned())),
        Request::List(device, path) => {
            devices.open(*device).and_then(|opened| tree::list(port, opened, path))
        }
        Request::Walk(device, path) => {
            devices.open(*device).and_then(|opened| tree::walk(port, opened, path, false))
        }
        Request::Read(device, path) => {
            devices.open(*device).and_then(|opened| tree::walk(port, opened, path, true))
        }
        Request::Select { first, count } => devices.select(*first, *count),
    };
    match done {
        Ok(()) => port.send(&Answer::End)?,
        Err(Refusal(failure, text)) => port.send(&Answer::Failed(failure, text))?,
    }
    port.flush()
}

/// Not read by any client: a port that was abandoned accepts no answer before the next request.
fn abandoned() -> Refusal {
    Refusal(Failure::Unreadable, String::new())
}
