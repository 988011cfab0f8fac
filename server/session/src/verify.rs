//! Verify: what sessions and layers hold, and what their damage affects.
//!
//! Documents are read one by one, so that a damaged one hides no other. Every
//! captured block of every layer is read and authenticated.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use coldrise_block::{Disk, Error, ErrorKind, ExtentKind, Result, BLOCK_SIZE_BYTES};
use coldrise_store::{
    Affected, CatalogDamage, LayerId, LayerReference, PointDocument, Repository, VerifiedDisk,
};

use crate::catalog::Catalog;
use crate::client_files::{ClientFilesReader, FileKind};
use crate::document::{SessionDisk, SessionDocument};
use crate::layer::Layer;
use crate::live::{check_top, sealed_layers};
use crate::place::Place;

/// Files of clients are read in pieces of this size.
const PIECE_BYTES: usize = 1 << 20;

/// Everything that is there to be verified.
#[derive(Debug, Default)]
pub struct Inventory {
    /// The restore points whose documents are readable.
    pub points: Vec<PointDocument>,
    /// The sessions whose documents are readable.
    pub sessions: Vec<SessionDocument>,
    /// The documents that are not.
    pub damaged: Vec<CatalogDamage>,
}

impl Inventory {
    /// Reads every document of the catalog and of the sessions.
    ///
    /// # Errors
    /// `Corrupt` where the catalog cannot be walked; what the operating system says.
    pub fn take(repository: &Arc<Repository>) -> Result<Inventory> {
        // Before all that they stand for.
        let marked = repository.marked()?;
        let mut inventory = Inventory::default();
        let mut sealed = Vec::new();
        for place in Place::all(repository)? {
            match SessionDocument::read(repository, &place) {
                Ok(None) => {}
                Ok(Some(mut document)) => {
                    sealed.append(&mut document.sealed);
                    if !document.is_ended {
                        inventory.sessions.push(document);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    let what = format!("the session in {}", place.directory().display());
                    inventory.damaged.push(CatalogDamage { what, reason: error.full_message() });
                }
                Err(error) => return Err(error),
            }
        }
        for session in &inventory.sessions {
            inventory.damaged.extend(damaged_files(repository, session)?);
        }
        let (points, damaged) = repository.verify_catalog()?;
        inventory.points = points;
        inventory.damaged.extend(damaged);
        // A point on its way into the catalog stands in both.
        for point in sealed {
            let is_same = |known: &PointDocument| {
                known.machine == point.machine && known.point == point.point
            };
            if !inventory.points.iter().any(is_same) {
                inventory.points.push(point);
            }
        }
        let mut found: HashSet<String> = inventory.points.iter().map(point_name).collect();
        found.extend(inventory.sessions.iter().map(session_name));
        found.extend(inventory.damaged.iter().map(|damaged| damaged.what.clone()));
        inventory.damaged.extend(repository.missing(&marked, &found));
        let catalog = Catalog::new(repository);
        for point in inventory.points.iter().filter(|point| point.files.is_some()) {
            let what = || format!("the files that {}/{} carries", point.machine, point.point);
            match catalog.files(point) {
                // The point is gone by now.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => inventory.damaged.extend(damage(what(), error)?),
                Ok(_) => {}
            }
        }
        inventory.points.sort_by(|a, b| (&a.machine, &a.point).cmp(&(&b.machine, &b.point)));
        inventory.sessions.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(inventory)
    }

    /// The chunk map of every disk.
    pub fn disks(&self) -> Vec<VerifiedDisk> {
        let of_points = self.points.iter().flat_map(disks_of_point);
        let of_sessions = self.sessions.iter().flat_map(|session| {
            session.disks.iter().map(|disk| VerifiedDisk {
                name: session_disk(session, disk),
                root: disk.root,
                size_bytes: disk.size_bytes,
            })
        });
        of_points.chain(of_sessions).collect()
    }

    /// Reads every captured block. `on_bytes` hears of what was read.
    ///
    /// # Errors
    /// `Interrupted` when it was cancelled. Damage is no error: it is reported.
    pub fn verify_layers(
        &self,
        repository: &Arc<Repository>,
        cancel: &AtomicBool,
        on_bytes: &dyn Fn(u64),
    ) -> Result<LayerReport> {
        let mut report = LayerReport::default();
        let mut sealed: BTreeMap<LayerId, Sealed> = BTreeMap::new();
        let mut refer = |reference: &LayerReference, size_bytes: u64, disk: String| {
            let layer = sealed.entry(reference.id).or_insert_with(|| Sealed {
                reference: reference.clone(),
                size_bytes,
                disks: Vec::new(),
            });
            // A session that went on after its seals has the longest part of it.
            if reference.sealed_sequence > layer.reference.sealed_sequence {
                layer.reference = reference.clone();
            }
            layer.disks.push(disk);
        };
        for point in &self.points {
            for disk in &point.disks {
                for reference in &disk.layers {
                    refer(reference, disk.size_bytes, point_disk(point, disk.name.as_str()));
                }
            }
        }
        for session in &self.sessions {
            for disk in &session.disks {
                for reference in &disk.layers {
                    refer(reference, disk.size_bytes, session_disk(session, disk));
                }
            }
        }
        for layer in sealed.into_values() {
            let opened = sealed_layers(repository, &[layer.reference], layer.size_bytes);
            let found = opened.and_then(|layers| {
                let mut damaged = DamagedBlocks::default();
                for layer in &layers {
                    damaged.look_through(layer, cancel, &mut report, on_bytes)?;
                }
                Ok(damaged)
            });
            report.add(found, layer.size_bytes, &layer.disks)?;
        }
        for session in &self.sessions {
            for disk in &session.disks {
                let mut damaged = DamagedBlocks::default();
                let checked = check_top(repository, &session.name, &disk.name, |layer| {
                    damaged = DamagedBlocks::default();
                    damaged.look_through(layer, cancel, &mut report, on_bytes)?;
                    match damaged.ranges.is_empty() {
                        true => Ok(()),
                        false => Err(Error::new(ErrorKind::Corrupt, "captured blocks are damaged")),
                    }
                });
                let found = match checked {
                    Err(error) if damaged.ranges.is_empty() => {
                        if has_ended(repository, session)? {
                            continue;
                        }
                        Err(error)
                    }
                    _ => Ok(damaged),
                };
                report.add(found, disk.size_bytes, &[session_disk(session, disk)])?;
            }
        }
        Ok(report)
    }
}

/// What clients keep in a session and cannot be read. What changes meanwhile is looked
/// at again, so that nothing is taken for damaged that is only being removed.
fn damaged_files(
    repository: &Arc<Repository>,
    session: &SessionDocument,
) -> Result<Vec<CatalogDamage>> {
    let files = Arc::new(ClientFilesReader::new(repository, session));
    let mut damaged = Vec::new();
    let tree = match files.tree() {
        Ok(tree) => tree,
        Err(_) if has_ended(repository, session)? => return Ok(damaged),
        Err(error) => {
            let what = format!("the list of files in live/{}", session.name);
            return Ok(damage(what, error)?.into_iter().collect());
        }
    };
    for entry in tree.all().filter(|entry| entry.kind != FileKind::Folder) {
        let read = files.file(entry.id).and_then(|file| read_through(&*file));
        let Err(error) = read else { continue };
        let is_there = files.tree().is_ok_and(|tree| tree.get(entry.id).is_some());
        if is_there && !has_ended(repository, session)? {
            let what = format!("live/{}/{}", session.name, tree.path(entry));
            damaged.extend(damage(what, error)?);
        }
    }
    Ok(damaged)
}

/// Reads all that is stored of a file.
fn read_through(file: &dyn Disk) -> Result<()> {
    let (mut at, size_bytes) = (0, file.size_bytes());
    let mut piece = vec![0; PIECE_BYTES];
    while at < size_bytes {
        let extents = file.extents(at, size_bytes - at, 1)?;
        let Some(extent) = extents.first() else { return Ok(()) };
        let end = extent.offset_bytes + extent.length_bytes;
        while extent.kind == ExtentKind::Stored && at < end {
            let length = (end - at).min(PIECE_BYTES as u64);
            file.read_at(&mut piece[..length as usize], at)?;
            at += length;
        }
        at = end;
    }
    Ok(())
}

/// Damage is reported; any other failure ends the work.
fn damage(what: String, error: Error) -> Result<Option<CatalogDamage>> {
    match error.kind() {
        ErrorKind::Corrupt | ErrorKind::NotFound => {
            Ok(Some(CatalogDamage { what, reason: error.full_message() }))
        }
        _ => Err(error),
    }
}

/// The chunk map of every disk of a point.
pub(crate) fn disks_of_point(point: &PointDocument) -> impl Iterator<Item = VerifiedDisk> + '_ {
    point.disks.iter().map(|disk| VerifiedDisk {
        name: point_disk(point, disk.name.as_str()),
        root: disk.root,
        size_bytes: disk.size_bytes,
    })
}

