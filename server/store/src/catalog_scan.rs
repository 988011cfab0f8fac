//! Walks the catalog for a program that keeps its own index of it.
//!
//! [`Repository::catch_up_stamped`] says cheaply whether the catalog changed. If it did,
//! [`Repository::scan_catalog`] shows the version of each document, so that only changed ones are opened,
//! and [`Repository::marker_files`] shows the files beside the markers with one listing.
//!
//! Read the marker files before the scan: a point is in the catalog before its marker appears.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use coldrise_block::{Context, Result};

use crate::catalog::{self, Document};
use crate::markers::{MarkerFile, MarkerId};
use crate::rocks::Family;
use crate::{MachineName, PointDocument, PointName, Repository};
use coldrise_block::hex;

/// The state of the catalog's part of the database. A later state differs if the catalog changed;
/// rarely it differs without a change.
#[derive(Clone, Debug)]
pub struct CatalogStamp {
    /// Entries in memory tables.
    entries: [u64; 2],
    /// The names of the catalog's files, sorted.
    files: Vec<String>,
    /// The state of the list of all files, read before `files`.
    list: Option<(PathBuf, u64)>,
}

impl PartialEq for CatalogStamp {
    fn eq(&self, other: &CatalogStamp) -> bool {
        self.entries == other.entries && self.files == other.files
    }
}

/// A keyed hash of a machine's name.
pub type MachineId = [u8; 16];

/// One entry of the catalog.
pub enum ScanEntry<'a> {
    /// A machine. All machines come before all points.
    Machine(ScannedMachine<'a>),
    /// A point. The points of a machine lie together, oldest first.
    Point(ScannedPoint<'a>),
}

/// A machine of the catalog.
pub struct ScannedMachine<'a> {
    /// The machine.
    pub id: MachineId,
    /// Differs between any two versions of its document.
    pub version: u64,
    document: Document<'a>,
}

impl ScannedMachine<'_> {
    /// The machine's name, and the backup that was stored last, if it is known.
    ///
    /// # Errors
    /// `Corrupt` if the document does not authenticate.
    pub fn open(&self) -> Result<(MachineName, Option<PointName>)> {
        self.document.machine()
    }
}

/// A point of the catalog.
pub struct ScannedPoint<'a> {
    /// Its machine.
    pub machine: MachineId,
    /// Twelve bytes that sort like the names of points: see [`PointName::from_sort_key`].
    pub key: [u8; 12],
    /// Differs between any two versions of its document.
    pub version: u64,
    document: Document<'a>,
}

impl ScannedPoint<'_> {
    /// The point as its document describes it, without the flags beside its marker.
    ///
    /// # Errors
    /// `Corrupt` if the document does not authenticate.
    pub fn open(&self) -> Result<PointDocument> {
        self.document.point()
    }
}

/// The files of a marker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MarkerFiles {
    /// The marker itself exists.
    pub is_marked: bool,
    /// The point is protected.
    pub is_protected: bool,
    /// A person put the point in quarantine.
    pub is_quarantined: bool,
    /// Differs between any two results of a boot check; `None` without one.
    pub boot: Option<u64>,
}

impl Repository {
    /// Catches up, and returns the state of the catalog. `previous` is an earlier state and makes
    /// this faster.
    ///
    /// # Errors
    /// Errors of the operating system on the files.
    pub fn catch_up_stamped(&self, previous: Option<&CatalogStamp>) -> Result<CatalogStamp> {
        let list = self.database().list_stamp();
        self.catch_up()?;
        let entries = self.database().unflushed_entries(Family::Catalog)?;
        let files = match previous {
            Some(previous) if list.is_some() && previous.list == list => previous.files.clone(),
            _ => {
                let files = self.database().listed_files(Family::Catalog)?;
                let mut names: Vec<String> = files.into_iter().map(|file| file.name).collect();
                names.sort_unstable();
                names
            }
        };
        Ok(CatalogStamp { entries, files, list })
    }

    /// The state of the folder of markers. A later state differs if a point or session was added or
    /// removed, or if a flag or a boot check changed. `None` if the last change was so short ago
    /// that a further one might not show.
    ///
    /// # Errors
    /// Errors of the operating system on the folder.
    pub fn markers_stamp(&self) -> Result<Option<(u64, i64, i64)>> {
        /// File systems round the time of a change to the clock's tick, 10 ms at most.
        const TICK_MS: i128 = 50;
        let folder = self.markers_dir();
        let metadata = match std::fs::metadata(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Some(Default::default()));
            }
            found => found.context(|| format!("reading {}", folder.display()))?,
        };
        let changed_ms =
            i128::from(metadata.ctime()) * 1000 + i128::from(metadata.ctime_nsec()) / 1_000_000;
        let age_ms = i128::from(jiff::Timestamp::now().as_millisecond()) - changed_ms;
        let is_stable = !(-TICK_MS..TICK_MS).contains(&age_ms);
        Ok(is_stable.then(|| (metadata.ino(), metadata.ctime(), metadata.ctime_nsec())))
    }

    /// Calls `each` with every machine and then every point.
    ///
    /// # Errors
    /// `Corrupt` if the catalog cannot be walked, and every error of `each`.
    pub fn scan_catalog(&self, mut each: impl FnMut(ScanEntry<'_>) -> Result<()>) -> Result<()> {
        catalog::for_each_document(self, |document| {
            let version = document.version();
            match document.place() {
                Some((id, None)) => {
                    each(ScanEntry::Machine(ScannedMachine { id, version, document }))
                }
                Some((machine, Some(key))) => {
                    each(ScanEntry::Point(ScannedPoint { machine, key, version, document }))
                }
                None => Ok(()),
            }
        })
    }

    /// The files of all markers.
    ///
    /// # Errors
    /// Errors of the operating system on the folder.
    pub fn marker_files(&self) -> Result<HashMap<MarkerId, MarkerFiles>> {
        let folder = self.markers_dir();
        let what = || format!("reading {}", folder.display());
        let mut found: HashMap<MarkerId, MarkerFiles> = HashMap::new();
        let entries = match std::fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
            entries => entries.context(what)?,
        };
        for entry in entries {
            let entry = entry.context(what)?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let (stem, file) = MarkerFile::of_name(name);
            let Some((id, file)) = hex::decode_lower(stem).zip(file) else { continue };
            let files = found.entry(id).or_default();
            match file {
                MarkerFile::Marker => files.is_marked = true,
                MarkerFile::Protected => files.is_protected = true,
                MarkerFile::Quarantined => files.is_quarantined = true,
                MarkerFile::BootCheck => files.boot = entry.metadata().ok().map(|m| version_of(&m)),
            }
        }
        Ok(found)
    }
}

/// A replaced file is another one, or is written later.
fn version_of(metadata: &std::fs::Metadata) -> u64 {
    let nanoseconds = metadata.ctime().wrapping_mul(1_000_000_000) + metadata.ctime_nsec();
    metadata.ino().rotate_left(40) ^ nanoseconds as u64
}
