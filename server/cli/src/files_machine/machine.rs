//! The machine that reads file systems: its own kernel and init, the point's disks, one virtio port.
//!
//! Nothing has to survive. The order of starts is session, nbdkit, QEMU, and each ends with this
//! process: the kernel kills QEMU and ends nbdkit, and the next command discards the session and the
//! folder, whose locks are free then (`leftovers`). The point never changes: the journals that the
//! machine's kernel replays are captured by the session.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind};
use coldrise_recovery::files::PORT;
use coldrise_session::OwnedSession;
use coldrise_store::{DiskName, MachineName, PointDocument, Repository, SessionName};
use rustix::process::Signal;

use crate::confinement::{NetworkReach, Reach};
use crate::disk_server::{DiskServer, Protocol};
use crate::installed;
use crate::invocation::Invocation;
use crate::leftovers;
use crate::qemu;
use crate::qemu_process::{pipe_messages, QemuProcess};
use crate::signals::ChildSignals;

/// Files beside the program, or in the folder of its libraries.
const KERNEL: &str = "coldrise-files-kernel";
const INITRD: &str = "coldrise-files-initrd";
const LIBRARIES: &str = "coldrise";
/// Memory of the machine. Its kernel's caches need little, names in a large folder may need much.
const MEMORY_MIB: u32 = 512;
/// Memory for decoded chunks, in bytes.
const CACHE_BYTES: u64 = 64 << 20;
/// Slots for disks.
const MAX_DISKS: usize = 24;
/// Of the kernel. A crash ends the machine.
const KERNEL_ARGUMENTS: &str = "quiet loglevel=1 panic=-1 oops=panic mitigations=off no_timer_check \
    nowatchdog audit=0 apparmor=0 selinux=0 random.trust_cpu=on rcupdate.rcu_expedited=1 cryptomgr.notests";

/// A running machine. Dropping it ends it.
pub(super) struct FilesMachine {
    process: QemuProcess,
    server: DiskServer,
    session: OwnedSession,
    /// The socket of its port. It serves one client at a time, from soon after the start.
    pub(super) port: PathBuf,
    /// The names of its disks, in order.
    pub(super) disks: Vec<String>,
    /// The length of its disks, in bytes.
    pub(super) disk_bytes: u64,
    _scratch: ScratchFolder,
}

impl FilesMachine {
    /// Starts the machine with the point's disks, or one of them.
    ///
    /// # Errors
    /// `ToolFailed` if something is not installed or does not start; `NotFound` if there is no such
    /// disk; `Unsupported` for too many disks; `Interrupted`; the errors of publishing.
    pub(super) fn start(
        invocation: &Invocation,
        repository: &Arc<Repository>,
        point: &PointDocument,
        only: Option<&DiskName>,
        signals: &mut ChildSignals,
    ) -> Result<FilesMachine> {
        let image = [installed_file(KERNEL)?, installed_file(INITRD)?];
        let chosen: Vec<_> =
            point.disks.iter().filter(|disk| only.is_none_or(|only| disk.name == *only)).collect();
        check_disks(point, only, chosen.len())?;
        leftovers::remove(repository);
        let session = OwnedSession::publish(repository, point, session_name(&point.machine)?)?;
        let scratch = ScratchFolder::new(ScratchKind::Files)?;
        let document = session.document();
        let protocol = Protocol::Nbd;
        let server = DiskServer::start(
            protocol,
            invocation,
            document,
            scratch.path(),
            CACHE_BYTES,
            signals,
        )?;
        let folder = scratch.path().join("machine");
        std::fs::create_dir(&folder).context(|| "making a folder for the machine")?;
        let port = folder.join("port");
        let mut words = arguments(&image, &port, chosen.len());
        for (number, disk) in chosen.iter().enumerate() {
            let mut node = server.node(&document.name, &disk.name);
            node["node-name"] = format!("disk{number}").into();
            words.extend(["-blockdev".into(), node.to_string().into(), "-device".into()]);
            words.push(format!("virtio-blk-pci,drive=disk{number},serial={number}").into());
        }
        let process = start_qemu(words, &image, &folder)?;
        Ok(FilesMachine {
            process,
            server,
            port,
            disks: chosen.iter().map(|disk| disk.name.to_string()).collect(),
            disk_bytes: chosen.iter().map(|disk| disk.size_bytes).sum(),
            session,
            _scratch: scratch,
        })
    }

