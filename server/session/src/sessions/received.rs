//! Sessions that hold the marks of a session at another site.
//!
//! ```text
//!   go back to a mark that both have ─▶ write what changed there ─▶ mark, under the time that it has there ─▶ sync
//! ```
//!
//! Between two marks the disks are a mixture, as in `follow`. If the line or either side ends then, what has been written since the
//! newest mark is of no state: the next connection first goes back to a mark that both sides have. That is an older one
//! if the other site has lost writes that it had not flushed.

use std::sync::Arc;
use std::time::Instant;

use coldrise_block::{BLOCK_SIZE_BYTES, Disk, Error, ErrorKind, Result};
use coldrise_store::{LayerId, PointDocument, Repository, SessionName};

use crate::disks::layered_disk::{LayeredDisk, Stack};
use crate::layer::{Layer, LayerKeys, Lookup};
use crate::session_folder::document::{ReceivedFrom, SessionDisk, SessionDocument};
use crate::sessions::follow::{FollowProgress, Round, RoundTime};
use crate::sessions::publish::publish_received;
use crate::sessions::session::{Session, Use};
use crate::sessions::unpublish::unpublish;

/// Longest run of blocks that is read and written at once.
const MOST_BLOCKS: u64 = 64;

/// A session that takes the marks of a session at another site, open for that.
pub struct ReceivedSession {
    pub(super) session: Arc<Session>,
}

impl ReceivedSession {
    /// The newest session here that takes the marks of that one; `None` if there is none.
    ///
    /// # Errors
    /// Errors of reading the sessions' folder.
    pub fn find(repository: &Repository, from: &ReceivedFrom) -> Result<Option<SessionDocument>> {
        let documents = SessionDocument::readable(repository)?.into_iter().map(|(_, found)| found);
        let is_of = |document: &SessionDocument| {
            !document.is_ended && document.received.as_ref() == Some(from)
        };
        Ok(documents.filter(is_of).max_by_key(|document| document.created_at_ms))
    }

    /// Publishes a point that shows the state of a mark as a session that takes the later ones, and opens it. One without a mark,
    /// which an interrupted call left, ends.
    ///
    /// # Errors
    /// As for [`crate::publish`] and [`ReceivedSession::open`].
    pub fn publish(
        repository: &Arc<Repository>,
        point: &PointDocument,
        from: &ReceivedFrom,
        time_ns: u64,
        round: Option<Round>,
    ) -> Result<ReceivedSession> {
        let found = Self::find(repository, from)?;
        let after_ms = found.as_ref().map_or(0, |before| before.created_at_ms);
        if let Some(before) = found {
            let before = Self::open(repository, &before.name)?;
            if before.times_ns().is_empty() {
                let name = before.document().name;
                drop(before);
                unpublish(repository, &name, true)?;
            }
        }
        let document = publish_received(repository, point, from, after_ms)?;
        let received = Self::open(repository, &document.name)?;
        received.finish(time_ns, round)?;
        Ok(received)
    }

    /// Opens it.
    ///
    /// # Errors
    /// As for [`Session::open`]; `Busy` if another connection has it.
    pub fn open(repository: &Arc<Repository>, name: &SessionName) -> Result<ReceivedSession> {
        Ok(ReceivedSession { session: Session::open_for(repository, name, Use::Follow)? })
    }

    /// The session's document.
    pub fn document(&self) -> SessionDocument {
        self.session.document()
    }

    /// The times of its marks, in nanoseconds since 1970, the oldest first.
    pub fn times_ns(&self) -> Vec<u64> {
        self.session.marks_of(&self.document()).iter().map(|mark| mark.time_ns).collect()
    }

    /// Its disks, in the document's order.
    ///
    /// # Errors
    /// `Internal`.
    pub fn disks(&self) -> Result<Vec<Arc<dyn Disk>>> {
        self.document().disks.iter().map(|disk| self.session.disk(&disk.name)).collect()
    }