/// A sealed layer, and who refers to it.
struct Sealed {
    reference: LayerReference,
    size_bytes: u64,
    disks: Vec<String>,
}

/// What its marker says.
pub(crate) fn point_name(point: &PointDocument) -> String {
    format!("{}/{}", point.machine, point.point)
}

/// What its marker says.
pub(crate) fn session_name(session: &SessionDocument) -> String {
    format!("live/{}", session.name)
}

fn point_disk(point: &PointDocument, disk: &str) -> String {
    format!("{}/{}/{disk}", point.machine, point.point)
}

fn session_disk(session: &SessionDocument, disk: &SessionDisk) -> String {
    format!("live/{}/{}", session.name, disk.name)
}

fn has_ended(repository: &Repository, session: &SessionDocument) -> Result<bool> {
    let now = SessionDocument::read(repository, &Place::of(repository, &session.name))?;
    Ok(now.is_none_or(|now| now.is_ended))
}

/// What was found in the layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerReport {
    /// Layers that were read.
    pub layers: u64,
    /// Bytes of captured blocks that were read.
    pub read_bytes: u64,
    /// What is wrong with layers, or with captured blocks in them.
    pub damaged: Vec<CatalogDamage>,
    /// The disks that refer to damaged blocks.
    pub affected: Vec<Affected>,
}

