//! The points of a bucket.

use std::collections::BTreeMap;

use coldrise_block::{Error, ErrorKind, Result};

use super::in_parallel::in_parallel;
use super::shelf::REQUESTS;
use super::BucketRepository;
use crate::aead::document;
use crate::{hex, MachineName, PointDocument, PointFiles, PointName};

pub(super) const FOLDER: &str = "points/";
pub(super) const FILES_FOLDER: &str = "files/";
pub(super) const TRACES_FOLDER: &str = "traces/";
const MOST_DOCUMENT_BYTES: u64 = document::MAX_BYTES as u64 + 64;

impl BucketRepository {
    /// The machines that have points, in the order of their names.
    ///
    /// # Errors
    /// `Corrupt` for a damaged document; errors of reaching the store.
    pub fn machines(&self) -> Result<Vec<MachineName>> {
        // One document of each folder says whose it is.
        let listed = self.shelf.objects.list(FOLDER)?;
        let folder = |name: &str| name.rsplit_once('/').map(|(folder, _)| folder.to_owned());
        let newest: BTreeMap<_, _> =
            listed.into_iter().map(|listed| (folder(&listed.name), listed.name)).collect();
        let newest: Vec<_> = newest.into_values().collect();
        let points = in_parallel(&newest, REQUESTS, |name| self.read_point(name))?;
        let mut machines: Vec<_> = points.into_iter().flatten().map(|p| p.machine).collect();
        machines.sort();
        Ok(machines)
    }

    /// The points of a machine, oldest first; none if it is not known.
    ///
    /// # Errors
    /// As for [`BucketRepository::machines`].
    pub fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        self.points_below(&format!("{FOLDER}{}/", self.shelf.seals.folder_of(machine)))
    }

    /// All points, those of one machine together, oldest first.
    ///
    /// # Errors
    /// As for [`BucketRepository::machines`].
    pub fn all_points(&self) -> Result<Vec<PointDocument>> {
        self.points_below(FOLDER)
    }

    fn points_below(&self, prefix: &str) -> Result<Vec<PointDocument>> {
        let listed = self.shelf.objects.list(prefix)?;
        let points = in_parallel(&listed, REQUESTS, |listed| self.read_point(&listed.name))?;
        Ok(points.into_iter().flatten().collect())
    }

    /// `None` if it was removed meanwhile.
    fn read_point(&self, name: &str) -> Result<Option<PointDocument>> {
        let content = match self.shelf.objects.get(name, MOST_DOCUMENT_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read?,
        };
        let opened = self.shelf.seals.decrypt(&purpose(name), &content).and_then(|text| {
            serde_json::from_slice::<PointDocument>(&text).map_err(|error| {
                let text = "the point's document has an unknown form";
                Error::with_source(ErrorKind::Corrupt, text, error)
            })
        });
        let point = opened.map_err(|error| error.context(name))?;
        match self.name_of(FOLDER, &point.machine, &point.point) == name {
            true => Ok(Some(point)),
            false => {
                let text = format!("{name} is the document of another point");
                Err(Error::new(ErrorKind::Corrupt, text))
            }
        }
    }

    /// A point; `None` if it is not there.
    ///
    /// # Errors
    /// As for [`BucketRepository::machines`].
    pub fn point(&self, machine: &MachineName, point: &PointName) -> Result<Option<PointDocument>> {
        self.read_point(&self.name_of(FOLDER, machine, point))
    }

    /// The files that a point carries, encoded.
    ///
    /// # Errors
    /// `Corrupt` if they are missing or damaged; errors of reaching the store.
    pub fn point_files(&self, point: &PointDocument) -> Result<Option<Vec<u8>>> {
        if point.files.is_none() {
            return Ok(None);
        }
        let name = self.name_of(FILES_FOLDER, &point.machine, &point.point);
        let content = self.shelf.objects.get(&name, MOST_DOCUMENT_BYTES);
        let content = content.map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(ErrorKind::Corrupt, format!("{name} is missing")),
            _ => error,
        })?;
        let opened = self.shelf.seals.decrypt(&purpose(&name), &content);
        opened.map(Some).map_err(|error| error.context(name))
    }

    /// What a point's document says of files.
    pub fn facts_of_files(&self, count: usize, size_bytes: u64, files: &[u8]) -> PointFiles {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        PointFiles { count, size_bytes, hash: self.shelf.seals.hash_of_files(files) }
    }

    pub(super) fn put_point(&self, point: &PointDocument, files: Option<&[u8]>) -> Result<()> {
        point.check()?;
        if let Some(files) = files {
            let name = self.name_of(FILES_FOLDER, &point.machine, &point.point);
            self.shelf.objects.put(&name, self.shelf.seals.encrypt(&purpose(&name), files)?)?;
        }
        let text = serde_json::to_vec(point).map_err(|error| {
            Error::with_source(ErrorKind::Internal, "writing a point's document", error)
        })?;
        let name = self.name_of(FOLDER, &point.machine, &point.point);
        self.shelf.objects.put(&name, self.shelf.seals.encrypt(&purpose(&name), &text)?)
    }

    /// Removes a point. Its data stays until the bucket is tidied.
    ///
    /// # Errors
    /// Errors of reaching the store, and its refusals.
    pub fn remove_point(&self, point: &PointDocument) -> Result<()> {
        self.shelf.objects.delete(&self.name_of(FOLDER, &point.machine, &point.point))?;
        match point.files {
            Some(_) => {
                let name = self.name_of(FILES_FOLDER, &point.machine, &point.point);
                self.shelf.objects.delete(&name)
            }
            None => Ok(()),
        }
    }

    /// Keeps what a machine reads first at a boot.
    ///
    /// # Errors
    /// Errors of reaching the store, and its refusals.
    pub fn put_boot_trace(&self, machine: &MachineName, trace: &[u8]) -> Result<()> {
        let name = self.trace_of(machine);
        self.shelf.objects.put(&name, self.shelf.seals.encrypt(&purpose(&name), trace)?)
    }

    /// What a machine reads first at a boot, if that is known.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged; errors of reaching the store.
    pub fn boot_trace(&self, machine: &MachineName) -> Result<Option<Vec<u8>>> {
        let name = self.trace_of(machine);
        match self.shelf.objects.get(&name, MOST_DOCUMENT_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            read => self.shelf.seals.decrypt(&purpose(&name), &read?).map(Some),
        }
    }

    fn trace_of(&self, machine: &MachineName) -> String {
        format!("{TRACES_FOLDER}{}", self.shelf.seals.folder_of(machine))
    }

    fn name_of(&self, folder: &str, machine: &MachineName, point: &PointName) -> String {
        let machine = self.shelf.seals.folder_of(machine);
        format!("{folder}{machine}/{}", hex::encode(&point.sort_key()))
    }
}

fn purpose(name: &str) -> String {
    format!("bucket {name}")
}
