//! The sequence of a backup of a domain that is off.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::ScratchSpace;
use coldrise_hypervisors::libvirt::{
    Domain, DomainState, LiveDomain, PATIENCE, PartFiles, is_named_by_another,
};
use coldrise_ingest::{ImageFormat, ImageServer, LiveBitmap, Location, MachineImage, SourceSpec};
use coldrise_store::{Configuration, LIBVIRT_XML, PointName};

use super::checkpoints::{CheckpointNames, Checkpoints};
use super::disks::{DomainDisk, choose};
use super::parts::PartsBefore;
use super::running::left_out;
use super::stillness::Stillness;
use super::{DomainOptions, connect};
use crate::{Instant, LiveMachine, Mode, Since, nbd_uri};

/// A domain that is off.
pub(super) struct StoppedDomain {
    options: DomainOptions,
    uuid: String,
    taken: Option<Taken>,
    still: Option<Stillness>,
}

/// What was prepared for one backup.
struct Taken {
    /// The name of the new bitmaps.
    new: String,
    disks: Vec<TakenDisk>,
    /// The exports of the images.
    servers: Vec<ImageServer>,
    /// Has the lock of the domain until the bitmaps are in order.
    space: ScratchSpace,
}

struct TakenDisk {
    disk: DomainDisk,
    image: MachineImage,
    /// The backup from which a bitmap of the image counts; `None`: all is read.
    base: Option<PointName>,
    /// The name of that bitmap.
    old: Option<String>,
    /// Whether the new bitmap is in the image.
    has_new: bool,
}

impl StoppedDomain {
    pub(super) fn new(options: DomainOptions, uuid: String) -> StoppedDomain {
        StoppedDomain { options, uuid, taken: None, still: None }
    }
}

impl LiveMachine for StoppedDomain {
    fn take(&mut self, since: &Since<'_>, cancel: &AtomicBool) -> Result<Instant> {
        let virsh = self.options.virsh.clone();
        // Of a killed backup.
        virsh.host().remove_abandoned(self.options.scratch.as_deref())?;
        let space = ScratchSpace::new(virsh.host(), self.options.scratch.as_deref(), None)?;
        lock(&space, &self.uuid)?;
        let dump = |more: &[&str]| {
            virsh.run(&[&["dumpxml", &*self.uuid, "--inactive"], more].concat(), PATIENCE)
        };
        let text = dump(&[])?;
        let defined = LiveDomain::parse(&text)?;
        let files = PartFiles::of(virsh.uri(), &self.uuid, &text)?;
        let text = dump(&["--migratable"])?;
        let configuration = Configuration { format: LIBVIRT_XML.to_owned(), text };
        let (disks, others) = choose(&defined, &virsh, &self.uuid, &self.options.picks)?;
        let mut remarks = left_out(&defined, &others);
        let names = CheckpointNames::new(since.repository().id(), &since.series());
        let new = names.name(since.next());
        let mut taken = Taken { new, disks: Vec::new(), servers: Vec::new(), space };
        for disk in disks {
            let image = inspect(&taken.space, &disk, cancel)?;
            let base = since.base(Mode::Pull, &disk.name, disk.size_bytes)?;
            let base = base.filter(|base| image.has_whole_bitmap(&names.name(base)));
            if base.is_none() {
                remarks.extend(disk.full_read_remark(since));
            }
            let old = base.as_ref().map(|base| names.name(base));
            taken.disks.push(TakenDisk { disk, image, base, old, has_new: false });
        }
        let kept = taken.disks.iter().filter(|taken| taken.disk.keeps_checkpoints());
        if let Some(base) = kept.map(|taken| taken.base.as_ref()).min() {
            let checkpoints = Checkpoints { virsh: &virsh, uuid: &self.uuid, names: &names };
            let known = checkpoints.known().ok();
            let remark = known
                .and_then(|known| checkpoints.snapshot_remark(&known, &self.options.domain, base));
            remarks.extend(remark);
        }
        // Nothing changes them while the machine is off, which is proven at the end.
        let parts =
            PartsBefore::read(virsh.host(), files).after_instant(&taken.space, &mut remarks);
        let taken = self.taken.insert(taken);
        let offered = taken.prepare(&names, &mut remarks).and_then(|()| {
            let files: BTreeSet<_> =
                taken.disks.iter().flat_map(|taken| taken.image.files()).collect();
            let files = files.into_iter().collect();
            self.still = Some(Stillness::begin(&virsh, &self.uuid, &taken.space, files)?);
            taken.offer(&self.options.domain)
        });
        let sources = offered.map_err(|error| match self.close(false) {
            Ok(()) => error,
            Err(left) => error.context(left.message()),
        })?;
        Ok(Instant {
            sources,
            standstill: None,
            is_quiesced: false,
            is_off: true,
            remarks,
            configuration: Some(configuration),
            parts,
        })
    }

    fn uuid(&self) -> Option<&str> {
        Some(&self.uuid)
    }

    fn is_named_by_another(&self, name: &str) -> Result<bool> {
        is_named_by_another(&self.options.virsh, &self.uuid, name)
    }

    fn stillness(&self) -> Option<&Stillness> {
        self.still.as_ref()
    }

