//! Checking a bucket: that all is there that its points lead to, and that it authenticates.

use std::collections::HashMap;

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use roaring::RoaringBitmap;
use serde::Serialize;

use super::BucketRepository;
use super::busy::{Busy, Role};
use super::in_parallel::in_parallel;
use super::pack::{FOLDER, MOST_PACK_BYTES, PackNumber, Tables, id_of, number_of, object_name};
use super::pack_reader::REQUESTS;
use super::walk::Reached;
use coldrise_store::PointDocument;

/// A disk of a point that cannot be read completely, or an object of the bucket that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BucketDamage {
    /// MACHINE/POINT/DISK, or the name of an object.
    pub address: String,
    /// Damaged or missing parts.
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
    /// The damage, in the order of the points.
    pub damaged: Vec<BucketDamage>,
    /// Packs that were rewritten without what was damaged, or removed.
    pub mended_packs: u64,
    /// Other packs of which only the list of names was rebuilt: nothing is lost.
    pub renamed_packs: u64,
    /// An object that was put back from the other one that holds the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub put_back: Option<String>,
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

/// The damage of a pack.
#[derive(Default)]
struct Broken {
    /// Values that are missing or damaged, and why.
    values: HashMap<u64, String>,
    /// Whether no copy finds contents in it. Points do not need its names.
    are_names_damaged: bool,
}

/// The repair of a pack.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mended {
    Nothing,
    /// Its list of names was rebuilt.
    Names,
    /// Damaged values were removed.
    Values,
}

impl BucketRepository {
    /// Checks all points.
    ///
    /// # Errors
    /// Errors of reaching the store, and of reading the list of points; to mend, `Busy` if a copy writes to the bucket. Damage
    /// is in the report.
    pub fn verify(&self, check: BucketCheck) -> Result<BucketVerifyReport> {
        let busy = match check {
            BucketCheck::Mend => Some(Busy::begin(&self.reader.objects, Role::Compactor)?),
            BucketCheck::Quick | BucketCheck::Full => None,
        };
        let points = self.all_points()?;
        let mut report = BucketVerifyReport { points: points.len() as u64, ..Default::default() };
        let lost = self.damaged_points().into_iter();
        report.damaged.extend(lost.map(|(address, reason)| BucketDamage { address, reason }));
        let (mut reached, readable) = self.reached(&points, &mut report)?;
        let there = self.reader.objects.list(FOLDER)?;
        let there: HashMap<_, _> = there
            .into_iter()
            .filter_map(|listed| Some((number_of(&listed.name)?, listed.size_bytes)))
            .collect();
        report.packs = reached.packs.len() as u64;
        let is_other = |pack: &&PackNumber| !reached.packs.contains_key(pack);
        report.other_packs = there.keys().filter(is_other).count() as u64;
        if check == BucketCheck::Mend {
            // A damaged page makes what lies below it unknown: so all packs are mended.
            for pack in there.keys() {
                reached.packs.entry(*pack).or_default();
            }
        }
        let read_bytes = Mutex::new(0);
        let packs: Vec<_> = reached.packs.iter().collect();
        let broken = in_parallel(&packs, REQUESTS, |(pack, places)| {
            let size_bytes = there.get(pack).copied().unwrap_or(0);
            let broken = match check {
                BucketCheck::Quick => self.check_table(**pack, size_bytes, places),
                BucketCheck::Full => self.check_content(**pack, places, false, &read_bytes),
                BucketCheck::Mend => self.check_content(**pack, places, true, &read_bytes),
            };
            all_broken(**pack, places, broken)
        })?;
        report.read_bytes = read_bytes.into_inner();
        report.damaged.extend(self.damages(&readable, &broken)?);
        let nameless = packs.iter().zip(&broken).filter(|(_, broken)| broken.are_names_damaged);
        report.damaged.extend(nameless.map(|((pack, _), _)| BucketDamage {
            address: object_name(**pack),
            reason: "its list of names cannot be read; no point needs it, but copies find nothing in this pack".to_owned(),
        }));
        report.damaged.extend(self.lost_configuration.map(|name| BucketDamage {
            address: name.to_owned(),
            reason: "it is missing or cannot be read; its second copy is used".to_owned(),
        }));
        report.damaged.sort_by(|a, b| a.address.cmp(&b.address));
        if let Some(busy) = busy {
            if !there.is_empty() && !self.opens_any(there.keys())? {
                let text = format!("{}: none of {} packs opens", self.place(), there.len());
                return Err(Error::new(ErrorKind::Corrupt, text).advise(
                    "nothing was removed. Check that repository.json belongs to this repository",
                ));
            }
            if let Some(name) = self.lost_configuration {
                busy.check()?;
                self.reader.objects.put(name, self.reader.keys.config.to_text()?)?;
                report.put_back = Some(name.to_owned());
            }
            let packs = packs.iter().map(|(pack, _)| **pack).zip(&broken);
            for (pack, broken) in packs.filter(|(pack, _)| there.contains_key(pack)) {
                let mended = self.mend(&busy, pack, broken)?;
                report.mended_packs += u64::from(mended == Mended::Values);
                report.renamed_packs += u64::from(mended == Mended::Names);
            }
        }
        Ok(report)
    }

