//! The sequence of a backup.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::ScratchSpace;
use coldrise_hypervisors::libvirt::{
    LiveDomain, PATIENCE, PartFiles, escaped, is_named_by_another,
};
use coldrise_hypervisors::virsh::Virsh;
use coldrise_ingest::{ImageFormat, ImageServer, LiveBitmap, Location, MachineImage, SourceSpec};
use coldrise_store::{Configuration, LIBVIRT_XML, PointName};

use super::checkpoints::{CheckpointNames, Checkpoints, Known, checkpoint_xml};
use super::disks::{DomainDisk, choose};
use super::freeze;
use super::job::{Job, is_in};
use super::parts::PartsBefore;
use crate::{DiskPick, Instant, LiveMachine, Mode, Since, nbd_uri};

/// The bitmap with the changes, in the exports and in the scratch files.
const CHANGED: &str = "changed";
/// libvirt's bitmaps mark parts of this size, in bytes.
const GRANULARITY_BYTES: u64 = 64 << 10;

/// The domain and how to back it up.
#[derive(Clone, Debug)]
pub(crate) struct DomainOptions {
    /// libvirt.
    pub(crate) virsh: Virsh,
    /// The domain's name or UUID.
    pub(crate) domain: String,
    /// The disks; empty: all that are writable.
    pub(crate) picks: Vec<DiskPick>,
    /// The folder of the scratch files. Default: that of the host.
    pub(crate) scratch: Option<PathBuf>,
    /// How the content leaves QEMU; disks with an iothread are pushed in any case.
    pub(crate) mode: Mode,
    /// Whether the guest's file systems are to be frozen for the instant.
    pub(crate) is_quiesced: bool,
}

/// A running domain. Dropping it removes everything of ours from libvirt.
pub(super) struct RunningDomain {
    options: DomainOptions,
    virsh: Virsh,
    uuid: String,
    taken: Option<Taken>,
}

/// Objects to remove from libvirt.
struct Taken {
    names: CheckpointNames,
    base: Option<PointName>,
    point: PointName,
    /// The exports of the copies that QEMU made (push).
    servers: Vec<ImageServer>,
    space: ScratchSpace,
}

/// A disk whose instant is to be taken.
struct TakenDisk {
    disk: DomainDisk,
    /// The backup from which the checkpoint counts; `None`: all is read.
    base: Option<PointName>,
    /// The checkpoint that counts from there.
    checkpoint: Option<String>,
}

impl RunningDomain {
    pub(super) fn new(options: DomainOptions, uuid: String) -> RunningDomain {
        RunningDomain { virsh: options.virsh.clone(), options, uuid, taken: None }
    }
}

impl LiveMachine for RunningDomain {
    fn take(&mut self, since: &Since<'_>, cancel: &AtomicBool) -> Result<Instant> {
        let uuid = &*self.uuid;
        let [job, text, migratable] = self.virsh.ask_all(
            [&["domjobinfo", uuid], &["dumpxml", uuid], &["dumpxml", uuid, "--migratable"]],
            PATIENCE,
        )?;
        let mut remarks = self.clear_leftovers(&job)?;
        let live = LiveDomain::parse(&text)?;
        let files = PartFiles::of(self.virsh.uri(), &self.uuid, &text)?;
        let configuration = Configuration { format: LIBVIRT_XML.to_owned(), text: migratable };
        let (disks, others) = choose(&live, &self.virsh, &self.uuid, &self.options.picks)?;
        remarks.extend(left_out(&live, &others));
        if live.has_iothreads() && self.options.mode == Mode::Pull {
            self.options.mode = Mode::Push;
            remarks.push(
                "a disk has an iothread: QEMU copies the disks into scratch files first".into(),
            );
        }
        let names = CheckpointNames::new(since.repository().id(), &since.series());
        let mut known = self.checkpoints(&names).known()?;
        let space =
            ScratchSpace::new(self.virsh.host(), self.options.scratch.as_deref(), live.group)?;
        if !since.is_round() || known.checkpoints.is_empty() {
            self.adopt_bitmaps(&names, &space, &disks, &mut known, cancel);
        }
        self.checkpoints(&names).delete_ended(&known, since)?;
        let disks = self.choose_checkpoints(since, &names, disks, &known, &mut remarks)?;
        let kept = disks.iter().filter(|taken| taken.disk.keeps_checkpoints());
        if let Some(base) = kept.map(|taken| taken.base.as_ref()).min() {
            let checkpoints = self.checkpoints(&names);
            remarks.extend(checkpoints.snapshot_remark(&known, &self.options.domain, base));
        }
        let cluster_bytes = GRANULARITY_BYTES.max(u64::from(since.repository().chunk_size_bytes()));
        let add = |disk: &DomainDisk, cluster_bytes, bitmap| {
            space.add(&file_name(disk), disk.size_bytes, cluster_bytes, bitmap)
        };
        for taken in &disks {
            // libvirt pushes whole clusters, so these are at least as large as a chunk.
            match self.options.mode {
                Mode::Pull => add(&taken.disk, GRANULARITY_BYTES, None)?,
                Mode::Push => add(&taken.disk, cluster_bytes, Some(CHANGED))?,
            }
        }
        let new = names.name(since.next());
        let words = self.documents(&space, &disks, &others, &new)?;
        let base = disks.iter().find_map(|taken| taken.base.clone());
        let folder = space.folder().to_owned();
        let before = (!since.is_round()).then(|| PartsBefore::read(self.virsh.host(), files));
        let (point, servers) = (since.next().clone(), Vec::new());
        self.taken = Some(Taken { names, base, point, servers, space });
        let begun = self.begin(&words, &folder, &mut remarks, cancel).and_then(|is_quiesced| {
            self.offered(&disks, cancel).map(|sources| (is_quiesced, sources))
        });
        let (is_quiesced, sources) = begun.map_err(|error| match self.close(false) {
            Ok(()) => error,
            // Both have one cause, such as a lost connection.
            Err(left) if left.message().ends_with(&error.message()) => left,
            Err(left) => error.context(left.message()),
        })?;
        let parts = match (&self.taken, before) {
            (Some(taken), Some(before)) => before.after_instant(&taken.space, &mut remarks),
            _ => Vec::new(),
        };
        Ok(Instant {
            sources,
            standstill: None,
            is_quiesced,
            is_off: false,
            remarks,
            configuration: Some(configuration),
            parts,
        })
    }

