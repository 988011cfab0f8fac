//! Disks on another host that are rolled back: its `qemu-nbd` reads and writes them.

use std::path::Path;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::{Host, HostProgram, ProgramStart, ScratchSpace};

use super::RollbackDisk;
use crate::{ImageFormat, RestoreTarget};

/// A program that refuses a disk has written why by then.
const PATIENCE: Duration = Duration::from_secs(5);
/// Clients of a disk: the rollback's readers and writers.
const MAX_CLIENTS: usize = 8;

/// Exported disks of a host. Dropping it ends the exports.
pub struct HostDisks {
    _programs: Vec<HostProgram>,
    _space: ScratchSpace,
}

impl HostDisks {
    /// Exports the targets, which are paths of the host, and replaces each by the NBD URI of its export. Devices are held
    /// against mounts there; QEMU's own locks keep machines away.
    ///
    /// # Errors
    /// `InvalidInput` for a target that is not the path of a raw disk; `Busy` for one in use; `ToolFailed` if qemu-nbd refuses it;
    /// errors of the connection.
    pub fn export(host: &Host, disks: &mut [RollbackDisk]) -> Result<HostDisks> {
        let space = ScratchSpace::new(host, None, None)?;
        let mut programs = Vec::new();
        for (number, disk) in disks.iter_mut().enumerate() {
            let path = match &disk.target {
                RestoreTarget::Path(path) if path.is_absolute() => path,
                other => {
                    let text = format!("{other}: give the absolute path of a disk on the host");
                    return Err(Error::new(ErrorKind::InvalidInput, text));
                }
            };
            if let Some(format) =
                ImageFormat::from_extension(path).filter(|f| *f != ImageFormat::Raw)
            {
                let text = format!("{} is a {format} image by its name", path.display());
                return Err(Error::new(ErrorKind::InvalidInput, text)
                    .advise("roll it back on its host, through qemu-nbd and the NBD URI"));
            }
            host.hold_disk(path)?;
            let socket = number.to_string();
            let words = ["--persistent", "--format=raw", "--discard=unmap", "--cache=none"];
            let mut words: Vec<String> = words.map(str::to_owned).to_vec();
            words.extend([format!("--shared={MAX_CLIENTS}"), "--".to_owned()]);
            words.push(path.to_string_lossy().into_owned());
            let program = space.start(ProgramStart {
                program: "qemu-nbd".to_owned(),
                words,
                socket: Some(socket.clone()),
                ..ProgramStart::default()
            })?;
            let local = host.reach(&space.file(&socket)).map_err(|error| {
                match program.state(PATIENCE) {
                    Ok(state) if state.end.is_some() => refused(host, path, &state.messages),
                    _ => error,
                }
            })?;
            disk.target = RestoreTarget::Nbd(format!("nbd+unix:///?socket={}", local.display()));
            programs.push(program);
        }
        Ok(HostDisks { _programs: programs, _space: space })
    }
}

fn refused(host: &Host, path: &Path, messages: &str) -> Error {
    let why = messages.trim().trim_start_matches("qemu-nbd: ");
    let (host, path) = (host.sentence_name(), path.display());
    if why.contains("lock") {
        let text = format!("{path} on {host} is in use (open in QEMU)");
        return Error::new(ErrorKind::Busy, text)
            .advise("stop the machine, or detach the disk first");
    }
    Error::new(ErrorKind::ToolFailed, format!("{path} on {host}: {why}"))
}