    fn again(&self) -> Result<Option<Box<dyn LiveMachine>>> {
        let is_broken = self.still.as_ref().is_some_and(|still| still.broken().is_some());
        let state = Domain::new(&self.options.virsh, &*self.uuid).state()?;
        match is_broken || state != DomainState::Off {
            true => connect(self.options.clone()).map(Some),
            false => Ok(None),
        }
    }

    fn is_running(&self) -> bool {
        false
    }

    fn close(&mut self, is_stored: bool) -> Result<()> {
        let Some(mut taken) = self.taken.take() else { return Ok(()) };
        taken.servers.clear();
        let mut left = Ok(());
        for TakenDisk { image, old, has_new, .. } in &taken.disks {
            let unused = match is_stored {
                true => old.as_ref(),
                false => Some(&taken.new).filter(|_| *has_new),
            };
            match unused.map(|name| image.remove_bitmap(&taken.space, name)) {
                // The machine was started: the backup of the running machine removes it.
                Some(Err(error)) if error.kind() != ErrorKind::Busy => left = Err(error),
                _ => {}
            }
        }
        left.map_err(|error| error.context("a bitmap is left; the next backup removes it"))
    }
}

impl Taken {
    /// Removes the bitmaps that a killed backup left, and adds the new ones.
    ///
    /// # Errors
    /// `Busy` if a program has an image open for writing.
    fn prepare(&mut self, names: &CheckpointNames, remarks: &mut Vec<String>) -> Result<()> {
        for taken in self.disks.iter_mut().filter(|taken| taken.disk.keeps_checkpoints()) {
            let is_left = |name: &&str| names.is_ours(name) && Some(*name) != taken.old.as_deref();
            let mut left = taken.image.bitmaps().filter(is_left);
            let added = left
                .try_for_each(|name| taken.image.remove_bitmap(&self.space, name))
                .and_then(|()| taken.image.add_bitmap(&self.space, &self.new));
            match added {
                Ok(()) => taken.has_new = true,
                Err(error) if error.kind() == ErrorKind::Busy => return Err(error),
                // A file system without space, or an image that this user may only read.
                Err(error) => remarks.push(format!(
                    "{}: the next backup reads everything: {}",
                    taken.disk.name,
                    error.full_message()
                )),
            }
        }
        Ok(())
    }

    /// Offers the images for reading, with the bitmaps that count from the latest backup.
    ///
    /// # Errors
    /// `ToolFailed` with QEMU's reason; errors of the connection.
    fn offer(&mut self, domain: &str) -> Result<Vec<SourceSpec>> {
        let mut sources = Vec::with_capacity(self.disks.len());
        for (index, taken) in self.disks.iter().enumerate() {
            let TakenDisk { disk, image, base, old, .. } = taken;
            let socket = format!("nbd{index}");
            let (server, way) = image.serve(&self.space, &socket, old.as_deref())?;
            self.servers.push(server);
            let bitmap = base.clone().zip(old.clone());
            let bitmap =
                bitmap.map(|(since, name)| LiveBitmap { name, since, is_whole_disk: true });
            let (uri, name) = (nbd_uri(&way, ""), format!("libvirt:{domain} {}", disk.target));
            let location = Location::Live { uri, name, bitmap, has_late_status: false };
            sources.push(SourceSpec { disk: disk.name.clone(), location });
        }
        Ok(sources)
    }
}

/// Two backups of a domain that is off would change its images under each other: one at a time, of whatever
/// repository and server.
fn lock(space: &ScratchSpace, uuid: &str) -> Result<()> {
    space.claim(&format!("coldrise-backup-of-{uuid}")).map_err(|error| match error.kind() {
        ErrorKind::Busy => {
            let text = "another process is backing up this machine";
            Error::new(ErrorKind::Busy, text).advise("wait for its end")
        }
        _ => error,
    })
}

fn inspect(space: &ScratchSpace, disk: &DomainDisk, cancel: &AtomicBool) -> Result<MachineImage> {
    let unreadable = |why: String| {
        let text = format!("disk {} cannot be read while the machine is off: {why}", disk.target);
        Error::new(ErrorKind::Unsupported, text).advise("start the machine: then QEMU reads it")
    };
    let word = if disk.format == "vpc" { "vhd" } else { &*disk.format };
    let format = ImageFormat::from_word(word)
        .ok_or_else(|| unreadable(format!("its format is {}", disk.format)))?;
    let path = disk.file.as_ref().ok_or_else(|| {
        unreadable("it is not an unencrypted file or block device of this host".to_owned())
    })?;
    MachineImage::inspect(space, path, format, true, cancel).map_err(|error| {
        let is_denied = error.full_message().contains("ermission denied");
        let error = error.context(format!("disk {} of a machine that is off", disk.target));
        match is_denied {
            true => error.advise(
                "run the command as root, or give its user the right to read and write the image (setfacl -m u:USER:rw IMAGE)",
            ),
            false => error,
        }
    })
}

impl Drop for StoppedDomain {
    fn drop(&mut self) {
        if let Err(error) = self.close(false) {
            tracing::warn!("{}", error.full_message());
        }
    }
}