    fn uuid(&self) -> Option<&str> {
        Some(&self.uuid)
    }

    fn is_named_by_another(&self, name: &str) -> Result<bool> {
        is_named_by_another(&self.virsh, &self.uuid, name)
    }

    /// By `virsh domjobabort`, with the machine, or because its host cannot be asked any more.
    fn why_disks_are_lost(&self) -> Option<(String, &'static str)> {
        let is_read_live = self.options.mode == Mode::Pull;
        let taken = self.taken.as_ref().filter(|_| is_read_live)?;
        match self.job().is_of(taken.space.folder()) {
            Ok(true) => None,
            Err(error) if error.kind() != ErrorKind::ToolFailed => {
                Some((error.message(), "the machine was not changed: back up again"))
            }
            // Also if libvirt does not know the machine any more.
            Ok(false) | Err(_) => Some((
                "libvirt's backup job ended before everything was read".to_owned(),
                "the machine was shut off, or another program ended the job (such as virsh domjobabort): back up again",
            )),
        }
    }

    fn close(&mut self, is_stored: bool) -> Result<()> {
        let Some(mut taken) = self.taken.take() else { return Ok(()) };
        taken.servers.clear();
        let kept = if is_stored { Some(&taken.point) } else { taken.base.as_ref() };
        let kept = kept.map(|point| taken.names.name(point));
        let (folder, checkpoints) = (taken.space.folder(), self.checkpoints(&taken.names));
        // Both succeed while the job runs.
        let questions: [&[&str]; 2] = [&["backup-dumpxml", &self.uuid], &checkpoints.list_words()];
        let (is_running, listed) = match self.virsh.ask_all(questions, PATIENCE) {
            Ok([xml, listed]) => (Ok(is_in(&xml, folder)), Ok(checkpoints.ours(&listed))),
            Err(_) => (self.job().is_of(folder), checkpoints.listed()),
        };
        let ended = is_running.and_then(|is_running| self.job().end(folder, is_running));
        let kept = listed.and_then(|listed| checkpoints.keep_only(kept.as_ref(), &listed));
        ended.and(kept).map_err(|error| {
            let text = format!(
                "a backup job or a checkpoint may be left in domain {}; the next backup removes them",
                self.options.domain
            );
            error.context(text)
        })
    }
}

impl RunningDomain {
    /// Ends the job that a killed backup left, by the answer of domjobinfo, removes its files, and thaws the guest.
    fn clear_leftovers(&self, job: &str) -> Result<Vec<String>> {
        let mut remarks = Vec::new();
        if self.job().end_abandoned(job)? {
            remarks.push("ended the backup job that a killed backup left in libvirt".to_owned());
        }
        self.virsh.host().remove_abandoned(self.options.scratch.as_deref())?;
        if self.options.is_quiesced && freeze::thaw(&self.virsh, &self.uuid).is_ok_and(|was| was) {
            remarks.push("thawed the guest, which a killed backup left frozen".to_owned());
        }
        Ok(remarks)
    }

