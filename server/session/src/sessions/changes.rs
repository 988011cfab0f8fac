//! What changed in a session between two of its time marks: for a process that sends it to another site, while another
//! process serves the session.
//!
//! The marks are held by the process that serves the session, for [`HOLD`] from each request on. If it is a new process
//! since, or had to remove marks, its answer does not name them any more: then what was read meanwhile does not
//! count, and is read again for a later mark. While no process serves the session, nothing changes; a process that comes
//! changes the generation of the layers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coldrise_block::{BLOCK_SIZE_BYTES, Error, ErrorKind, Result, now_ms};
use coldrise_store::{LayerId, Repository, SessionName};
use serde::{Deserialize, Serialize};

use crate::layer::{ChangedLayer, LayerKeys, LayerWrites, Superblock, layer_damage};
use crate::paths::{SessionPaths, layer_path};
use crate::session_folder::document::{SessionDisk, SessionDocument};
use crate::sessions::control::ask_to_hold;
use crate::sessions::marks::{SessionMark, marks_in_layers};
use crate::sessions::session::{Session, Use};

/// How long marks are held after a request.
pub(crate) const HOLD: Duration = Duration::from_secs(120);

/// The newest mark of a session, and what is held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldMarks {
    /// The newest mark. It is held, too.
    pub newest: Option<SessionMark>,
    /// The times of the marks that were asked for and are there, in nanoseconds since 1970.
    pub held_ns: Vec<u64>,
    /// The newest mark has everything that was written until then, in milliseconds since 1970.
    pub current_ms: u64,
    /// The process that has the session, and its opening; 0 if none has it. Numbers of marks that were lost with a killed process
    /// are given again in the next opening.
    #[serde(default)]
    pub opening: u64,
}

/// A change of a disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The range reads as zeroes.
    Zeroes {
        /// Where it begins.
        offset_bytes: u64,
        /// Its length.
        length_bytes: u64,
    },
    /// A block of 4 KiB has other content: see [`SessionChanges::read`].
    Block {
        /// Where it begins.
        offset_bytes: u64,
        /// Where it is.
        place: BlockPlace,
    },
}

/// The place of a block in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPlace {
    layer: LayerId,
    slot: u32,
}

/// A reader of the changes of a session. It remembers the records that it has read: 20 bytes for each captured block.
pub struct SessionChanges {
    repository: Arc<Repository>,
    place: SessionPaths,
    document: SessionDocument,
    holder: u64,
    layers: HashMap<LayerId, ChangedLayer>,
    idle: Option<Idle>,
}

/// A session that no process serves.
struct Idle {
    /// The generations of its top layers: it is as it was while they are the same.
    generations: Vec<u64>,
    marks: Vec<SessionMark>,
    /// Something was written since the last mark.
    has_unmarked: bool,
    /// When it was found like this.
    since: Instant,
}

/// After this time the last writes of a session that no process serves get a mark.
const IDLE_PATIENCE: Duration = Duration::from_secs(3);

