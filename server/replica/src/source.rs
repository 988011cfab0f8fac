//! The repository from which points are copied: on this host, or in a bucket.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Disk, Result};
use coldrise_inventory::{Range, changed_ranges};
use coldrise_session::{CarriedFiles, Catalog, ReadLease, boot_trace, open_point_disk};
use coldrise_store::{ClockGuard, DiskName, MachineName, PointDocument, Repository, RepositoryId};

/// The program's name in leases, for people.
const PROGRAM: &str = "copy";

/// The repository from which points are copied.
pub trait CopySource: Sync {
    /// The repository.
    fn id(&self) -> RepositoryId;

    /// Its machines, in the order of their names.
    ///
    /// # Errors
    /// Errors of reading its catalog.
    fn machines(&self) -> Result<Vec<MachineName>>;

    /// Checks that a machine has a point.
    ///
    /// # Errors
    /// `NotFound`, naming the machines that there are; errors of reading its catalog.
    fn check_machine(&self, machine: &MachineName) -> Result<()>;

    /// The points of a machine, oldest first.
    ///
    /// # Errors
    /// Errors of reading its catalog.
    fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>>;

    /// Up to when the points of a machine count for `latest`.
    ///
    /// # Errors
    /// Errors of reading its catalog.
    fn clock_guard(&self, machine: &MachineName) -> Result<ClockGuard>;

    /// Protects the data of a point until the result is dropped, and brings its document up to date.
    ///
    /// # Errors
    /// `NotFound` if it is not there any more.
    fn hold(&self, point: &mut PointDocument) -> Result<Box<dyn Any>>;

    /// A disk of a point that is held.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`.
    fn disk(&self, point: &PointDocument, name: &DiskName) -> Result<Arc<dyn Disk>>;

    /// Where a disk of `point` may differ from that of `base`, ascending. Both are held.
    ///
    /// # Errors
    /// `Corrupt`; `Interrupted` once `cancel` is set.
    fn changed(
        &self,
        base: &PointDocument,
        point: &PointDocument,
        name: &DiskName,
        cancel: &AtomicBool,
    ) -> Result<Vec<Range>>;

    /// The files that a point carries.
    ///
    /// # Errors
    /// `Corrupt`.
    fn files(&self, point: &PointDocument) -> Result<CarriedFiles>;

    /// The boot trace of the machine.
    fn boot_trace(&self, _machine: &MachineName) -> Option<Vec<u8>> {
        None
    }
}

impl CopySource for Arc<Repository> {
    fn id(&self) -> RepositoryId {
        *Repository::id(self)
    }

    fn machines(&self) -> Result<Vec<MachineName>> {
        Catalog::new(self).machines()
    }

    fn check_machine(&self, machine: &MachineName) -> Result<()> {
        Catalog::new(self).check_machine(machine)
    }

    fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        Catalog::new(self).points(machine)
    }

    fn clock_guard(&self, machine: &MachineName) -> Result<ClockGuard> {
        Repository::clock_guard(self, machine)
    }

    fn hold(&self, point: &mut PointDocument) -> Result<Box<dyn Any>> {
        Ok(Box::new(ReadLease::point(self, PROGRAM, point)?))
    }

    fn disk(&self, point: &PointDocument, name: &DiskName) -> Result<Arc<dyn Disk>> {
        open_point_disk(self, point, name)
    }

    fn changed(
        &self,
        base: &PointDocument,
        point: &PointDocument,
        name: &DiskName,
        cancel: &AtomicBool,
    ) -> Result<Vec<Range>> {
        changed_ranges(self, base, point, name, cancel)
    }

    fn files(&self, point: &PointDocument) -> Result<CarriedFiles> {
        Catalog::new(self).files(point)
    }

    fn boot_trace(&self, machine: &MachineName) -> Option<Vec<u8>> {
        boot_trace(self, machine)
    }
}
