//! One boot of a point on a throwaway session, and its stored result.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result, ScratchFolder, ScratchKind};
use coldrise_inventory::QEMU_BYTES;
use coldrise_session::{Catalog, SessionDocument};
use coldrise_store::{BootCheckDocument, BootVerdict, PointDocument, ReachedStage, Repository};

use super::machine::Machine;
use super::stages::{BootStage, Reached};
use super::throwaway;
use super::watch::{Findings, Goal, watch};
use crate::caller::Caller;
use crate::disk_server::{DiskServer, Protocol};
use crate::place::QemuPlace;
use crate::qemu::{self, Console};
use crate::qemu_host::QemuHost;
use crate::signals::ChildSignals;
use crate::tpm::Tpm;
use crate::uefi;
use coldrise_block::now_ms;
use coldrise_block::units::{show_count, show_size};
use coldrise_inventory::Hardware;

/// Memory for decoded chunks: a boot reads little twice.
const CACHE_BYTES: u64 = 64 << 20;
/// This number of earlier checks determines what is usual for a machine.
const USUAL_CHECKS: usize = 5;

/// A boot that is about to happen.
pub struct Trial<'a> {
    /// The command that checks.
    pub caller: &'a Caller,
    /// The repository of the point.
    pub repository: &'a Arc<Repository>,
    /// The host that runs the machine.
    pub qemu: &'a QemuHost,
    /// The point that is booted.
    pub point: &'a PointDocument,
    /// The virtual hardware.
    pub hardware: Hardware,
    /// The goal of the machine.
    pub goal: Goal,
    /// Tells boots of one machine apart that run side by side.
    pub slot: Option<usize>,
    /// Called for each stage that the machine reaches.
    pub on_stage: &'a (dyn Fn(&Reached) + Sync),
}

/// The memory that QEMU's host needs for one such machine, in bytes.
pub fn needed_bytes(hardware: &Hardware) -> u64 {
    (hardware.memory_mib << 20).saturating_add(QEMU_BYTES)
}

/// Checks that `count` such machines fit into the host's memory. A machine that the kernel kills
/// for its memory says nothing about the backup.
///
/// # Errors
/// `Incomplete` if they do not fit now; errors of the connection.
pub fn check_memory(qemu: &QemuHost, hardware: &Hardware, count: u64) -> Result<()> {
    match lacking_memory(qemu, hardware, count)? {
        Some(text) => Err(Error::new(ErrorKind::Incomplete, format!("not checked: {text}"))),
        None => Ok(()),
    }
}

/// The reason, if `count` such machines do not fit into the host's memory now.
///
/// # Errors
/// Errors of the connection.
pub fn lacking_memory(qemu: &QemuHost, hardware: &Hardware, count: u64) -> Result<Option<String>> {
    let needed = needed_bytes(hardware).saturating_mul(count);
    let available = qemu.available_bytes()?.filter(|available| *available < needed);
    Ok(available.map(|available| {
        format!(
        "{}{} needs {} of memory and {} are available now: try again later, or give it less with \
         --memory",
        qemu.prefix(),
        show_count(count, "machine"),
        show_size(needed),
        show_size(available)
    )
    }))
}