    /// Checks that the machine and its disks are there. Call it while waiting.
    ///
    /// # Errors
    /// `ToolFailed` if they are not; `Interrupted` if this program is asked to end.
    pub(super) fn look_after(
        &mut self,
        invocation: &Invocation,
        signals: &mut ChildSignals,
    ) -> Result<()> {
        if signals.was_asked_to_end() {
            return Err(Error::new(ErrorKind::Interrupted, "interrupted"));
        }
        self.process.check()?;
        self.server.look_after(invocation, signals)
    }

    /// Ends it and discards its session.
    ///
    /// # Errors
    /// Those of the session.
    pub(super) fn end(mut self) -> Result<()> {
        let _ = self.process.child().kill();
        let _ = self.process.child().wait();
        let stopped = self.server.stop();
        self.session.end()?;
        stopped
    }
}

fn installed_file(name: &str) -> Result<PathBuf> {
    installed::library(LIBRARIES, name).ok_or_else(|| {
        let text =
            format!("{name} is not installed: it belongs to the machine that reads file systems");
        Error::new(ErrorKind::ToolFailed, text)
            .advise("the Debian package has it; in the source folder make files-image builds it")
    })
}

fn check_disks(point: &PointDocument, only: Option<&DiskName>, count: usize) -> Result<()> {
    if let (0, Some(name)) = (count, only) {
        let names: Vec<_> = point.disks.iter().map(|disk| disk.name.to_string()).collect();
        let text = format!(
            "{}/{} has no disk {name}; it has {}",
            point.machine,
            point.point,
            names.join(", ")
        );
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    if count > MAX_DISKS {
        let text =
            format!("{count} disks are too many at once: name one, as in MACHINE/POINT/DISK:/PATH");
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    if qemu::program_path().is_none() {
        let text =
            format!("{} is not installed (Debian: apt install qemu-system-x86)", qemu::PROGRAM);
        return Err(Error::new(ErrorKind::ToolFailed, text));
    }
    Ok(())
}

fn session_name(machine: &MachineName) -> Result<SessionName> {
    let machine = machine.as_str();
    let mut random = [0; 4];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(std::io::Error::from)
        .context(|| "taking random bytes")?;
    let suffix = format!("-files-{:08x}-throwaway", u32::from_ne_bytes(random));
    let kept = machine.len().min(63 - suffix.len());
    SessionName::parse(&format!("{}{suffix}", machine.get(..kept).unwrap_or(machine)))
}

fn arguments(image: &[PathBuf; 2], port: &Path, disks: usize) -> Vec<OsString> {
    let accelerator = match qemu::kvm_works() {
        Ok(()) => "kvm",
        Err(_) => "tcg,tb-size=128",
    };
    // A comma separates options.
    let port = port.display().to_string().replace(',', ",,");
    let words = [
        ["-accel", accelerator],
        ["-cpu", "max,erms=off"],
        ["-m", &MEMORY_MIB.to_string()],
        ["-machine", "pc,usb=off"],
        ["-display", "none"],
        ["-serial", "none"],
        ["-monitor", "none"],
        ["-append", &format!("{KERNEL_ARGUMENTS} disks={disks}")],
        ["-device", "virtio-serial-pci"],
        ["-chardev", &format!("socket,id=port,path={port},server=on,wait=off")],
        ["-device", &format!("virtserialport,chardev=port,name={PORT}")],
        ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"],
    ];
    let words = words.iter().flatten().map(OsString::from);
    let [kernel, initrd] = image;
    let mut all: Vec<OsString> =
        ["-nodefaults", "-no-user-config", "-no-reboot"].map(OsString::from).to_vec();
    all.extend(words);
    all.extend(["-kernel".into(), kernel.into(), "-initrd".into(), initrd.into()]);
    all
}

fn start_qemu(words: Vec<OsString>, image: &[PathBuf; 2], folder: &Path) -> Result<QemuProcess> {
    let mut command = Command::new(qemu::PROGRAM);
    // A Ctrl-C on the terminal is for this program, which then ends QEMU.
    command.args(words).process_group(0);
    command.env_clear().env("LC_ALL", "C").env("TMPDIR", folder);
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    pipe_messages(&mut command);
    let reach = Reach {
        program: qemu::program_path(),
        files: image.to_vec(),
        folders: vec![folder.to_owned()],
        network: NetworkReach::Port(None),
    };
    QemuProcess::start(command, Signal::KILL, Some(reach))
}
