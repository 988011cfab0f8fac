//! Checking a bucket: that all is there that its points lead to, and that it authenticates.

use std::collections::{BTreeMap, HashMap};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use roaring::RoaringTreemap;
use serde::Serialize;

use super::busy::{Busy, Role};
use super::in_parallel::in_parallel;
use super::pack::{id_of, number_of, object_name, parts_of, PackNumber, FOLDER, MOST_PACK_BYTES};
use super::shelf::REQUESTS;
use super::walk::Reached;
use super::BucketRepository;
use crate::PointDocument;

/// A disk of a point that cannot be read completely, or a point of which nothing is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BucketDamage {
    /// MACHINE/POINT/DISK, or the name of a point's object.
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
    /// Packs that no point needs: of copies that did not end, or of points that are gone.
    pub other_packs: u64,
    /// Bytes that were read of the packs; 0 if only maps were checked.
    pub read_bytes: u64,
    /// What is damaged, in the order of the points.
    pub damaged: Vec<BucketDamage>,
    /// Packs of which damaged values were removed.
    pub mended_packs: u64,
}

/// How much is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketCheck {
    /// That everything is there: maps, and the tables of packs.
    Quick,
    /// That everything can be read.
    Full,
    /// As `Full`; then damaged values are removed, so that the next copy stores their content again.
    Mend,
}

/// What is wrong with values of a pack.
type Broken = HashMap<u64, String>;

/// What the points need.
#[derive(Default)]
struct Needed<'a> {
    packs: BTreeMap<PackNumber, RoaringTreemap>,
    disks: Vec<(&'a PointDocument, usize, Reached)>,
}

impl BucketRepository {
    /// Checks all points.
    ///
    /// # Errors
    /// Errors of reaching the store, and of reading the list of points; to mend, `Busy` if a copy writes to the bucket. Damage
    /// is in the report.
    pub fn verify(&self, check: BucketCheck) -> Result<BucketVerifyReport> {
        let busy = match check {
            BucketCheck::Mend => Some(Busy::begin(&self.shelf.objects, Role::Tidier)?),
            BucketCheck::Quick | BucketCheck::Full => None,
        };
        let points = self.all_points()?;
        let mut report = BucketVerifyReport { points: points.len() as u64, ..Default::default() };
        let lost = self.damaged_points().into_iter();
        report.damaged.extend(lost.map(|(address, reason)| BucketDamage { address, reason }));
        let mut needed = self.needed(&points, &mut report)?;
        let there = self.shelf.objects.list(FOLDER)?;
        let there: HashMap<_, _> = there
            .into_iter()
            .filter_map(|listed| Some((number_of(&listed.name)?, listed.size_bytes)))
            .collect();
        report.packs = needed.packs.len() as u64;
        let is_other = |pack: &&PackNumber| !needed.packs.contains_key(pack);
        report.other_packs = there.keys().filter(is_other).count() as u64;
        if check == BucketCheck::Mend {
            // A damaged page makes what lies below it unknown: so all packs are mended.
            for pack in there.keys() {
                needed.packs.entry(*pack).or_default();
            }
        }
        let read_bytes = Mutex::new(0);
        let packs: Vec<_> = needed.packs.iter().collect();
        let broken = in_parallel(&packs, REQUESTS, |(pack, values)| {
            let size_bytes = there.get(pack).copied().unwrap_or(0);
            let broken = match check {
                BucketCheck::Quick => self.check_table(**pack, size_bytes, values),
                BucketCheck::Full => self.check_content(**pack, values, false, &read_bytes),
                BucketCheck::Mend => self.check_content(**pack, values, true, &read_bytes),
            };
            self.all_broken(**pack, Some(values), broken)
        })?;
        report.read_bytes = read_bytes.into_inner();
        report.damaged.extend(damages(&needed.disks, &broken));
        report.damaged.sort_by(|a, b| a.address.cmp(&b.address));
        if let Some(busy) = busy {
            let opens = |pack: &PackNumber| self.shelf.names(*pack).is_ok();
            if !there.is_empty() && !there.keys().any(opens) {
                let text = format!("{}: none of {} packs opens", self.place(), there.len());
                return Err(Error::new(ErrorKind::Corrupt, text).advise(
                    "nothing is removed: is repository.json the right one? It may be another repository's",
                ));
            }
            let packs = packs.iter().map(|(pack, _)| **pack).zip(&broken);
            for (pack, broken) in packs.filter(|(pack, _)| there.contains_key(pack)) {
                busy.check_time()?;
                report.mended_packs += u64::from(self.mend(pack, broken)?);
            }
        }
        Ok(report)
    }

