//! Returning the space of what no point needs.
//!
//! # Order of writes, and crashes
//!
//! Everything that points lead to is found first; if one page of a map cannot be read, nothing is removed. Then packs of
//! which nothing is needed are removed, and those of which less than half is needed are rewritten without the rest: the numbers of the
//! values stay, and a removed one has the length 0. Each step is one request, and after each of them all points are whole.

use std::collections::HashSet;

use coldrise_block::{Error, ErrorKind, Result};
use roaring::RoaringBitmap;
use serde::Serialize;

use super::BucketRepository;
use super::busy::{Busy, Role};
use super::in_parallel::in_parallel;
use super::keys::Name;
use super::pack::{
    FOLDER, MOST_PACK_BYTES, PackNumber, Tables, assemble, damaged, id_of, number_of, object_name,
};
use super::pack_reader::REQUESTS;
use super::points::{FILES_FOLDER, FOLDER as POINTS, TRACES_FOLDER};
use super::walk::Reached;

/// A pack is rewritten only if that returns at least this many bytes.
const LEAST_RETURNED_BYTES: u64 = 256 << 10;

/// The result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompactReport {
    /// Packs that are there now.
    pub(crate) packs: u64,
    /// Their size, in bytes.
    pub size_bytes: u64,
    /// Packs that were removed.
    pub removed_packs: u64,
    /// Packs that were rewritten.
    pub rewritten_packs: u64,
    /// Bytes that were returned.
    pub returned_bytes: u64,
}

/// A pack, and what of it is needed.
struct Used {
    pack: PackNumber,
    size_bytes: u64,
    /// The places of its values.
    places: RoaringBitmap,
}

impl BucketRepository {
    /// Returns the space of what no point needs.
    ///
    /// Without any point, `is_meant` says that this is not an accident: nothing is needed then.
    ///
    /// # Errors
    /// `Busy` if a copy writes to the bucket; `Corrupt` if a point or a map cannot be read, or all points have vanished: then
    /// nothing is removed; errors of reaching the store.
    pub fn compact(&self, is_meant: bool) -> Result<CompactReport> {
        let busy = Busy::begin(&self.reader.objects, Role::Compactor)?;
        // Before the points are read: packs that are put later are not looked at.
        let listed = self.reader.objects.list(FOLDER)?;
        let mut reached = Reached::default();
        let points = self.all_points()?;
        if let Some((name, why)) = self.damaged_points().first_key_value() {
            let text = format!("{}: {name} cannot be read: {why}", self.place());
            return Err(Error::new(ErrorKind::Corrupt, text).advise(
                "nothing is removed, because its data may be needed: get the object back, or remove the point with coldrise \
                 bucket forget --damaged",
            ));
        }
        if points.is_empty() && !listed.is_empty() && !is_meant {
            let text = format!("{}: {} packs are there, and no points", self.place(), listed.len());
            return Err(Error::new(ErrorKind::Corrupt, text).advise(
                "nothing is removed: get the points back if the bucket keeps versions, run a copy again, or remove all objects below \
                 the prefix",
            ));
        }
        for point in points {
            for disk in &point.disks {
                reached.add(&self.reader, disk.root).map_err(|error| {
                    error.context(format_args!("{}/{}/{}", point.machine, point.point, disk.name))
                })?;
            }
        }
        let packs = listed.into_iter().filter_map(|listed| {
            let pack = number_of(&listed.name)?;
            let places = reached.packs.remove(&pack).unwrap_or_default();
            Some(Used { pack, size_bytes: listed.size_bytes, places })
        });
        let packs: Vec<_> = packs.collect();
        busy.check()?;
        let kept = in_parallel(&packs, REQUESTS, |used| self.compact_pack(&busy, used))?;
        self.remove_lost_files(&busy)?;
        self.remove_lost_traces(&busy)?;
        let mut report = CompactReport::default();
        for (before, kept_bytes) in packs.iter().zip(kept) {
            report.packs += u64::from(kept_bytes > 0);
            report.size_bytes += kept_bytes;
            report.returned_bytes += before.size_bytes - kept_bytes.min(before.size_bytes);
            report.removed_packs += u64::from(kept_bytes == 0);
            report.rewritten_packs += u64::from(kept_bytes > 0 && kept_bytes < before.size_bytes);
        }
        Ok(report)
    }

