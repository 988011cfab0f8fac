//! The machine that reads file systems: its own kernel and init, the point's disks, one virtio port.
//!
//! Nothing has to survive. The order of starts is session, nbdkit, QEMU, and each ends with this
//! process: the kernel kills QEMU and ends nbdkit, and the next command discards the session and the
//! folder, whose locks are free then (`leftovers`). The point never changes: the journals that the
//! machine's kernel replays are captured by the session.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, HeldLock, Result, ScratchFolder, ScratchKind};
use coldrise_files::{MAX_DISKS, PORT};
use coldrise_runs::MachineSocket;
use coldrise_session::{CaptureLimit, OwnedSession};
use coldrise_store::{DiskDocument, DiskName, MachineName, PointDocument, Repository, SessionName};

use super::machine_end::{Console, end_error};
use super::slot;
use crate::caller::Caller;
use crate::disk_server::{DiskServer, Protocol};
use crate::installed;
use crate::leftovers;
use crate::qemu;
use crate::qemu_process::QemuProcess;
use crate::signals::ChildSignals;
use coldrise_host::confinement::NetworkReach;
use coldrise_host::{installed_program, kvm_works};

/// Files beside the program, or in the folder of its libraries.
const KERNEL: &str = "coldrise-files-kernel";
const INITRD: &str = "coldrise-files-initrd";
const LIBRARIES: &str = "coldrise";
/// Memory of the machine. Its kernel's caches need little, names in a large folder may need much.
const MEMORY_MIB: u32 = 512;
/// Memory for decoded chunks, in bytes.
const CACHE_BYTES: u64 = 64 << 20;
/// A taken-over machine must not fill the repository's drive: it may write as much as a long journal, and a
/// tenth of the free space at most.
const CAPTURED_BYTES: u64 = 1 << 30;
const FREE_SPACE_DIVISOR: u64 = 10;
/// Number of QEMU's last messages that an error has.
const MESSAGES: usize = 3;
/// Arguments of the kernel. A crash ends the machine, and is reported on the console.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=1 panic=-1 oops=panic mitigations=off no_timer_check \
    nowatchdog audit=0 apparmor=0 selinux=0 random.trust_cpu=on rcupdate.rcu_expedited=1 cryptomgr.notests";

/// A running machine. Dropping it ends it.
pub struct FilesMachine {
    process: QemuProcess,
    console: Console,
    server: DiskServer,
    sessions: Vec<OwnedSession>,
    /// The socket of its port. It serves one client at a time, from soon after the start.
    pub port: PathBuf,
    /// The disks of its points, in order.
    pub disks: Vec<PointDisks>,
    _scratch: ScratchFolder,
    /// Held as long as the machine lives.
    _slot: HeldLock,
}

/// What the machine has of one point.
pub struct PointDisks {
    /// The number of the first disk.
    pub first: u64,
    /// The names, in order.
    pub names: Vec<String>,
    /// Their length, in bytes.
    pub bytes: u64,
}