impl Trial<'_> {
    /// Boots the machine until there is a verdict, and stores the result with the point. Returns
    /// it with the last picture of the screen.
    ///
    /// # Errors
    /// `Incomplete` if this host has too little memory now; `Busy` if another check of the machine
    /// runs; `Interrupted`; `ToolFailed` if QEMU or the server of the disks ends. None of them says
    /// anything about the point.
    pub fn run(&self, signals: &mut ChildSignals) -> Result<(BootCheckDocument, Option<Vec<u8>>)> {
        check_memory(self.qemu, &self.hardware, 1)?;
        let (repository, point) = (self.repository, self.point);
        let session = throwaway::publish(repository, point, self.slot, signals)?;
        let found = self.boot(signals, session.document()).map(|findings| {
            let document = self.document(&findings);
            self.store(&document, findings.screenshot.as_deref());
            (document, findings.screenshot)
        });
        // However the boot ended, the session goes.
        let ended = session.end();
        let found = found?;
        ended?;
        Ok(found)
    }

    fn boot(&self, signals: &mut ChildSignals, session: &SessionDocument) -> Result<Findings> {
        let (caller, hardware) = (self.caller, &self.hardware);
        let scratch = ScratchFolder::new(ScratchKind::Check)?;
        let scratch = scratch.path();
        let mut server =
            DiskServer::start(Protocol::Nbd, caller, &[session], scratch, CACHE_BYTES, signals)?;
        // QEMU may change everything in its folder, but not the socket of the disks' server.
        let place = &QemuPlace::make(self.qemu, scratch)?;
        server.offer(place)?;
        let disks = session.disks.iter().map(|disk| server.node(&session.name, &disk.name));
        let flash = uefi::prepare(caller, self.repository, session, hardware, place)?;
        let (has_kvm, disks, flash) = (self.goal.has_kvm, disks.collect(), flash.as_ref());
        let mut words = qemu::arguments(hardware, has_kvm, Console::Observed, disks, false, flash);
        let tpm = Tpm::start(caller, session, place)?;
        words.extend(tpm.iter().flat_map(Tpm::words));
        caller.remark(&format!(
            "checking {}/{}: {}, {} MiB",
            session.machine,
            session.point,
            show_count(u64::from(hardware.cpus), "processor"),
            hardware.memory_mib
        ));
        let goal = &self.goal;
        let watched = Machine::start(caller, words, hardware, goal.forward, place, signals)
            .and_then(|mut machine| {
                watch(caller, &mut machine, &mut server, signals, goal, self.on_stage)
            });
        let was_asked_to_end = signals.was_asked_to_end();
        let stopped = server.stop();
        match watched {
            Ok(findings) => stopped.map(|()| findings),
            // Ctrl-C reaches the server, too, and its end may be seen first.
            Err(error) if was_asked_to_end && error.kind() != ErrorKind::Interrupted => {
                Err(Error::with_source(ErrorKind::Interrupted, "interrupted", error))
            }
            Err(error) => Err(error),
        }
    }

    fn document(&self, findings: &Findings) -> BootCheckDocument {
        let stage = |reached: &Reached| ReachedStage {
            stage: reached.stage.word().to_owned(),
            after_ms: reached.after_ms,
            evidence: reached.evidence.clone(),
        };
        let mut document = BootCheckDocument {
            checked_at_ms: now_ms(),
            verdict: findings.verdict,
            until: self.goal.until.word().to_owned(),
            stages: findings.stages.iter().map(stage).collect(),
            failure: findings.failure.clone(),
            note: findings.note.clone(),
            is_worse: false,
            usual_stage: None,
            screen_text: findings.screen_text.clone(),
            serial_tail: findings.serial_tail.clone(),
        };
        if document.verdict == BootVerdict::NotProven {
            let usual = self.usual_stage().unwrap_or_else(|error| {
                tracing::debug!("the earlier checks: {}", error.full_message());
                None
            });
            document.is_worse = usual > highest_stage(&document);
            document.usual_stage = usual.map(|stage| stage.word().to_owned());
        }
        document
    }

    /// The highest stage of the machine's last good checks of older points.
    fn usual_stage(&self) -> Result<Option<BootStage>> {
        let points = Catalog::new(self.repository).points(&self.point.machine)?;
        let older = points.iter().rev().filter(|point| point.point < self.point.point);
        let checks = older.filter_map(|point| {
            let stored = self.repository.boot_check(&point.machine, &point.point).ok().flatten();
            stored.map(|(check, _)| check).filter(|check| check.verdict == BootVerdict::Ok)
        });
        Ok(checks.take(USUAL_CHECKS).filter_map(|check| highest_stage(&check)).max())
    }

    /// Stores the result with the point. The verdict counts even if that fails.
    fn store(&self, document: &BootCheckDocument, picture: Option<&[u8]>) {
        let (machine, point) = (&self.point.machine, &self.point.point);
        if let Err(error) = self.repository.put_boot_check(machine, point, document, picture) {
            let text = format!("warning: the result is not stored: {}", error.full_message());
            self.caller.remark(&text);
        }
    }
}

/// The highest stage of a check.
pub fn highest_stage(check: &BootCheckDocument) -> Option<BootStage> {
    check.stages.iter().filter_map(|reached| BootStage::of_word(&reached.stage)).max()
}