impl SessionChanges {
    /// The changes of an existing session.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn of(repository: &Arc<Repository>, name: &SessionName) -> Result<SessionChanges> {
        let mut holder = [0; 8];
        coldrise_store::random(&mut holder)?;
        Ok(SessionChanges {
            repository: Arc::clone(repository),
            place: SessionPaths::of(repository, name),
            document: SessionDocument::of(repository, name)?,
            holder: u64::from_le_bytes(holder),
            layers: HashMap::new(),
            idle: None,
        })
    }

    /// The session's document.
    pub fn document(&self) -> &SessionDocument {
        &self.document
    }

    /// Holds the newest mark and those of these times for two minutes, in place of those before.
    ///
    /// # Errors
    /// `NotFound` if the session was ended; `Busy` if its process does not answer; errors of reading its layers.
    pub fn hold(&mut self, times_ns: &[u64]) -> Result<HeldMarks> {
        let name = self.document.name.clone();
        if let Some(held) = ask_to_hold(&self.place, &name, self.holder, times_ns)? {
            self.idle = None;
            return Ok(held);
        }
        self.document = SessionDocument::of(&self.repository, &name)?;
        let idle = self.look_at_idle()?;
        if idle.has_unmarked && idle.since.elapsed() >= IDLE_PATIENCE {
            self.idle = None;
            self.mark_idle(&name)?;
        }
        let is_following = self.document.follows.is_some();
        let Idle { marks, has_unmarked, .. } = self.look_at_idle()?;
        let newest = marks.last().cloned();
        let newest_ms = newest.as_ref().map_or(0, |mark| mark.time_ns / 1_000_000);
        // The machine of a session that follows runs on while nothing reads it.
        let is_current = !has_unmarked && newest.is_some() && !is_following;
        let current_ms = if is_current { now_ms() } else { newest_ms };
        Ok(HeldMarks { newest, held_ns: there(marks, times_ns), current_ms, opening: 0 })
    }

    /// What is in the layers of a session that no process serves.
    fn look_at_idle(&mut self) -> Result<&Idle> {
        let disks = self.document.disks.clone();
        let generations = disks.iter().map(|disk| self.layer(disk, disk.top)?.generation());
        let generations = generations.collect::<Result<Vec<_>>>()?;
        let found = match self.idle.take().filter(|idle| idle.generations == generations) {
            Some(known) => known,
            None => {
                let marks = marks_in_layers(&self.repository, &self.document)?;
                let mut has_unmarked = false;
                for (at, disk) in disks.iter().enumerate() {
                    // A seal may have replaced the layer of the mark since.
                    let place = marks.last().and_then(|mark| mark.places.get(at));
                    let from = place.copied().unwrap_or((disk.top, 0));
                    has_unmarked |= !self.of_disk(disk, from, (disk.top, u64::MAX))?.is_empty();
                }
                Idle { generations, marks, has_unmarked, since: Instant::now() }
            }
        };
        Ok(self.idle.insert(found))
    }

    /// Makes a mark of the last writes. A process that serves the session by now makes them itself.
    fn mark_idle(&self, name: &SessionName) -> Result<()> {
        match Session::open_for(&self.repository, name, Use::Mark) {
            Ok(session) => session.mark_idle(),
            Err(error) if error.kind() == ErrorKind::Busy => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The marks that this session has now.
    ///
    /// # Errors
    /// As for [`crate::session_marks`].
    pub fn marks(&self) -> Result<Vec<SessionMark>> {
        crate::session_marks(&self.repository, &self.document.name).map(|found| found.marks)
    }

    /// What differs between two marks, for each disk: no block is in two changes. Takes time in proportion to the captured
    /// blocks. It counts only if `to` was held before the call and still is when the content has been read.
    ///
    /// # Errors
    /// `NotFound` if a layer between them was folded; `Corrupt` if a layer is damaged.
    pub fn between(&mut self, from: &SessionMark, to: &SessionMark) -> Result<Vec<Vec<Change>>> {
        let is_known = |document: &SessionDocument| {
            let is_top = |(disk, place): (&SessionDisk, &(LayerId, u64))| disk.top == place.0;
            document.disks.iter().zip(&to.places).all(is_top)
        };
        if !is_known(&self.document) {
            self.document = SessionDocument::of(&self.repository, &self.document.name)?;
            let ids: Vec<LayerId> = self.document.disks.iter().flat_map(all_layers).collect();
            self.layers.retain(|id, _| ids.contains(id));
        }
        let disks = self.document.disks.clone();
        let places = from.places.iter().zip(&to.places);
        disks.iter().zip(places).map(|(disk, (from, to))| self.of_disk(disk, *from, *to)).collect()
    }

    fn of_disk(
        &mut self,
        disk: &SessionDisk,
        from: (LayerId, u64),
        to: (LayerId, u64),
    ) -> Result<Vec<Change>> {
        let ids: Vec<LayerId> = all_layers(disk).collect();
        let at = |id: LayerId| ids.iter().position(|known| *known == id).ok_or_else(folded);
        let (first, last) = (at(from.0)?, at(to.0)?);
        let mut writes = Vec::new();
        for (at, id) in ids.iter().enumerate().take(last + 1).skip(first) {
            let sealed = disk.layers.get(at).map_or(u64::MAX, |layer| layer.sealed_sequence + 1);
            let after = if at == first { from.1 } else { 0 };
            let until = if at == last { to.1.min(sealed) } else { sealed };
            writes.push((*id, self.layer(disk, *id)?.between(after, until).map_err(layer_damage)?));
        }
        Ok(newest(writes))
    }

    /// Reads the 4 KiB of a changed block.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged, or if its mark is not held any more.
    pub fn read(&self, place: BlockPlace, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let layer = self.layers.get(&place.layer).ok_or_else(folded)?;
        layer.read(offset_bytes / BLOCK_SIZE_BYTES, place.slot, out)
    }

    fn layer(&mut self, disk: &SessionDisk, id: LayerId) -> Result<&mut ChangedLayer> {
        if !self.layers.contains_key(&id) {
            let keys = LayerKeys::of(&self.repository, &id);
            let superblock = Superblock { id: id.0, disk_size_bytes: disk.size_bytes };
            let path = layer_path(&self.repository, &id);
            let opened = ChangedLayer::open(&path, &superblock, keys).map_err(layer_damage)?;
            self.layers.insert(id, opened);
        }
        self.layers.get_mut(&id).ok_or_else(folded)
    }
}

/// The layers of a disk, the lowest first.
fn all_layers(disk: &SessionDisk) -> impl Iterator<Item = LayerId> + '_ {
    disk.layers.iter().map(|layer| layer.id).chain([disk.top])
}