impl FilesMachine {
    /// Starts the machine with the points' disks, or only those of these names. With several points it shows no
    /// disk before it is asked to. Its port is in `folder`, or else in one of its own.
    ///
    /// # Errors
    /// `ToolFailed` if something is not installed or does not start; `Busy` if other commands use as many
    /// machines as there may be; `NotFound` if there is no such disk; `Unsupported` for too many disks; `Interrupted`; the errors of publishing.
    pub fn start(
        caller: &Caller,
        repository: &Arc<Repository>,
        points: &[&PointDocument],
        only: &[DiskName],
        folder: Option<PathBuf>,
        signals: &mut ChildSignals,
    ) -> Result<FilesMachine> {
        let image = [installed_file(KERNEL)?, installed_file(INITRD)?];
        let counts: Vec<_> = points.iter().map(|point| chosen(point, only).count()).collect();
        for (point, count) in points.iter().zip(&counts) {
            check_disks(point, only, *count)?;
        }
        let slot = slot::take(signals)?;
        leftovers::remove(repository);
        let limit = CaptureLimit {
            most_bytes: CAPTURED_BYTES,
            free_space_divisor: FREE_SPACE_DIVISOR * (points.len() as u64).max(1),
        };
        let sessions = points.iter().map(|point| {
            OwnedSession::publish(repository, point, session_name(&point.machine)?, limit)
        });
        let sessions: Vec<OwnedSession> = sessions.collect::<Result<_>>()?;
        let scratch = ScratchFolder::new(ScratchKind::Files)?;
        let documents: Vec<_> = sessions.iter().map(OwnedSession::document).collect();
        let (protocol, place) = (Protocol::Nbd, scratch.path());
        let server = DiskServer::start(protocol, caller, &documents, place, CACHE_BYTES, signals)?;
        let folder = match folder {
            Some(folder) => folder,
            None => {
                let own = scratch.path().join("machine");
                std::fs::create_dir(&own).context(|| "making a folder for the machine")?;
                own
            }
        };
        let port = folder.join(MachineSocket::Port.name());
        let mut words = arguments(&image, counts.iter().sum(), points.len() > 1);
        let (mut disks, mut number) = (Vec::new(), 0);
        for (point, document) in points.iter().zip(&documents) {
            let mut of_point = PointDisks { first: number, names: Vec::new(), bytes: 0 };
            for disk in chosen(point, only) {
                let mut node = server.node(&document.name, &disk.name);
                node["node-name"] = format!("disk{number}").into();
                words.extend(["-blockdev".into(), node.to_string().into(), "-device".into()]);
                // Its writes are bounded: it sees a full drive, and is not stopped.
                let device = format!("virtio-blk-pci,drive=disk{number},serial={number}");
                words.push((device + ",werror=report").into());
                of_point.names.push(disk.name.to_string());
                of_point.bytes += disk.size_bytes;
                number += 1;
            }
            disks.push(of_point);
        }
        let network = NetworkReach::Port(None);
        let mut process =
            QemuProcess::start_confined(caller, words, &image, &folder, network, Stdio::piped())?;
        let output = process.child().stdout.take();
        let without = || Error::new(ErrorKind::Internal, "QEMU without its output");
        let console = Console::of(output.ok_or_else(without)?)?;
        Ok(FilesMachine {
            process,
            console,
            server,
            port,
            disks,
            sessions,
            _scratch: scratch,
            _slot: slot,
        })
    }

    /// Checks that the machine and its disks are there. Call it while waiting.
    ///
    /// # Errors
    /// `ToolFailed` if they are not; `Interrupted` if this program is asked to end.
    pub fn look_after(&mut self, caller: &Caller, signals: &mut ChildSignals) -> Result<()> {
        if signals.was_asked_to_end() {
            return Err(Error::new(ErrorKind::Interrupted, "interrupted"));
        }
        if let Some(status) = self.process.ended()? {
            return Err(end_error(status, &self.console, &self.process.last_messages(MESSAGES)));
        }
        self.server.look_after(caller, signals)
    }

    /// Ends it and discards its session.
    ///
    /// # Errors
    /// Those of the session.
    pub fn end(mut self) -> Result<()> {
        let _ = self.process.child().kill();
        let _ = self.process.child().wait();
        let stopped = self.server.stop();
        for session in self.sessions.drain(..) {
            session.end()?;
        }
        stopped
    }
}

fn chosen<'a>(
    point: &'a PointDocument,
    only: &'a [DiskName],
) -> impl Iterator<Item = &'a DiskDocument> {
    point.disks.iter().filter(move |disk| only.is_empty() || only.contains(&disk.name))
}

fn installed_file(name: &str) -> Result<PathBuf> {
    installed::library(LIBRARIES, name).ok_or_else(|| {
        let text =
            format!("{name} is not installed: it belongs to the machine that reads file systems");
        Error::new(ErrorKind::ToolFailed, text)
            .advise("the Debian package has it; in the source folder make files-image builds it")
    })
}

fn check_disks(point: &PointDocument, only: &[DiskName], count: usize) -> Result<()> {
    let is_unknown = |name: &&DiskName| point.disks.iter().all(|disk| disk.name != **name);
    if let Some(name) = only.iter().find(is_unknown) {
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
        let text = format!(
            "{count} disks are too many at once: name some, as in MACHINE/POINT/vda,vdb:/PATH"
        );
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    if installed_program(qemu::PROGRAM).is_none() {
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

fn arguments(image: &[PathBuf; 2], disks: usize, is_selecting: bool) -> Vec<OsString> {
    // The last word is a setting of our init.
    let disks = match is_selecting {
        true => "select=1".to_owned(),
        false => format!("disks={disks}"),
    };
    let accelerator = match kvm_works() {
        Ok(()) => "kvm",
        Err(_) => "tcg,tb-size=128",
    };
    // In QEMU's own folder.
    let port = MachineSocket::Port.name();
    let words = [
        ["-accel", accelerator],
        ["-cpu", "max,erms=off"],
        ["-m", &MEMORY_MIB.to_string()],
        ["-machine", "pc,usb=off"],
        ["-display", "none"],
        ["-chardev", "stdio,id=console,signal=off"],
        ["-serial", "chardev:console"],
        ["-monitor", "none"],
        ["-append", &format!("{KERNEL_ARGUMENTS} {disks}")],
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
