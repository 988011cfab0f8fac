//! One disk on its way over a line.

use std::sync::Arc;

use coldrise_block::{Disk, Result};
use coldrise_store::{DiskTarget, MapRoot, WriteCounts};

use super::line_remote::LineRemote;
use super::messages::{Answer, Ask, BATCH_BYTES, Names, ZEROES, broken};
use super::pack::Batch;

/// Cuts what is written into pieces, names them, and offers them in batches.
pub(super) struct LineDisk<'a> {
    remote: &'a LineRemote,
    size_bytes: u64,
    chunk_bytes: usize,
    names: Names,
    batch: Batch,
    /// Its base at the other site, read here.
    base: Option<Arc<dyn Disk>>,
    /// Everything before it was offered, or is equal to the base.
    end_bytes: u64,
    /// A hole that may continue.
    hole: Option<(u64, u64)>,
    is_over: bool,
}

impl LineDisk<'_> {
    /// A disk of which what lies before `end_bytes` is there already.
    pub(super) fn new(
        remote: &LineRemote,
        size_bytes: u64,
        end_bytes: u64,
        base: Option<Arc<dyn Disk>>,
    ) -> LineDisk<'_> {
        use coldrise_store::BackupTarget;
        LineDisk {
            remote,
            size_bytes,
            chunk_bytes: remote.chunk_size_bytes() as usize,
            names: Names { number: remote.next_number(), ..Names::default() },
            batch: empty(&base),
            base,
            end_bytes,
            hole: None,
            is_over: false,
        }
    }

    /// Counts what was passed over. Offsets ascend.
    fn reach(&mut self, start_bytes: u64, end_bytes: u64) {
        let unchanged_bytes = start_bytes.saturating_sub(self.end_bytes);
        self.remote.count(|traffic| traffic.unchanged_bytes += unchanged_bytes);
        self.end_bytes = end_bytes.max(self.end_bytes);
    }

    fn add(&mut self, offset_bytes: u64, piece: &[u8]) -> Result<()> {
        let start = self.batch.bytes.len();
        let mut name = ZEROES;
        if piece.iter().any(|byte| *byte != 0) {
            self.batch.bytes.extend_from_slice(piece);
            // The last piece of a disk: the rest of the chunk is zeroes.
            self.batch.bytes.resize(start + self.chunk_bytes, 0);
            name = *blake3::hash(&self.batch.bytes[start..]).as_bytes();
        } else {
            self.remote.count(|traffic| traffic.zero_bytes += piece.len() as u64);
        }
        self.batch.pieces.push(start..self.batch.bytes.len());
        self.batch.offsets.push(offset_bytes);
        self.names.offsets.push(offset_bytes);
        self.names.names.push(name);
        if (self.batch.pieces.len() + 1) * self.chunk_bytes > BATCH_BYTES {
            self.offer()?;
        }
        Ok(())
    }

    /// Sends what is gathered.
    fn offer(&mut self) -> Result<()> {
        if !self.batch.pieces.is_empty() {
            let next = Names { number: self.remote.next_number(), ..Names::default() };
            let names = std::mem::replace(&mut self.names, next);
            let batch = std::mem::replace(&mut self.batch, empty(&self.base));
            self.remote.offer(names.number, batch, names.encode(self.chunk_bytes as u64))?;
        }
        Ok(())
    }

    fn end_hole(&mut self) -> Result<()> {
        match self.hole.take() {
            Some((offset_bytes, length_bytes)) => {
                self.remote.tell(&Ask::Hole { offset_bytes, length_bytes }, &[])
            }
            None => Ok(()),
        }
    }
}

/// A batch without pieces.
fn empty(base: &Option<Arc<dyn Disk>>) -> Batch {
    Batch { bytes: Vec::new(), pieces: Vec::new(), offsets: Vec::new(), base: base.clone() }
}

impl DiskTarget for LineDisk<'_> {
    fn buffer(&mut self) -> Vec<u8> {
        Vec::new()
    }

    fn write(&mut self, offset_bytes: u64, bytes: Vec<u8>) -> Result<()> {
        self.end_hole()?;
        self.reach(offset_bytes, offset_bytes + bytes.len() as u64);
        let mut offset_bytes = offset_bytes;
        for piece in bytes.chunks(self.chunk_bytes) {
            self.add(offset_bytes, piece)?;
            offset_bytes += piece.len() as u64;
        }
        self.remote.gathered(self.batch.bytes.len());
        Ok(())
    }

    fn write_hole(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.offer()?;
        self.reach(offset_bytes, offset_bytes + length_bytes);
        self.remote.count(|traffic| traffic.zero_bytes += length_bytes);
        match &mut self.hole {
            Some((start, length)) if *start + *length == offset_bytes => *length += length_bytes,
            _ => {
                self.end_hole()?;
                self.hole = Some((offset_bytes, length_bytes));
            }
        }
        Ok(())
    }

    fn counts(&self) -> WriteCounts {
        WriteCounts::default()
    }

    fn finish(mut self: Box<Self>) -> Result<(MapRoot, WriteCounts)> {
        self.end_hole()?;
        self.offer()?;
        let answer = self.remote.ask(&Ask::Finish, &[])?;
        self.is_over = true;
        self.reach(self.size_bytes, self.size_bytes);
        match answer {
            Answer::Finished { root, counts } => Ok((root, counts)),
            _ => Err(broken(&format!("no end of a disk of {} bytes", self.size_bytes))),
        }
    }
}

impl Drop for LineDisk<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.remote.forget_batches();
            // The other side gives a disk up with the line, too.
            let _ = self.remote.tell(&Ask::Abandon, &[]);
        }
    }
}