    /// Everything that the points lead to, and their disks of which all maps can be read. The others are in the report.
    fn reached<'a>(
        &self,
        points: &'a [PointDocument],
        report: &mut BucketVerifyReport,
    ) -> Result<(Reached, Vec<(&'a PointDocument, usize)>)> {
        let (mut reached, mut readable) = (Reached::default(), Vec::new());
        for point in points {
            for (at, disk) in point.disks.iter().enumerate() {
                match reached.add(&self.reader, disk.root) {
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        report.damaged.push(damage(point, at, error.full_message()));
                    }
                    added => {
                        added?;
                        readable.push((point, at));
                    }
                }
            }
        }
        Ok((reached, readable))
    }

    fn check_table(
        &self,
        pack: PackNumber,
        size_bytes: u64,
        needed: &RoaringBitmap,
    ) -> Result<Broken> {
        let Tables { table, names } = self.reader.tables(pack)?;
        let is_missing =
            |place: &u32| table.range(*place as usize).is_none_or(|range| range.end > size_bytes);
        let missing = needed.iter().filter(is_missing).map(|place| missing(pack, place));
        Ok(Broken { values: missing.collect(), are_names_damaged: names.is_none() })
    }

    /// Checks what is needed, and with `is_all` everything that the pack has.
    fn check_content(
        &self,
        pack: PackNumber,
        needed: &RoaringBitmap,
        is_all: bool,
        read_bytes: &Mutex<u64>,
    ) -> Result<Broken> {
        let name = object_name(pack);
        let content = self.reader.objects.get(&name, MOST_PACK_BYTES)?;
        *read_bytes.lock() += content.len() as u64;
        let tables = Tables::of(&self.reader.keys, pack, &content);
        let Tables { table, names } = tables.map_err(|error| error.context(&name))?;
        let mut checked = needed.clone();
        if is_all {
            let there = (0..table.count()).filter(|place| table.range(*place).is_some());
            checked.extend(there.map(|place| place as u32));
        }
        let mut chunk = vec![0; self.reader.keys.chunk_size()];
        let mut broken = HashMap::new();
        for place in checked {
            let id = id_of(pack, place as usize);
            let range = table.range(place as usize);
            match range.and_then(|range| content.get(range.start as usize..range.end as usize)) {
                None => broken.extend([missing(pack, place)]),
                Some(value) if self.reader.keys.authenticates(id, value, &mut chunk) => {}
                Some(_) => {
                    broken.insert(id, format!("{name}: value {place} is damaged"));
                }
            }
        }
        Ok(Broken { values: broken, are_names_damaged: names.is_none() })
    }

    /// Whether any of these packs is one of this repository.
    ///
    /// # Errors
    /// Errors of reaching the store: they say nothing about the packs.
    fn opens_any<'a>(&self, packs: impl Iterator<Item = &'a PackNumber>) -> Result<bool> {
        for pack in packs {
            match self.reader.tables(*pack) {
                Ok(_) => return Ok(true),
                Err(error) if is_damage(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Removes the broken values of a pack, and rebuilds its names; removes all of it, if none of its values can be found.
    fn mend(&self, busy: &Busy, pack: PackNumber, broken: &Broken) -> Result<Mended> {
        // One wrong answer does not justify a removal.
        let nothing = RoaringBitmap::new();
        let again = match self.check_content(pack, &nothing, true, &Mutex::new(0)) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let tables = self.reader.tables(pack);
                let is_known = !tables.is_err_and(|error| error.kind() == ErrorKind::Corrupt);
                if is_known || !broken.values.contains_key(&id_of(pack, 0)) {
                    return Ok(Mended::Nothing);
                }
                busy.check_time()?;
                self.reader.objects.delete(&object_name(pack))?;
                return Ok(Mended::Values);
            }
            checked => checked?,
        };
        let is_broken = |id: &u64| broken.values.contains_key(id) && again.values.contains_key(id);
        let are_names_damaged = broken.are_names_damaged && again.are_names_damaged;
        // A missing pack needs no removal.
        let mended = match (again.values.keys().any(is_broken), are_names_damaged) {
            (true, _) => Mended::Values,
            (false, true) => Mended::Names,
            (false, false) => return Ok(Mended::Nothing),
        };
        match self.rewrite_pack(busy, pack, |place| !is_broken(&id_of(pack, place))) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!("{}", error.full_message());
                Ok(Mended::Nothing)
            }
            put => put.map(|_| mended),
        }
    }

    /// The disks that need broken values.
    fn damages(
        &self,
        readable: &[(&PointDocument, usize)],
        broken: &[Broken],
    ) -> Result<Vec<BucketDamage>> {
        let mut damaged = Vec::new();
        let broken = || broken.iter().flat_map(|broken| &broken.values);
        if broken().next().is_none() {
            return Ok(damaged);
        }
        for (point, at) in readable {
            let mut reached = Reached::default();
            reached.add(&self.reader, point.disks[*at].root)?;
            let mut found = broken().filter(|(id, _)| reached.contains(**id));
            if let Some((_, reason)) = found.next() {
                let more = match found.count() {
                    0 => String::new(),
                    more => format!(", and {more} more"),
                };
                damaged.push(damage(point, *at, format!("{reason}{more}")));
            }
        }
        Ok(damaged)
    }
}

/// A pack that cannot be read lacks all of its values: those that are needed, and the first one, which stands for the others.
fn all_broken(pack: PackNumber, needed: &RoaringBitmap, checked: Result<Broken>) -> Result<Broken> {
    match checked {
        Err(error) if is_damage(&error) => {
            let why = error.full_message();
            let all = needed.iter().chain([0]);
            let values = all.map(|place| (id_of(pack, place as usize), why.clone())).collect();
            Ok(Broken { values, are_names_damaged: false })
        }
        checked => checked,
    }
}

fn is_damage(error: &Error) -> bool {
    [ErrorKind::Corrupt, ErrorKind::NotFound].contains(&error.kind())
}

fn missing(pack: PackNumber, place: u32) -> (u64, String) {
    let why = format!("{}: value {place} is missing", object_name(pack));
    (id_of(pack, place as usize), why)
}

fn damage(point: &PointDocument, disk: usize, reason: String) -> BucketDamage {
    let name = &point.disks[disk].name;
    BucketDamage { address: format!("{}/{}/{name}", point.machine, point.point), reason }
}
