//! A machine in a QEMU whose monitor we have.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use coldrise_block::{
    Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind, remove_abandoned_folders,
};
use coldrise_ingest::{LiveBitmap, Location, SourceSpec};
use coldrise_store::PointName;
use serde_json::{Value, json};

use super::bitmaps::BitmapNames;
use super::disks::{self, LiveDisk};
use super::monitor::{OURS, Qemu};
use super::scratch::Description;
use super::{leftovers, pull, push, scratch};
use crate::frozen_guest::{self, FrozenGuest};
use crate::{DiskPick, Instant, LiveMachine, Mode, Since, nbd_uri};

/// The first QEMU with filters that break the backup instead of the guest.
const OLDEST: (u64, u64) = (7, 1);

/// The machine and how to back it up.
#[derive(Clone, Debug)]
pub(crate) struct MachineOptions {
    /// QEMU's monitor.
    pub(crate) socket: PathBuf,
    /// The disks; empty: all that are writable.
    pub(crate) picks: Vec<DiskPick>,
    /// The folder of the scratch files.
    pub(crate) scratch: PathBuf,
    /// How the content leaves QEMU.
    pub(crate) mode: Mode,
    /// The guest agent's socket, if the guest's file systems are to be frozen for the instant.
    pub(crate) agent: Option<PathBuf>,
}

/// A machine in a QEMU. Dropping it removes everything of ours from QEMU.
pub(crate) struct RunningMachine {
    options: MachineOptions,
    qemu: Qemu,
    taken: Option<Taken>,
}

/// Objects to remove from QEMU.
struct Taken {
    names: BitmapNames,
    point: PointName,
    disks: Vec<TakenDisk>,
    /// The scratch files.
    files: Vec<File>,
    /// The folder of the socket.
    _folder: ScratchFolder,
}

/// A disk whose instant is taken.
pub(super) struct TakenDisk {
    pub(super) live: LiveDisk,
    /// The backup from which `old` counts.
    base: Option<PointName>,
    /// The bitmap with the changes since then; `None`: all is read.
    pub(super) old: Option<String>,
    pub(super) new: String,
}

impl TakenDisk {
    /// How much a push copies, at most.
    pub(super) fn copied_bytes(&self) -> u64 {
        let is_old = |name: &String| Some(name) == self.old.as_ref();
        let bitmap = self.live.bitmaps.iter().find(|bitmap| is_old(&bitmap.name));
        bitmap.map_or(self.live.size_bytes, |bitmap| bitmap.dirty_bytes)
    }
}

impl RunningMachine {
    /// Connects to the monitor. Changes nothing.
    ///
    /// # Errors
    /// `Unsupported` for a QEMU that is too old; otherwise as for a failed connection.
    pub(crate) fn connect(options: MachineOptions) -> Result<RunningMachine> {
        let mut qemu = Qemu::connect(&options.socket)?;
        let (major, minor) = qemu.version()?;
        if (major, minor) < OLDEST {
            let text = format!("QEMU {major}.{minor} cannot back up a running machine safely");
            return Err(Error::new(ErrorKind::Unsupported, text).advise("use QEMU 7.1 or newer"));
        }
        Ok(RunningMachine { options, qemu, taken: None })
    }
}

impl LiveMachine for RunningMachine {
    fn take(&mut self, since: &Since<'_>, cancel: &AtomicBool) -> Result<Instant> {
        let mut remarks = self.clear_leftovers()?;
        let names =
            BitmapNames::new(since.repository().id(), &since.series(), since.granularity_bytes());
        let (live, others) = disks::find(&mut self.qemu, &self.options.picks)?;
        let unnamed =
            others.iter().map(|name| format!("disk {name} of the machine is not backed up"));
        remarks.extend(unnamed);
        match self.options.mode {
            Mode::Pull => {
                disks::check_iothreads(&mut self.qemu, &live)?;
                scratch::check_space(&self.options.scratch, &live)?;
            }
            Mode::Push => {}
        }
        let folder = ScratchFolder::new(ScratchKind::Backup)?;
        let mut disks = Vec::with_capacity(live.len());
        for live in live {
            disks.push(self.choose_bitmap(since, &names, live, &mut remarks)?);
        }
        let point = since.next().clone();
        let taken = Taken { names, point, disks, files: Vec::new(), _folder: folder };
        let socket = taken._folder.path().join("nbd");
        self.taken = Some(taken);
        self.open(&socket, remarks, cancel).map_err(|error| match self.close(false) {
            Ok(()) => error,
            Err(left) => error.context(left.message()),
        })
    }