fn folded() -> Error {
    Error::new(ErrorKind::NotFound, "a layer between the two marks was folded meanwhile")
}

/// The times of these marks that are among `times_ns`.
pub(crate) fn there(marks: &[SessionMark], times_ns: &[u64]) -> Vec<u64> {
    let is_there = |time: &&u64| marks.binary_search_by_key(*time, |mark| mark.time_ns).is_ok();
    times_ns.iter().filter(is_there).copied().collect()
}

/// The last write to each block. The layers come in their order, the lowest first.
fn newest(layers: Vec<(LayerId, LayerWrites)>) -> Vec<Change> {
    let (mut blocks, mut zeroes) = (Vec::new(), Vec::new());
    for (at, (id, writes)) in layers.into_iter().enumerate() {
        let place =
            |(sequence, block, slot)| (block, (at, sequence), BlockPlace { layer: id, slot });
        blocks.extend(writes.blocks.into_iter().map(place));
        zeroes.extend(writes.zeroes.into_iter().map(|zeroes| ((at, zeroes.sequence), zeroes)));
    }
    blocks.sort_unstable_by_key(|(block, written, _)| (*block, std::cmp::Reverse(*written)));
    blocks.dedup_by_key(|(block, ..)| *block);
    for (zeroed, range) in &zeroes {
        let first = blocks.partition_point(|(block, ..)| *block < range.first);
        let inside =
            blocks[first..].iter_mut().take_while(|(block, ..)| *block < range.first + range.count);
        // A block that was zeroed later is in no change but that range.
        inside.filter(|(_, written, _)| written < zeroed).for_each(|found| found.1 = (0, 0));
    }
    blocks.retain(|(_, written, _)| *written != (0, 0));
    let bytes = |blocks: u64| blocks * BLOCK_SIZE_BYTES;
    let mut changes = Vec::new();
    for (_, range) in &zeroes {
        let (mut from, end) = (range.first, range.first + range.count);
        let mut push = |from: u64, end: u64| {
            if from < end {
                let (offset_bytes, length_bytes) = (bytes(from), bytes(end - from));
                changes.push(Change::Zeroes { offset_bytes, length_bytes });
            }
        };
        let first = blocks.partition_point(|(block, ..)| *block < from);
        for (block, ..) in blocks[first..].iter().take_while(|(block, ..)| *block < end) {
            push(from, *block);
            from = block + 1;
        }
        push(from, end);
    }
    let block = |(block, _, place)| Change::Block { offset_bytes: bytes(block), place };
    changes.extend(blocks.into_iter().map(block));
    changes
}

#[cfg(test)]
#[path = "changes_tests.rs"]
mod tests;