    fn job(&self) -> Job<'_> {
        Job { virsh: &self.virsh, uuid: &self.uuid }
    }

    fn checkpoints<'a>(&'a self, names: &'a CheckpointNames) -> Checkpoints<'a> {
        Checkpoints { virsh: &self.virsh, uuid: &self.uuid, names }
    }

    /// Makes known to libvirt the bitmaps of ours that were added while the domain was off; it then deletes those
    /// that are not needed. An image that cannot be looked at, such as one that this user may not read, has none.
    fn adopt_bitmaps(
        &self,
        names: &CheckpointNames,
        space: &ScratchSpace,
        disks: &[DomainDisk],
        known: &mut Known,
        cancel: &AtomicBool,
    ) {
        let mut found: BTreeMap<String, Vec<&DomainDisk>> = BTreeMap::new();
        for disk in disks.iter().filter(|disk| disk.keeps_checkpoints()) {
            let look =
                |file| MachineImage::inspect(space, file, ImageFormat::Qcow2, false, cancel).ok();
            for name in disk.file.as_deref().and_then(look).iter().flat_map(MachineImage::bitmaps) {
                found.entry(name.to_owned()).or_default().push(disk);
            }
        }
        self.checkpoints(names).adopt(&found, known);
    }

    /// Decides of which disks the checkpoint of the latest backup is believed.
    fn choose_checkpoints(
        &self,
        since: &Since<'_>,
        names: &CheckpointNames,
        disks: Vec<DomainDisk>,
        known: &Known,
        remarks: &mut Vec<String>,
    ) -> Result<Vec<TakenDisk>> {
        let mut taken = Vec::with_capacity(disks.len());
        for disk in disks {
            let base = since.base(self.options.mode, &disk.name, disk.size_bytes)?;
            let checkpoint = base.as_ref().map(|base| names.name(base));
            taken.push(TakenDisk { disk, base, checkpoint });
        }
        let base = taken.iter().find_map(|taken| taken.base.clone());
        let with_base = taken.iter().filter(|taken| taken.base.is_some());
        let with_base: Vec<DomainDisk> = with_base.map(|taken| taken.disk.clone()).collect();
        let checkpoints = self.checkpoints(names);
        let mut believed: BTreeSet<String> =
            checkpoints.choose(base.as_ref(), &with_base, &known.checkpoints)?;
        if let (true, Some((backups, point))) = (believed.is_empty(), since.backup()) {
            // It stays for the next backup.
            let name = CheckpointNames::new(since.repository().id(), &backups).name(point);
            if known.has(&name) {
                believed = checkpoints.covered(&name);
                taken.iter_mut().for_each(|taken| taken.checkpoint = Some(name.clone()));
            }
        }
        for taken in &mut taken {
            let disk = &taken.disk;
            if disk.keeps_checkpoints() && believed.contains(&disk.target) {
                continue;
            }
            (taken.base, taken.checkpoint) = (None, None);
            remarks.extend(disk.full_read_remark(since));
        }
        Ok(taken)
    }

    /// Writes what virsh reads. Returns virsh's words.
    fn documents(
        &self,
        space: &ScratchSpace,
        disks: &[TakenDisk],
        others: &[String],
        new: &str,
    ) -> Result<Vec<String>> {
        let is_push = self.options.mode == Mode::Push;
        let chosen: String = disks.iter().map(|taken| disk_xml(space, taken, is_push)).collect();
        let other = |target: &String| format!("<disk name='{}' backup='no'/>", escaped(target));
        let others_xml: String = others.iter().map(other).collect();
        let (mode, server) = match self.options.mode {
            Mode::Pull => {
                let socket = escaped(&space.socket().display().to_string());
                ("pull", format!("<server transport='unix' socket='{socket}'/>"))
            }
            Mode::Push => ("push", String::new()),
        };
        let backup = format!(
            "<domainbackup mode='{mode}'>{server}<disks>{chosen}{others_xml}</disks></domainbackup>"
        );
        let (keeping, without): (Vec<&TakenDisk>, Vec<&TakenDisk>) =
            disks.iter().partition(|taken| taken.disk.keeps_checkpoints());
        let mut words = vec!["backup-begin".to_owned(), self.uuid.clone()];
        words.push(space.write("backup.xml", &backup)?.display().to_string());
        if !keeping.is_empty() {
            let no = without.iter().map(|taken| taken.disk.target.clone());
            let no: Vec<String> = no.chain(others.iter().cloned()).collect();
            let yes = keeping.iter().map(|taken| &*taken.disk.target);
            let checkpoint = checkpoint_xml(new, yes, &no);
            words.push(space.write("checkpoint.xml", &checkpoint)?.display().to_string());
        }
        words.push("--reuse-external".to_owned());
        Ok(words)
    }

    /// Takes the instant. Returns whether the file systems were frozen.
    fn begin(
        &self,
        words: &[String],
        folder: &Path,
        remarks: &mut Vec<String>,
        cancel: &AtomicBool,
    ) -> Result<bool> {
        let guest = self.options.is_quiesced.then(|| freeze::freeze(&self.virsh, &self.uuid));
        let guest = guest.and_then(|frozen| {
            let why = |error: Error| {
                let why = error.full_message();
                remarks.push(format!("the guest's file systems are not frozen: {why}"));
            };
            frozen.map_err(why).ok()
        });
        let begun = self.virsh.run(words, PATIENCE);
        let thawed = guest.map_or(Ok(false), |guest| guest.thaw());
        let is_copied = |error: &Error| error.message().contains("blockjob");
        begun.map_err(|error| match error.message().contains("ermission denied") {
            _ if is_copied(&error) => error.advise(
                "another job copies its disks, such as coldrise move (coldrise sessions): wait until that has ended",
            ),
            true => error.advise(
                "QEMU opens files in the folder of --scratch: its user must be able to enter it, and AppArmor or SELinux, if \
                 there is one, must allow it",
            ),
            false => error,
        })?;
        let is_quiesced = thawed.unwrap_or_else(|error| {
            remarks.push(format!("warning: {}", error.full_message()));
            false
        });
        if self.options.mode == Mode::Push {
            self.job().wait(folder, cancel)?;
        }
        Ok(is_quiesced)
    }

    /// The disks for reading: QEMU's own exports (pull), or exports of the copies that it made (push).
    ///
    /// # Errors
    /// `ToolFailed` with QEMU's reason; errors of the connection.
    fn offered(&mut self, disks: &[TakenDisk], cancel: &AtomicBool) -> Result<Vec<SourceSpec>> {
        let Some(Taken { space, servers, .. }) = &mut self.taken else { return Ok(Vec::new()) };
        let is_whole_disk = self.options.mode == Mode::Pull;
        let own = is_whole_disk.then(|| space.host().reach(&space.socket())).transpose()?;
        let mut sources = Vec::with_capacity(disks.len());
        for (index, TakenDisk { disk, base, .. }) in disks.iter().enumerate() {
            let uri = match &own {
                Some(way) => nbd_uri(way, &disk.target),
                None => {
                    let (file, format) = (space.file(&file_name(disk)), ImageFormat::Qcow2);
                    let copy = MachineImage::inspect(space, &file, format, false, cancel)?;
                    let bitmap = base.as_ref().map(|_| CHANGED);
                    let (server, way) = copy.serve(space, &format!("nbd{index}"), bitmap)?;
                    servers.push(server);
                    nbd_uri(&way, "")
                }
            };
            let changed = |since| LiveBitmap { name: CHANGED.to_owned(), since, is_whole_disk };
            let (domain, bitmap) = (&self.options.domain, base.clone().map(changed));
            let name = format!("libvirt:{domain} {}", disk.target);
            let location = Location::Live { uri, name, bitmap, has_late_status: false };
            sources.push(SourceSpec { disk: disk.name.clone(), location });
        }
        Ok(sources)
    }
}