    fn close(&mut self, is_stored: bool) -> Result<()> {
        let Some(taken) = self.taken.take() else { return Ok(()) };
        let Err(error) = self.remove(&taken, is_stored) else { return Ok(()) };
        // The connection may have ended meanwhile; otherwise the first error says more.
        let closed = match self.qemu.connect_again() {
            Ok(()) => self.remove(&taken, is_stored),
            Err(again) if again.kind() == ErrorKind::ToolFailed => Err(error),
            Err(_) => {
                let text = format!("the QEMU at {} has ended", self.qemu.socket().display());
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
        };
        closed.map_err(|error| {
            let text = format!(
                "objects of this backup may be left in QEMU ({}); the next backup removes them",
                self.qemu.socket().display()
            );
            error.context(text)
        })
    }
}

impl RunningMachine {
    /// Removes what a killed backup left, and thaws the guest.
    fn clear_leftovers(&mut self) -> Result<Vec<String>> {
        let mut remarks = Vec::new();
        leftovers::check_others(&mut self.qemu)?;
        remove_abandoned_folders();
        let removed = leftovers::clear(&mut self.qemu)?;
        if !removed.is_empty() {
            let text = format!("removed what a killed backup left in QEMU: {}", removed.join(", "));
            remarks.push(text);
        }
        if let Some(socket) = &self.options.agent {
            match frozen_guest::thaw_leftover(socket) {
                Ok(true) => {
                    remarks.push("thawed the guest, which a killed backup left frozen".into())
                }
                Ok(false) => {}
                // Said when freezing fails.
                Err(error) => tracing::debug!("{}", error.full_message()),
            }
        }
        Ok(remarks)
    }

    /// Decides which bitmap is believed, and brings the bitmaps in order.
    fn choose_bitmap(
        &mut self,
        since: &Since<'_>,
        names: &BitmapNames,
        live: LiveDisk,
        remarks: &mut Vec<String>,
    ) -> Result<TakenDisk> {
        let base = since.base(self.options.mode, &live.name, live.size_bytes)?;
        let choice = names.choose(&live, base.as_ref());
        let mut actions = choice.actions();
        actions.extend(BitmapNames::ended(since.repository().id(), &live, since)?);
        let mut old = choice.believed;
        if let (None, Some((backups, point))) = (&old, since.backup()) {
            let backups = BitmapNames::new(since.repository().id(), &backups, 0);
            let copied = names.name(&live.name, point);
            let copy = backups.copy(&live, point, &copied, names.granularity_bytes);
            old = (!copy.is_empty()).then_some(copied);
            actions.extend(copy);
        }
        self.qemu.transaction(actions)?;
        if let (None, Some(state)) = (&old, since.expected()) {
            remarks.push(format!(
                "{}: no dirty bitmap counts from {state}: everything is read",
                live.name
            ));
        }
        let new = names.name(&live.name, since.next());
        Ok(TakenDisk { live, base, old, new })
    }

    /// Scratch files, the instant, exports.
    fn open(
        &mut self,
        socket: &std::path::Path,
        mut remarks: Vec<String>,
        cancel: &AtomicBool,
    ) -> Result<Instant> {
        let Some(taken) = &mut self.taken else {
            return Err(Error::new(ErrorKind::Internal, "no disks"));
        };
        let qemu = &mut self.qemu;
        let is_running = qemu.status()? == "running";
        let mut names = Vec::new();
        for (index, disk) in taken.disks.iter().enumerate() {
            let (file, name) = add_scratch(qemu, &self.options, index, disk, is_running)?;
            taken.files.push(file);
            names.push(name);
        }
        let guest = self.options.agent.as_ref().and_then(|socket| {
            frozen_guest::freeze(socket)
                .map_err(|error| {
                    let why = error.full_message();
                    remarks.push(format!("the guest's file systems are not frozen: {why}"));
                })
                .ok()
        });
        let granularity_bytes = taken.names.granularity_bytes;
        let instant = match self.options.mode {
            Mode::Pull => pull::take(qemu, &taken.disks, granularity_bytes, is_running),
            Mode::Push => push::take(qemu, &taken.disks, granularity_bytes).map(|()| None),
        };
        let thawed = guest.map_or(Ok(false), FrozenGuest::thaw);
        let standstill: Option<Duration> = instant?;
        let is_quiesced = thawed.unwrap_or_else(|error| {
            remarks.push(format!("warning: {}", error.full_message()));
            false
        });
        if self.options.mode == Mode::Push {
            push::finish_copies(qemu, &taken.disks, &names, cancel)?;
        }
        let sources = export(qemu, &self.options, taken, socket)?;
        Ok(Instant {
            sources,
            standstill,
            is_quiesced,
            is_off: false,
            remarks,
            configuration: None,
            parts: Vec::new(),
        })
    }