    /// Returns the size that a pack has then.
    fn compact_pack(&self, busy: &Busy, used: &Used) -> Result<u64> {
        if used.places.is_empty() {
            busy.check_time()?;
            self.reader.objects.delete(&object_name(used.pack))?;
            return Ok(0);
        }
        let table = self.reader.table(used.pack)?;
        let size = |place| table.range(place).map_or(0, |range| range.end - range.start);
        let needed: u64 =
            (0..table.count()).filter(|place| used.places.contains(*place as u32)).map(size).sum();
        let all: u64 = (0..table.count()).map(size).sum();
        match needed * 2 < all && all - needed >= LEAST_RETURNED_BYTES {
            true => {
                match self.rewrite_pack(busy, used.pack, |place| used.places.contains(place as u32))
                {
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        tracing::warn!("{}", error.full_message());
                        Ok(used.size_bytes)
                    }
                    put => put,
                }
            }
            false => Ok(used.size_bytes),
        }
    }

    /// Puts a pack with the values that are kept only, each with the name of its content. Returns its new size.
    ///
    /// # Errors
    /// `Corrupt` if one of these cannot be read: then the pack stays as it is.
    pub(super) fn rewrite_pack(
        &self,
        busy: &Busy,
        pack: PackNumber,
        is_kept: impl Fn(usize) -> bool,
    ) -> Result<u64> {
        let name = object_name(pack);
        let content = self.reader.objects.get(&name, MOST_PACK_BYTES)?;
        let keys = &self.reader.keys;
        let table = Tables::of(keys, pack, &content).map_err(|error| error.context(&name))?.table;
        let (mut sizes, mut names, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let mut chunk = vec![0; keys.chunk_size()];
        for place in 0..table.count() {
            let id = id_of(pack, place);
            let range = table.range(place).filter(|_| is_kept(place)).unwrap_or(0..0);
            let value = content.get(range.start as usize..range.end as usize).unwrap_or_default();
            names.push(match range.is_empty() {
                true => Name::default(),
                false => keys.identify(id, value, &mut chunk).ok_or_else(|| {
                    damaged("a value that is needed cannot be read").context(&name)
                })?,
            });
            sizes.push(value.len() as u32);
            values.extend_from_slice(value);
        }
        let rewritten = assemble(keys, pack, &sizes, &names, &values)?;
        let size_bytes = rewritten.len() as u64;
        // A copy that was let in meanwhile may count on what is removed.
        busy.check_time()?;
        self.reader.objects.put(&name, rewritten)?;
        Ok(size_bytes)
    }

    /// Removes traces of machines without points.
    fn remove_lost_traces(&self, busy: &Busy) -> Result<()> {
        let points = self.reader.objects.list(POINTS)?;
        for trace in self.reader.objects.list(TRACES_FOLDER)? {
            let folder = trace.name.replacen(TRACES_FOLDER, POINTS, 1) + "/";
            if !points.iter().any(|point| point.name.starts_with(&folder)) {
                busy.check_time()?;
                self.reader.objects.delete(&trace.name)?;
            }
        }
        Ok(())
    }

    /// Removes files of points that are not there.
    fn remove_lost_files(&self, busy: &Busy) -> Result<()> {
        let files = self.reader.objects.list(FILES_FOLDER)?;
        let points: HashSet<_> = self
            .reader
            .objects
            .list(POINTS)?
            .into_iter()
            .map(|listed| listed.name.replacen(POINTS, FILES_FOLDER, 1))
            .collect();
        for file in files.iter().filter(|listed| !points.contains(&listed.name)) {
            busy.check_time()?;
            self.reader.objects.delete(&file.name)?;
        }
        Ok(())
    }
}