impl Drop for RunningDomain {
    fn drop(&mut self) {
        if let Err(error) = self.close(false) {
            tracing::warn!("{}", error.full_message());
        }
    }
}

/// The name of a disk's scratch file.
fn file_name(disk: &DomainDisk) -> String {
    format!("disk-{}", disk.name)
}

/// Remarks on the writable disks that are not chosen.
pub(super) fn left_out(domain: &LiveDomain, others: &[String]) -> Vec<String> {
    let left_out = others.iter().filter(|target| domain.is_writable(target));
    left_out.map(|target| format!("disk {target} of the machine is not backed up")).collect()
}

/// A disk of the backup's document.
fn disk_xml(space: &ScratchSpace, taken: &TakenDisk, is_push: bool) -> String {
    let target = escaped(&taken.disk.target);
    let file = escaped(&space.file(&file_name(&taken.disk)).display().to_string());
    let mut attributes = match &taken.checkpoint {
        Some(base) => format!("backupmode='incremental' incremental='{base}'"),
        None => "backupmode='full'".to_owned(),
    };
    let kind = if is_push { "target" } else { "scratch" };
    if !is_push {
        attributes.push_str(&format!(" exportname='{target}'"));
        if taken.base.is_some() {
            attributes.push_str(&format!(" exportbitmap='{CHANGED}'"));
        }
    }
    format!(
        "<disk name='{target}' backup='yes' type='file' {attributes}><driver type='qcow2'/><{kind} \
         file='{file}'/></disk>"
    )
}
