//! A bucket as the place to which points are copied, and as the one from which they come back.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use coldrise_block::{Disk, Error, ErrorKind, Result};
use coldrise_inventory::Range;
use coldrise_session::CarriedFiles;
use coldrise_store::bucket::{BucketDisk, BucketRepository, BucketWriter};
use coldrise_store::{
    BackupTarget, DiskName, Horizon, MachineName, PointDocument, Repository, RepositoryId,
};

use crate::far::FarSide;
use crate::source::CopySource;

/// A bucket to which points are copied.
pub struct BucketFar(BucketWriter);

impl BucketFar {
    /// Begins to write. The index of the bucket's contents is kept beside `source`.
    ///
    /// # Errors
    /// As for [`BucketWriter::begin`].
    pub fn begin(bucket: &Arc<BucketRepository>, source: &Repository) -> Result<BucketFar> {
        BucketWriter::begin(bucket, source).map(BucketFar)
    }
}

impl FarSide for BucketFar {
    fn target(&self) -> &dyn BackupTarget {
        &self.0
    }

    fn id(&self) -> Result<RepositoryId> {
        Ok(*BucketRepository::id(self.0.repository()))
    }

    /// There is nothing that could be claimed: points of two copies lie side by side.
    fn claim(&self, _machine: &MachineName) -> Result<Box<dyn Any>> {
        Ok(Box::new(()))
    }

    fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        BucketRepository::points(self.0.repository(), machine)
    }

    /// While this writes, no space is returned there.
    fn keep_base(&self, base: &PointDocument) -> Result<bool> {
        Ok(self.0.repository().point(&base.machine, &base.point)?.is_some())
    }

    fn add_point(
        &self,
        mut document: PointDocument,
        files: &CarriedFiles,
    ) -> Result<PointDocument> {
        let encoded = match files.files.is_empty() {
            true => None,
            false => Some(files.encode()?),
        };
        document.files = encoded.as_ref().map(|encoded| {
            let contents = files.files.iter().filter_map(|file| file.content.as_ref());
            let size_bytes = contents.map(|content| content.len() as u64).sum();
            self.0.repository().facts_of_files(files.files.len(), size_bytes, encoded)
        });
        self.0.put_point(&document, encoded.as_deref())?;
        Ok(document)
    }

    fn pending_bytes(&self) -> u64 {
        self.0.pending_bytes()
    }

    fn begin_again(&self) -> Result<bool> {
        Ok(false)
    }
}

impl CopySource for Arc<BucketRepository> {
    fn id(&self) -> RepositoryId {
        *BucketRepository::id(self)
    }

    fn machines(&self) -> Result<Vec<MachineName>> {
        BucketRepository::machines(self)
    }

    fn check_machine(&self, machine: &MachineName) -> Result<()> {
        let machines = BucketRepository::machines(self)?;
        if machines.contains(machine) {
            return Ok(());
        }
        let names: Vec<_> = machines.iter().map(MachineName::as_str).collect();
        let there = match names.is_empty() {
            true => "there are none".to_owned(),
            false => format!("there are {}", names.join(", ")),
        };
        let text = format!("{}: there is no machine {machine}; {there}", self.place());
        Err(Error::new(ErrorKind::NotFound, text))
    }

    fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        BucketRepository::points(self, machine)
    }

    fn horizon(&self, _machine: &MachineName) -> Result<Horizon> {
        Ok(Horizon::new(None))
    }

    fn hold(&self, point: &mut PointDocument) -> Result<Box<dyn Any>> {
        let found = self.point(&point.machine, &point.point)?;
        *point = found.ok_or_else(|| {
            let text = format!("{}/{} is not there any more", point.machine, point.point);
            Error::new(ErrorKind::NotFound, text)
        })?;
        Ok(Box::new(()))
    }

    fn disk(&self, point: &PointDocument, name: &DiskName) -> Result<Arc<dyn Disk>> {
        Ok(Arc::new(disk_of(self, point, name)?))
    }

    fn changed(
        &self,
        base: &PointDocument,
        point: &PointDocument,
        name: &DiskName,
        cancel: &AtomicBool,
    ) -> Result<Vec<Range>> {
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
        }
        let changed = disk_of(self, point, name)?.changed_since(&disk_of(self, base, name)?)?;
        let range = |(offset_bytes, length_bytes)| Range { offset_bytes, length_bytes };
        Ok(changed.into_iter().map(range).collect())
    }

    fn files(&self, point: &PointDocument) -> Result<CarriedFiles> {
        match self.point_files(point)? {
            Some(encoded) => CarriedFiles::decode(&encoded),
            None => Ok(CarriedFiles::default()),
        }
    }
}

fn disk_of(
    bucket: &Arc<BucketRepository>,
    point: &PointDocument,
    name: &DiskName,
) -> Result<BucketDisk> {
    let disk = point.disk(name).ok_or_else(|| {
        let text = format!("{}/{} has no disk {name}", point.machine, point.point);
        Error::new(ErrorKind::NotFound, text)
    })?;
    Ok(BucketRepository::disk(bucket, disk))
}
