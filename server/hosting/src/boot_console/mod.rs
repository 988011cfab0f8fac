//! A booted machine without a terminal: its screen, serial port and monitors are sockets in the
//! folder of the run, for the service.
//!
//! ```text
//!   RUNS/ID/machine/screen, qmp, qmp-keys ◀── QEMU ──▶ SCRATCH/serial ──▶ SerialHub ──▶ RUNS/ID/serial
//! ```
//!
//! QEMU serves the screen to all its clients, and makes none wait for another. It would serve one client of
//! the serial port, so [`SerialHub`] stands between.

mod serial_hub;

use std::ffi::OsString;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_runs::{MachineFiles, MachineRecord, MachineSocket};
use coldrise_store::SessionName;

use crate::caller::Caller;
use crate::qemu;
use crate::qemu_process::{QemuProcess, pipe_messages};
use coldrise_block::now_ms;
use coldrise_inventory::{Hardware, Network};
use serial_hub::SerialHub;

/// How long QEMU may take to connect its serial port.
const PATIENCE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(5);
/// QEMU's sandbox, for what the folder rules leave open.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// The sockets of one machine. Dropping it removes them.
pub struct BootConsole {
    files: MachineFiles,
    serial: UnixListener,
    serial_path: PathBuf,
    hub: Option<SerialHub>,
}

impl BootConsole {
    /// Makes the folders. `scratch` is private to the machine; its path is short.
    ///
    /// # Errors
    /// `InvalidInput` if this process has no folder of a run; errors of the operating system.
    pub fn new(files: MachineFiles, scratch: &Path) -> Result<BootConsole> {
        let serial_path = scratch.join("serial");
        let serial = UnixListener::bind(&serial_path)
            .and_then(|serial| serial.set_nonblocking(true).map(|()| serial))
            .context(|| "making a socket for the serial port")?;
        Ok(BootConsole { files, serial, serial_path, hub: None })
    }

    /// Tells the service what is about to start.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn tell(&self, caller: &Caller, hardware: &Hardware, session: &SessionName) -> Result<()> {
        let repository =
            std::path::absolute(caller.repository_path()).context(|| "finding the repository")?;
        self.files.tell(&MachineRecord {
            repository: repository.to_string_lossy().into_owned(),
            session: session.to_string(),
            since_ms: now_ms(),
            memory_mib: hardware.memory_mib,
            cpus: hardware.cpus,
            network: match hardware.network {
                Network::None => "none",
                Network::Isolated => "isolated",
                Network::User => "connected",
            }
            .to_owned(),
            has_screen: true,
        })
    }

    /// QEMU's own folder.
    pub fn folder(&self) -> PathBuf {
        self.files.qemu_folder()
    }

    /// QEMU's command, for the arguments `words` of hardware and disks.
    pub fn command(&self, words: &[OsString]) -> Command {
        let mut command = Command::new(qemu::PROGRAM);
        // Paths in QEMU's folder are relative: addresses of sockets have at most 107 bytes.
        command.args(words).current_dir(self.folder()).process_group(0);
        command.env_clear().env("LC_ALL", "C").env("TMPDIR", self.folder());
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        // A comma separates options.
        let serial = self.serial_path.display().to_string().replace(',', ",,");
        let monitor = |socket: MachineSocket| format!("unix:{},server=on,wait=off", socket.name());
        command.args(["-chardev", &format!("socket,id=serial,path={serial}")]);
        command.args(["-serial", "chardev:serial", "-usb", "-device", "usb-tablet"]);
        command.args(["-qmp", &monitor(MachineSocket::Monitor)]);
        command.args(["-qmp", &monitor(MachineSocket::Keys)]);
        // Never websocket=on: QEMU then listens on all addresses, without a password.
        let screen = MachineSocket::Screen.name();
        command.args(["-vnc", &format!("unix:{screen},share=force-shared"), "-sandbox", SANDBOX]);
        pipe_messages(&mut command);
        command
    }

    /// Waits for QEMU's serial port, and serves it from then on.
    ///
    /// # Errors
    /// `ToolFailed` if QEMU ends or does not connect; errors of the operating system.
    pub fn serve(&mut self, machine: &mut QemuProcess) -> Result<()> {
        let port = self.accept(machine)?;
        let _ = std::fs::remove_file(&self.serial_path);
        self.hub = Some(SerialHub::start(port, self.files.listen_serial()?)?);
        Ok(())
    }

    fn accept(&self, machine: &mut QemuProcess) -> Result<UnixStream> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            match self.serial.accept() {
                Ok((port, _)) => return Ok(port),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context(|| "waiting for QEMU"),
            }
            machine.check()?;
            std::thread::sleep(INTERVAL);
        }
        let text = "QEMU did not start in time: this host may be busy; try again later";
        Err(Error::new(ErrorKind::ToolFailed, text))
    }
}
