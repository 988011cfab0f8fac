//! Checking a bucket: that all is there that its points lead to, and that it authenticates.

use std::collections::{BTreeMap, HashMap};

use coldrise_block::{ErrorKind, Result};
use parking_lot::Mutex;
use roaring::RoaringTreemap;
use serde::Serialize;

use super::in_parallel::in_parallel;
use super::pack::{id_of, number_of, object_name, parts_of, PackNumber, FOLDER, MOST_PACK_BYTES};
use super::shelf::REQUESTS;
use super::walk::Reached;
use super::BucketRepository;
use crate::PointDocument;

/// A disk of a point that cannot be read completely.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BucketDamage {
    /// MACHINE/POINT/DISK.
    pub address: String,
    /// What is damaged or missing.
    pub reason: String,
}

/// The result of checking a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BucketVerifyReport {
    /// Points that were checked.
    pub points: u64,
    /// Packs that they need.
    pub packs: u64,
    /// Bytes that were read of these; 0 if only maps were checked.
    pub read_bytes: u64,
    /// What is damaged, in the order of the points.
    pub damaged: Vec<BucketDamage>,
}

/// What is wrong with values of a pack.
type Broken = HashMap<u64, String>;

impl BucketRepository {
    /// Checks all points. With `is_quick`, reads maps and the tables of packs only.
    ///
    /// # Errors
    /// Errors of reaching the store, and of reading the list of points. Damage is in the report.
    pub fn verify(&self, is_quick: bool) -> Result<BucketVerifyReport> {
        let points = self.all_points()?;
        let mut report = BucketVerifyReport { points: points.len() as u64, ..Default::default() };
        let mut needed: BTreeMap<PackNumber, RoaringTreemap> = BTreeMap::new();
        let mut disks = Vec::new();
        for point in &points {
            for (at, disk) in point.disks.iter().enumerate() {
                let mut reached = Reached::default();
                match reached.add(&self.shelf, disk.root) {
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        report.damaged.push(damage(point, at, error.full_message()));
                    }
                    added => {
                        added?;
                        for id in reached.chunks.iter().chain(reached.pages.iter()) {
                            needed.entry(parts_of(id).0).or_default().insert(id);
                        }
                        disks.push((point, at, reached));
                    }
                }
            }
        }
        report.packs = needed.len() as u64;
        let there = self.shelf.objects.list(FOLDER)?;
        let there: HashMap<_, _> = there
            .into_iter()
            .filter_map(|listed| Some((number_of(&listed.name)?, listed.size_bytes)))
            .collect();
        let read_bytes = Mutex::new(0);
        let needed: Vec<_> = needed.into_iter().collect();
        let broken = in_parallel(&needed, REQUESTS, |(pack, values)| {
            if !is_quick {
                *read_bytes.lock() += there.get(pack).copied().unwrap_or(0);
            }
            self.check_pack(*pack, values, is_quick)
        })?;
        report.read_bytes = read_bytes.into_inner();
        let broken: Broken = broken.into_iter().flatten().collect();
        for (point, at, reached) in disks {
            let mut found = broken
                .iter()
                .filter(|(id, _)| reached.chunks.contains(**id) || reached.pages.contains(**id));
            if let Some((_, reason)) = found.next() {
                let more = match found.count() {
                    0 => String::new(),
                    more => format!(", and {more} more"),
                };
                report.damaged.push(damage(point, at, format!("{reason}{more}")));
            }
        }
        report.damaged.sort_by(|a, b| a.address.cmp(&b.address));
        Ok(report)
    }

    /// What is wrong with the values of a pack that are needed.
    fn check_pack(
        &self,
        pack: PackNumber,
        values: &RoaringTreemap,
        is_quick: bool,
    ) -> Result<Broken> {
        let checked = match is_quick {
            true => self.check_table(pack, values),
            false => self.check_content(pack, values),
        };
        match checked {
            Err(error) if [ErrorKind::Corrupt, ErrorKind::NotFound].contains(&error.kind()) => {
                let why = error.full_message();
                Ok(values.iter().map(|id| (id, why.clone())).collect())
            }
            checked => checked,
        }
    }

    fn check_table(&self, pack: PackNumber, values: &RoaringTreemap) -> Result<Broken> {
        let (table, _) = self.shelf.names(pack)?;
        let is_missing = |id: &u64| table.range(parts_of(*id).1).is_none();
        Ok(values.iter().filter(is_missing).map(|id| (id, missing(id))).collect())
    }

    fn check_content(&self, pack: PackNumber, values: &RoaringTreemap) -> Result<Broken> {
        let (table, _) = self.shelf.names(pack)?;
        let content = self.shelf.objects.get(&object_name(pack), MOST_PACK_BYTES)?;
        let mut chunk = vec![0; self.shelf.seals.chunk_size()];
        let mut broken = Broken::new();
        for place in 0..table.count() {
            let id = id_of(pack, place);
            if !values.contains(id) {
                continue;
            }
            let value = table
                .range(place)
                .and_then(|range| content.get(range.start as usize..range.end as usize));
            let why = match value {
                None => missing(id),
                Some(value) if self.shelf.seals.authenticates(id, value, &mut chunk) => continue,
                Some(_) => format!("{}: value {place} is damaged", object_name(pack)),
            };
            broken.insert(id, why);
        }
        Ok(broken)
    }
}

fn missing(id: u64) -> String {
    let (pack, place) = parts_of(id);
    format!("{}: value {place} is missing", object_name(pack))
}

fn damage(point: &PointDocument, disk: usize, reason: String) -> BucketDamage {
    let name = &point.disks[disk].name;
    BucketDamage { address: format!("{}/{}/{name}", point.machine, point.point), reason }
}
