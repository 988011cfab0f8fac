//! The machine that a run has booted: its document, its sockets, its pictures.
//!
//! ```text
//! RUNS/ID/machine.json   what runs; written whole, removed when the machine is off
//! RUNS/ID/serial         socket of the serial port, served by the run's process
//! RUNS/ID/machine/       QEMU's own folder: the sockets screen, qmp, qmp-keys; pictures
//! ```
//!
//! A guest that broke out of QEMU can change everything in QEMU's folder. Readers open sockets and
//! files there without following links, and use exactly the object that they have checked.

pub(crate) mod files;

use std::fs::{DirBuilder, File, Permissions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_block::{
    Context, Error, ErrorKind, Result, create_private, rename_over, temporary_path,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, unlinkat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde::Serialize;

use crate::RunId;
use crate::documents::MachineRecord;
use crate::folder::RunsFolder;
use crate::run_files::{MACHINE_RECORD, RunFiles, machine_of};

const SERIAL: &str = "serial";
pub(crate) const QEMU_FOLDER: &str = "machine";
/// The command whose runs have machines.
const COMMAND: &str = "boot";
/// Interval of trying to connect.
const INTERVAL: Duration = Duration::from_millis(20);

/// A socket of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineSocket {
    /// The serial port: first the last output, then what comes. Any number of clients.
    Serial,
    /// The screen, as RFB.
    Screen,
    /// QEMU's monitor, for short questions. One client at a time.
    Monitor,
    /// Another monitor, for typing, which takes seconds. One client at a time.
    Keys,
    /// The port of a machine that reads file systems. One client at a time: see [`crate::FilesRecord`].
    Port,
}

impl MachineSocket {
    /// Its name in its folder.
    pub fn name(self) -> &'static str {
        match self {
            MachineSocket::Serial => SERIAL,
            MachineSocket::Screen => "screen",
            MachineSocket::Monitor => "qmp",
            MachineSocket::Keys => "qmp-keys",
            MachineSocket::Port => "port",
        }
    }
}

impl RunsFolder {
    /// The machines of running runs.
    ///
    /// # Errors
    /// Errors of reading the folder. Damaged records are left out.
    pub fn machines(&self) -> Result<Vec<(RunId, MachineRecord)>> {
        let ids = self.names()?.into_iter().filter_map(|name| name.parse::<RunId>().ok());
        let read = |id: RunId| {
            let run = self.open(&id).ok()?;
            let record = machine_of(&run)?;
            // After the read: a run that has ended has no machine, whatever it left behind.
            run.is_locked().unwrap_or(false).then_some((id, record))
        };
        Ok(ids.filter(|id| id.word() == COMMAND).filter_map(read).collect())
    }

    /// Connects to a socket of a machine. A monitor that serves another client is waited for, at most for
    /// `patience`.
    ///
    /// # Errors
    /// `NotFound` if the machine is off, or has not started yet; `Busy` if others are connected.
    pub fn connect_machine(
        &self,
        id: &RunId,
        socket: MachineSocket,
        patience: Duration,
    ) -> Result<UnixStream> {
        let until = Instant::now() + patience;
        let connected = self.machine_folder(id, socket).and_then(|folder| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let found = openat(&folder, socket.name(), flags, Mode::empty())?;
            if FileType::from_raw_mode(fstat(&found)?.st_mode) != FileType::Socket {
                return Err(std::io::Error::other("it is not a socket"));
            }
            connect(&found, until)
        });
        connected.map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => {
                let text = format!("another client uses the {} of run {id}", socket.name());
                Error::new(ErrorKind::Busy, text).advise("try again in some seconds")
            }
            _ => {
                let text = format!("the machine of run {id} is off, or has not started yet");
                Error::with_source(ErrorKind::NotFound, text, error)
            }
        })
    }

    fn machine_folder(&self, id: &RunId, socket: MachineSocket) -> std::io::Result<OwnedFd> {
        let run = self.open(id).map_err(std::io::Error::other)?;
        match socket {
            MachineSocket::Serial => Ok(run.into()),
            _ => Ok(run.folder(QEMU_FOLDER)?.into()),
        }
    }

    /// Opens a regular file that QEMU has written in its folder, and removes its name.
    ///
    /// # Errors
    /// `Corrupt` if it is not a regular file; errors of the operating system.
    pub fn take_machine_file(&self, id: &RunId, name: &str) -> Result<File> {
        let folder = self.open(id)?.folder(QEMU_FOLDER);
        let folder = folder.context(|| format!("the machine of run {id}"))?;
        let file = folder.file(name);
        let _ = unlinkat(&folder, name, AtFlags::empty());
        file
    }
}

/// Connects to an opened socket. A blocking connect would wait forever when as many clients wait as the
/// listener allows.
fn connect(found: &OwnedFd, until: Instant) -> std::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // This path names the object itself, which cannot be replaced meanwhile.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
    while let Err(error) = rustix::net::connect(&stream, &address) {
        if error != Errno::AGAIN || Instant::now() >= until {
            return Err(error.into());
        }
        std::thread::sleep(INTERVAL);
    }
    let stream = UnixStream::from(stream);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// The files of the machine that this process runs. Dropping it removes them.
pub struct MachineFiles {
    pub(crate) run: PathBuf,
}

impl MachineFiles {
    /// Makes QEMU's folder in the folder of a run.
    pub(crate) fn new(run: &Path) -> Result<MachineFiles> {
        let files = MachineFiles { run: run.to_owned() };
        let folder = files.qemu_folder();
        DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .context(|| format!("creating {}", folder.display()))?;
        Ok(files)
    }

    /// QEMU's own folder, in which everything is removed with this.
    pub fn qemu_folder(&self) -> PathBuf {
        self.run.join(QEMU_FOLDER)
    }

    /// Listens at the socket of the serial port. Only this user can connect.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn listen_serial(&self) -> Result<UnixListener> {
        let files = RunFiles::open(&self.run)?;
        // A short path: addresses of sockets have at most 107 bytes.
        let path = files.own_path().join(SERIAL);
        let listener = UnixListener::bind(&path).and_then(|listener| {
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).map(|()| listener)
        });
        listener.context(|| "making the socket of the serial port")
    }

    /// Tells others about the machine.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn tell(&self, record: &MachineRecord) -> Result<()> {
        self.write(MACHINE_RECORD, record)
    }

    /// Writes a document beside QEMU's folder, whole.
    pub(crate) fn write(&self, name: &str, document: &impl Serialize) -> Result<()> {
        let path = self.run.join(name);
        let temporary = temporary_path(&path);
        let written = create_private(&temporary)
            .and_then(|file| Ok(serde_json::to_writer(file, document)?))
            .and_then(|()| rename_over(&temporary, &path));
        written.context(|| format!("writing {}", path.display()))
    }
}

impl Drop for MachineFiles {
    fn drop(&mut self) {
        remove_machine(&self.run);
    }
}

/// Removes what the machine of a run has left. Links in QEMU's folder are removed, not followed.
pub(crate) fn remove_machine(run: &Path) {
    for record in [MACHINE_RECORD, files::RECORD].map(|name| run.join(name)) {
        let _ = std::fs::remove_file(temporary_path(&record));
        let _ = std::fs::remove_file(record);
    }
    for name in [SERIAL, files::USE] {
        let _ = std::fs::remove_file(run.join(name));
    }
    let folder = run.join(QEMU_FOLDER);
    if std::fs::symlink_metadata(&folder).is_ok_and(|found| found.is_dir()) {
        let _ = std::fs::remove_dir_all(folder);
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