    /// Makes the disks as they were at a mark. The later marks stay. Takes time in proportion to the captured blocks.
    ///
    /// # Errors
    /// `NotFound` without such a mark; `Corrupt` if a layer is damaged.
    pub fn go_back(&self, time_ns: u64) -> Result<()> {
        let document = self.document();
        let _kept = self.session.keep_all_marks();
        let marks = self.session.marks_of(&document);
        let mark = marks.iter().find(|mark| mark.time_ns == time_ns).ok_or_else(|| {
            let text = format!("session {} has no mark of that time", document.name);
            Error::new(ErrorKind::NotFound, text)
        })?;
        let disks = self.session.layered().zip(&document.disks).zip(&mark.places);
        for ((disk, described), place) in disks {
            let (then, later) = self.as_of(disk, described, *place)?;
            for (first, count) in differences(&later, &then) {
                copy_blocks(&then, disk, first, count)?;
            }
        }
        Ok(())
    }

    /// The disk as of a mark, and the layers that were written since: the first one is that of the mark.
    fn as_of(
        &self,
        disk: &LayeredDisk,
        described: &SessionDisk,
        (id, sequence): (LayerId, u64),
    ) -> Result<(Marked, Vec<Arc<Layer>>)> {
        let stack = disk.hold();
        let ids = described.layers.iter().map(|layer| layer.id).chain([described.top]);
        let at = ids.zip(&stack.layers).position(|(found, _)| found == id);
        let at = at.ok_or_else(|| Error::new(ErrorKind::Internal, "a mark without its layer"))?;
        let keys = LayerKeys::of(self.session.repository(), &id);
        let marked = stack.layers[at].as_of(keys, sequence)?;
        let mut layers = stack.layers[..at].to_vec();
        layers.push(Arc::clone(&marked));
        let base = Arc::clone(&stack.base);
        let then = LayeredDisk::new(described.size_bytes, true, Stack { base, layers });
        Ok((Marked { then, layer: marked }, stack.layers[at..].to_vec()))
    }

    /// Makes the disks, which are as those there were at a mark, durable under its time.
    ///
    /// # Errors
    /// `Corrupt` if there is a later mark: it would get another time; `Poisoned` after a failed sync; `NoSpace`.
    pub fn finish(&self, time_ns: u64, round: Option<Round>) -> Result<()> {
        if self.session.newest_mark_ns().is_some_and(|newest_ns| newest_ns >= time_ns) {
            let text = "a time mark that is older than one that is there";
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let time = RoundTime { time_ns, at: Instant::now() };
        self.session.mark_round(round, Some(time))?;
        self.session.flush_time_marks()
    }

    /// Notes how far it is, for those who ask.
    pub fn note(&self, progress: FollowProgress) {
        self.session.note_progress_of_rounds(progress);
    }

    /// True once the session refuses writes.
    pub fn has_stopped(&self) -> bool {
        self.session.has_stopped()
    }
}

impl Drop for ReceivedSession {
    fn drop(&mut self) {
        self.session.stop_listening();
    }
}

/// A disk as of a mark, and its highest layer.
struct Marked {
    then: LayeredDisk,
    layer: Arc<Layer>,
}

/// The runs of blocks that are in another place than they were: in `later`, whose first layer is `then`'s highest one
/// with what was written since.
fn differences(later: &[Arc<Layer>], then: &Marked) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let mut block = 0;
    while let Some(next) = later.iter().filter_map(|layer| layer.next_captured(block)).min() {
        let above = later[1..].iter().any(|layer| layer.lookup(next) != Lookup::Below);
        if above || later[0].lookup(next) != then.layer.lookup(next) {
            match runs.last_mut() {
                Some((first, count)) if *first + *count == next && *count < MOST_BLOCKS => {
                    *count += 1
                }
                _ => runs.push((next, 1)),
            }
        }
        block = next + 1;
    }
    runs
}

fn copy_blocks(from: &Marked, to: &LayeredDisk, first: u64, count: u64) -> Result<()> {
    let offset_bytes = first * BLOCK_SIZE_BYTES;
    let end_bytes = (offset_bytes + count * BLOCK_SIZE_BYTES).min(to.size_bytes());
    let mut bytes = vec![0; (end_bytes - offset_bytes) as usize];
    from.then.read_at(&mut bytes, offset_bytes)?;
    to.write_at(&bytes, offset_bytes)
}