    fn remove(&mut self, taken: &Taken, is_stored: bool) -> Result<()> {
        leftovers::clear(&mut self.qemu)?;
        for file in &taken.files {
            // While the machine is paused, QEMU keeps the file open. Its space is free at once.
            file.set_len(0).context(|| "emptying a scratch file")?;
        }
        let (live, _) = disks::find(&mut self.qemu, &self.options.picks)?;
        let mut actions = Vec::new();
        for live in live {
            let disk = taken.disks.iter().find(|disk| disk.live.node == live.node);
            let Some(disk) = disk else { continue };
            let base = if is_stored { Some(&taken.point) } else { disk.base.as_ref() };
            let live = LiveDisk { name: disk.live.name.clone(), ..live };
            actions.extend(taken.names.choose(&live, base).actions());
        }
        self.qemu.transaction(actions)
    }
}

impl Drop for RunningMachine {
    fn drop(&mut self) {
        if let Err(error) = self.close(false) {
            tracing::warn!("{}", error.full_message());
        }
    }
}

/// Adds the scratch image of a disk. Returns its file, and the name by which QEMU opens it.
fn add_scratch(
    qemu: &mut Qemu,
    options: &MachineOptions,
    index: usize,
    disk: &TakenDisk,
    is_running: bool,
) -> Result<(File, String)> {
    let folder = &options.scratch;
    let file = scratch::create(folder)?;
    let description = Description::new(index, &disk.live, is_running);
    if options.mode == Mode::Pull {
        let what = || format!("making a scratch file in {}", folder.display());
        file.set_len(disk.live.size_bytes).context(what)?;
    }
    let name = scratch::hand_over(qemu, &file, &description)?;
    match options.mode {
        Mode::Pull => pull::add_scratch(qemu, index, &name)?,
        Mode::Push => push::add_scratch(qemu, index, disk, &file, folder, &name)?,
    }
    Ok((file, name))
}

/// Exports all disks on a socket of ours.
fn export(
    qemu: &mut Qemu,
    options: &MachineOptions,
    taken: &Taken,
    socket: &std::path::Path,
) -> Result<Vec<SourceSpec>> {
    let listener = UnixListener::bind(socket).context(|| format!("making {}", socket.display()))?;
    let mut nodes = Vec::new();
    for index in 0..taken.disks.len() {
        nodes.push(match options.mode {
            Mode::Pull => pull::add_access(qemu, index)?,
            Mode::Push => leftovers::scratch(index),
        });
    }
    let file = format!("{OURS}listener");
    qemu.ask_with_file("getfd", json!({ "fdname": file }), listener.as_fd())?;
    let address = json!({ "addr": { "type": "fd", "data": { "str": file } } });
    qemu.ask("nbd-server-start", address).map_err(|error| {
        error.advise("QEMU has only one NBD server: if another program uses it, end that first")
    })?;
    let is_whole_disk = options.mode == Mode::Pull;
    let mut sources = Vec::new();
    for (index, (disk, node)) in taken.disks.iter().zip(nodes).enumerate() {
        let bitmaps: Vec<Value> =
            disk.old.iter().map(|old| json!({ "node": disk.live.node, "name": old })).collect();
        let arguments = json!({
            "id": leftovers::export(index),
            "type": "nbd",
            "node-name": node,
            "name": disk.live.name.as_str(),
            "bitmaps": bitmaps,
        });
        qemu.ask("block-export-add", arguments)?;
        sources.push(SourceSpec {
            disk: disk.live.name.clone(),
            location: Location::Live {
                uri: nbd_uri(socket, disk.live.name.as_str()),
                name: format!("qmp:{} {}", options.socket.display(), disk.live.node),
                has_late_status: options.mode == Mode::Pull,
                bitmap: disk.old.clone().zip(disk.base.clone()).map(|(name, since)| LiveBitmap {
                    name,
                    since,
                    is_whole_disk,
                }),
            },
        });
    }
    Ok(sources)
}
