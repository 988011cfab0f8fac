//! Rebase: the disks of a served session read a new chunk map instead of folded layers.
//!
//! ```text
//!   before   old map ◀ layer 1 ◀ layer 2 ◀ layer 3 ◀ top (takes writes)
//!   after    new map           ◀ layer 2 ◀ layer 3 ◀ top          layer 1 was folded
//! ```
//!
//! # Steps, and the state after each
//!
//! 1. The fold has committed the new map with its point, and holds the writer until it has the
//!    answer: no gc runs. *Nothing here has changed.*
//! 2. The session's mutex keeps seals out. The database reader catches up, and the new map is read
//!    once: an unreadable map rejects the rebase. *Nothing has changed.*
//! 3. Under the documents' lock the server checks that the fold is still there. If it has left, a
//!    gc may have deleted the map, and the rebase ends. *Nothing has changed.*
//! 4. One synced replacement of `session.json` names the new map and the layers above. *A crash
//!    leaves the old document or the new one; both describe the same bytes.*
//! 5. On one disk after the other, requests pause while the stack's base and lower layers are
//!    swapped. Requests before and after it read the same bytes. Then the generation of the top
//!    layer changes: readers in other processes open the session again, and find the new document.
//! 6. The documents' lock is released. Until here no process could delete a layer: deleting takes
//!    that lock and reads the documents under it. So it finds either the old document, which names
//!    all layers that are read here, or the new one after the swap.
//! 7. The layers' memory is released, and the fold gets its answer. It deletes the files that
//!    neither a document nor a lease names.

use std::sync::Arc;
use std::time::Instant;

use coldrise_block::{Context, Disk, Error, ErrorKind, Result};

use crate::disks::point_disk::base_disk;
use crate::locks::file_lock::FileLock;
use crate::session_folder::document::SessionDocument;
use crate::sessions::control::rebase_purpose;
use crate::sessions::folded_disks::FoldedDisks;

use super::Session;

impl Session {
    /// Reads the folded disks that `sealed` names instead of their layers. Returns false if no disk
    /// is over those layers. `check_asker` is called last before the commit.
    ///
    /// # Errors
    /// `Corrupt` if the request is forged or the new map cannot be read; the errors of
    /// `check_asker`. Nothing has changed then.
    pub(crate) fn rebase(
        &self,
        sealed: &[u8],
        check_asker: &dyn Fn() -> Result<()>,
    ) -> Result<bool> {
        let text = self.repository.decrypt_document(&rebase_purpose(&self.place), sealed)?;
        let folded: FoldedDisks = serde_json::from_slice(&text).map_err(|error| {
            Error::with_source(ErrorKind::Unsupported, "a request of an unknown form", error)
        })?;
        let mut document = self.document.lock();
        self.poison.check()?;
        self.repository.catch_up()?;
        let bases = self.new_bases(&document, &folded)?;
        if bases.iter().all(Option::is_none) {
            return Ok(false);
        }
        let documents = FileLock::documents(&self.repository)?;
        check_asker()?;
        let moved = folded.move_document(&self.repository, &self.place, true);
        let moved = moved.inspect_err(|_| self.stop_unless_unchanged(&document))?;
        let Some(next) = moved else { return Ok(false) };
        let mut released = Vec::new();
        for ((disk, base), (old, new)) in
            self.disks.iter().zip(bases).zip(document.disks.iter().zip(&next.disks))
        {
            let Some(base) = base else { continue };
            let folded_layers = old.layers.len() - new.layers.len();
            let start = Instant::now();
            let mut stack = disk.layered().pause();
            let layers: Vec<_> = stack.layers.drain(..folded_layers).collect();
            let base = std::mem::replace(&mut stack.base, base);
            if let Some(top) = stack.layers.last() {
                top.announce_rebase();
            }
            drop(stack);
            let paused_us = start.elapsed().as_micros();
            tracing::info!(session = %old.name, folded_layers, paused_us, "a disk reads a new chunk map");
            released.push((base, layers));
        }
        *document = next;
        drop((documents, document));
        drop(released);
        Ok(true)
    }

    /// The new base of each disk that moves.
    fn new_bases(
        &self,
        document: &SessionDocument,
        folded: &FoldedDisks,
    ) -> Result<Vec<Option<Arc<dyn Disk>>>> {
        let mut moved = document.disks.clone();
        folded.apply_to_session(&mut moved);
        let base = |(old, new): (&super::SessionDisk, &super::SessionDisk)| {
            if old.root == new.root && old.layers == new.layers {
                return Ok(None);
            }
            let base = base_disk(&self.repository, new.root, new.size_bytes);
            let readable = base.extents(0, new.size_bytes, 1);
            readable.context(|| format!("disk {}: the new chunk map", new.name))?;
            Ok(Some(base))
        };
        document.disks.iter().zip(&moved).map(base).collect()
    }
}