impl LayerReport {
    fn add(
        &mut self,
        found: Result<DamagedBlocks>,
        size_bytes: u64,
        disks: &[String],
    ) -> Result<()> {
        let layer = format!("a layer of {}", disks.join(", "));
        let found = match found {
            Ok(damaged) => damaged,
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
                self.damaged.push(CatalogDamage { what: layer, reason: error.full_message() });
                let whole = 0..size_bytes.div_ceil(BLOCK_SIZE_BYTES);
                self.affect(&[whole], size_bytes, disks);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if let Some(reason) = found.first_reason {
            let blocks: u64 = found.ranges.iter().map(|range| range.end - range.start).sum();
            let plural = if blocks == 1 { "" } else { "s" };
            let what = format!("{blocks} captured block{plural} in {layer}");
            self.damaged.push(CatalogDamage { what, reason });
            self.affect(&found.ranges, size_bytes, disks);
        }
        Ok(())
    }

    fn affect(&mut self, blocks: &[Range<u64>], size_bytes: u64, disks: &[String]) {
        let in_bytes = |blocks: &Range<u64>| {
            blocks.start * BLOCK_SIZE_BYTES..(blocks.end * BLOCK_SIZE_BYTES).min(size_bytes)
        };
        let ranges: Vec<_> = blocks.iter().map(in_bytes).collect();
        for disk in disks {
            self.affected.push(Affected { disk: disk.clone(), ranges: ranges.clone() });
        }
    }
}

/// The captured blocks of a layer that cannot be read or do not authenticate.
#[derive(Default)]
struct DamagedBlocks {
    ranges: Vec<Range<u64>>,
    /// What is wrong with the first of them, and in which file.
    first_reason: Option<String>,
}

impl DamagedBlocks {
    fn look_through(
        &mut self,
        layer: &Layer,
        cancel: &AtomicBool,
        report: &mut LayerReport,
        on_bytes: &dyn Fn(u64),
    ) -> Result<()> {
        report.layers += 1;
        let mut block = 0;
        while block < layer.blocks() {
            if cancel.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            match layer.check_captured(block) {
                Ok((blocks, bytes)) => {
                    report.read_bytes += bytes;
                    on_bytes(bytes);
                    block += blocks;
                }
                Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {
                    match self.ranges.last_mut() {
                        Some(last) if last.end == block => last.end += 1,
                        _ => self.ranges.push(block..block + 1),
                    }
                    self.first_reason.get_or_insert_with(|| error.full_message());
                    block += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
