//! What has arrived of the point that comes, and the notes about it.

use std::time::Instant;

use coldrise_block::Result;
use coldrise_session::{BegunCopy, BegunDisk};
use coldrise_store::{BackupTarget, MachineName, MapRoot, WriteCounts, WriteOptions};

use super::disk::{open_steps, OpenDisk};
use super::{Receiver, NOTE_INTERVAL};
use crate::far::Begun;

impl Receiver<'_, '_> {
    /// Prepares the next disk of the point that comes. Returns what has arrived of it before.
    pub(super) fn begin(
        &mut self,
        machine: &MachineName,
        mut coming: BegunCopy,
        mut disk: BegunDisk,
    ) -> Result<Option<Begun>> {
        let is_same = |known: &BegunCopy| {
            let facts = |copy: &BegunCopy| (copy.made_in.clone(), copy.point.clone());
            facts(known) == facts(&coming) && known.created_at_ms == coming.created_at_ms
        };
        let known = match self.begun.take().filter(is_same) {
            Some(begun) => Some(begun),
            None => {
                self.last_note = Instant::now();
                BegunCopy::of(&*self.far.repository()?, machine)?.filter(is_same)
            }
        };
        coming.disks = known.map(|known| known.disks).unwrap_or_default();
        let is_disk = |known: &BegunDisk| {
            (&known.name, known.size_bytes, known.base) == (&disk.name, disk.size_bytes, disk.base)
        };
        let found = coming.disks.iter().position(is_disk).map(|place| coming.disks.remove(place));
        coming.disks.retain(|known| known.name != disk.name);
        let begun = found
            .filter(|known| known.end_bytes > 0)
            .map(|known| Begun { root: known.root, end_bytes: known.end_bytes });
        if let Some(begun) = begun {
            (disk.root, disk.end_bytes) = (begun.root, begun.end_bytes);
        }
        coming.disks.push(disk);
        self.begun = Some(coming);
        Ok(begun)
    }

    /// Makes durable what has arrived, now and then.
    pub(super) fn note_in_time(&mut self) -> Result<()> {
        if self.last_note.elapsed() < NOTE_INTERVAL || self.begun.is_none() {
            return Ok(());
        }
        let open = self.disk.as_mut().filter(|disk| disk.is_changed);
        let Some(OpenDisk { size_bytes, chunk_bytes, end_bytes, base, .. }) = open else {
            return Ok(());
        };
        let (size_bytes, chunk_bytes, end_bytes) = (*size_bytes, *chunk_bytes, *end_bytes);
        let base = base.clone();
        let steps = open_steps(&mut self.disk);
        let Some((root, before)) = self.note_disk()? else { return Ok(()) };
        let target = self.far.start_disk(Some(root), size_bytes, WriteOptions::default())?;
        let is_changed = false;
        self.disk = Some(OpenDisk {
            target,
            size_bytes,
            chunk_bytes,
            steps,
            end_bytes,
            is_changed,
            before,
            base,
        });
        Ok(())
    }

    /// Makes durable what has arrived, and gives up the open disk.
    pub(super) fn note(&mut self) -> Result<()> {
        self.note_disk().map(|_| ())
    }

    /// As [`Receiver::note`]. Returns the map and the figures of a disk that has begun.
    fn note_disk(&mut self) -> Result<Option<(MapRoot, WriteCounts)>> {
        self.last_note = Instant::now();
        let mut noted = None;
        let open = self.disk.take();
        let Some(begun) = &mut self.begun else { return Ok(None) };
        if let (Some(mut open), Some(disk)) = (open, begun.disks.last_mut()) {
            open.keep_arrived()?;
            if open.is_changed {
                let (root, counts) = open.target.finish()?;
                // The last piece of a disk may end behind it.
                (disk.root, disk.end_bytes) = (root, open.end_bytes);
                noted = Some((root, open.before + counts));
            }
        }
        let (Some((machine, _)), true) =
            (&self.claim, begun.disks.iter().any(|disk| disk.end_bytes > 0))
        else {
            return Ok(noted);
        };
        let kept = BegunCopy {
            disks: begun.disks.iter().filter(|disk| disk.end_bytes > 0).cloned().collect(),
            ..begun.clone()
        };
        kept.save(&*self.far.repository()?, machine)?;
        Ok(noted)
    }
}