    /// What the points lead to. Those of which a map cannot be read are in the report.
    fn needed<'a>(
        &self,
        points: &'a [PointDocument],
        report: &mut BucketVerifyReport,
    ) -> Result<Needed<'a>> {
        let mut needed = Needed::default();
        for point in points {
            for (at, disk) in point.disks.iter().enumerate() {
                let mut reached = Reached::default();
                match reached.add(&self.shelf, disk.root) {
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        report.damaged.push(damage(point, at, error.full_message()));
                    }
                    added => {
                        added?;
                        for id in reached.chunks.iter().chain(reached.pages.iter()) {
                            needed.packs.entry(parts_of(id).0).or_default().insert(id);
                        }
                        needed.disks.push((point, at, reached));
                    }
                }
            }
        }
        Ok(needed)
    }

    /// A pack that cannot be read lacks all of its values. They may be many: one stands for those that are not needed.
    fn all_broken(
        &self,
        pack: PackNumber,
        needed: Option<&RoaringTreemap>,
        checked: Result<Broken>,
    ) -> Result<Broken> {
        match checked {
            Err(error) if [ErrorKind::Corrupt, ErrorKind::NotFound].contains(&error.kind()) => {
                let why = error.full_message();
                let needed = needed.into_iter().flatten();
                let all = needed.chain([id_of(pack, 0)]).map(|id| (id, why.clone()));
                Ok(all.collect())
            }
            checked => checked,
        }
    }

    fn check_table(
        &self,
        pack: PackNumber,
        size_bytes: u64,
        needed: &RoaringTreemap,
    ) -> Result<Broken> {
        let (table, _) = self.shelf.names(pack)?;
        let is_missing =
            |id: &u64| table.range(parts_of(*id).1).is_none_or(|range| range.end > size_bytes);
        Ok(needed.iter().filter(is_missing).map(|id| (id, missing(id))).collect())
    }

    /// Checks what is needed, and with `is_all` everything that the pack has.
    fn check_content(
        &self,
        pack: PackNumber,
        needed: &RoaringTreemap,
        is_all: bool,
        read_bytes: &Mutex<u64>,
    ) -> Result<Broken> {
        let (table, _) = self.shelf.names(pack)?;
        let content = self.shelf.objects.get(&object_name(pack), MOST_PACK_BYTES)?;
        *read_bytes.lock() += content.len() as u64;
        let mut chunk = vec![0; self.shelf.seals.chunk_size()];
        let mut broken = Broken::new();
        for place in 0..table.count() {
            let (id, range) = (id_of(pack, place), table.range(place));
            let is_checked = needed.contains(id) || is_all && range.is_some();
            if !is_checked {
                continue;
            }
            let value =
                range.and_then(|range| content.get(range.start as usize..range.end as usize));
            let why = match value {
                None => missing(id),
                Some(value) if self.shelf.seals.authenticates(id, value, &mut chunk) => continue,
                Some(_) => format!("{}: value {place} is damaged", object_name(pack)),
            };
            broken.insert(id, why);
        }
        Ok(broken)
    }

    /// Removes the broken values of a pack; all of it, if nothing is known of it. Returns whether there were any.
    fn mend(&self, pack: PackNumber, broken: &Broken) -> Result<bool> {
        // What is missing already needs no removal, and one wrong answer is no reason for one.
        let again = self.check_content(pack, &RoaringTreemap::new(), true, &Mutex::new(0));
        let again = self.all_broken(pack, None, again)?;
        if !again.keys().any(|id| broken.contains_key(id)) {
            return Ok(false);
        }
        match self.put_anew(pack, |id| !again.contains_key(&id)) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.shelf.objects.delete(&object_name(pack))?;
            }
            put => drop(put?),
        }
        Ok(true)
    }
}

/// The disks that need broken values.
fn damages(disks: &[(&PointDocument, usize, Reached)], broken: &[Broken]) -> Vec<BucketDamage> {
    let mut damaged = Vec::new();
    for (point, at, reached) in disks {
        let is_needed = |id: &u64| reached.chunks.contains(*id) || reached.pages.contains(*id);
        let mut found = broken.iter().flatten().filter(|(id, _)| is_needed(id));
        if let Some((_, reason)) = found.next() {
            let more = match found.count() {
                0 => String::new(),
                more => format!(", and {more} more"),
            };
            damaged.push(damage(point, *at, format!("{reason}{more}")));
        }
    }
    damaged
}

fn missing(id: u64) -> String {
    let (pack, place) = parts_of(id);
    format!("{}: value {place} is missing", object_name(pack))
}

fn damage(point: &PointDocument, disk: usize, reason: String) -> BucketDamage {
    let name = &point.disks[disk].name;
    BucketDamage { address: format!("{}/{}/{name}", point.machine, point.point), reason }
}
