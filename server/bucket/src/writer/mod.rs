//! Writing points to a bucket.
//!
//! # Order of writes, and crashes
//!
//! 1. Values go into packs, and packs into the bucket. *A crash leaves* packs that no point names. The next copy finds their
//!    contents by the packs' names and does not send them again; a compaction removes what is still not named then.
//! 2. A pack that is there is added to the local index. *A crash leaves* an index without it: the next copy reads its names.
//! 3. The end of a disk waits for all of its packs, and gives the map's root.
//! 4. The files that a point carries, and then its document. *A crash leaves* files without a point, which a compaction removes.

mod disk;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use coldrise_block::{ErrorKind, Result};
use parking_lot::Mutex;

use self::disk::BucketDiskWriter;
use crate::BucketRepository;
use crate::busy::{Busy, Role};
use crate::in_parallel::in_parallel;
use crate::index::Index;
use crate::keys::Name;
use crate::pack::{Pack, PackBuilder};
use crate::pack_reader::PackReader;
use crate::uploads::Uploads;
use crate::walk::Reached;
use coldrise_block::hex;
use coldrise_store::MapRoot;
use coldrise_store::format::EncoderState;
use coldrise_store::{BackupTarget, DiskTarget, PointDocument, Repository, WriteOptions};

/// Writes points to a bucket. It sends some packs at once, and holds at most six in memory.
pub struct BucketWriter {
    repository: Arc<BucketRepository>,
    pub(super) reader: Arc<PackReader>,
    known: Arc<Known>,
    filling: Mutex<Filling>,
    encoders: Mutex<Vec<EncoderState>>,
    uploads: Uploads,
    busy: Busy,
}

/// Which contents are there.
struct Known {
    /// Those in packs that are not in the bucket yet.
    fresh: Mutex<HashMap<Name, u64>>,
    index: Mutex<Index>,
}

/// The packs that are being filled. Pages have one of their own: who reads a disk reads them side by side.
struct Filling {
    chunks: PackBuilder,
    pages: PackBuilder,
}

/// The outcome of a chunk.
pub(super) enum Stored {
    Known(u64),
    New { id: u64, stored_bytes: u64 },
}

impl BucketWriter {
    /// Begins to write. The index of the bucket's contents is in the directory of `local`.
    ///
    /// # Errors
    /// `Busy` if the bucket is being compacted, or another copy of `local` writes to it; errors of reaching the store.
    pub fn begin(repository: &Arc<BucketRepository>, local: &Repository) -> Result<BucketWriter> {
        let folder = local.path().join("buckets").join(hex::encode(repository.id().as_bytes()));
        BucketWriter::begin_in(repository, &folder)
    }

    pub(super) fn begin_in(
        repository: &Arc<BucketRepository>,
        folder: &Path,
    ) -> Result<BucketWriter> {
        let reader = Arc::clone(&repository.reader);
        let busy = Busy::begin(&reader.objects, Role::Writer)?;
        let index = Mutex::new(Index::open(folder, &reader)?);
        let known = Arc::new(Known { fresh: Mutex::default(), index });
        let uploads = {
            let (known, reader_here) = (Arc::clone(&known), Arc::clone(&reader));
            Uploads::start(&reader, move |pack| known.add(&reader_here, pack))
        };
        let filling = Filling { chunks: PackBuilder::new()?, pages: PackBuilder::new()? };
        Ok(BucketWriter {
            repository: Arc::clone(repository),
            reader,
            known,
            filling: Mutex::new(filling),
            encoders: Mutex::default(),
            uploads,
            busy,
        })
    }

    /// The repository.
    pub fn repository(&self) -> &Arc<BucketRepository> {
        &self.repository
    }

    /// Whether all that a point leads to is there, so that it can be a base.
    ///
    /// # Errors
    /// Errors of reaching the store.
    pub fn is_whole(&self, point: &PointDocument) -> Result<bool> {
        let name = self.repository.name_of_point(&point.machine, &point.point);
        let index = self.known.index.lock();
        if index.is_whole(&name)? {
            return Ok(true);
        }
        let mut reached = Reached::default();
        for disk in &point.disks {
            match reached.add(&self.reader, disk.root) {
                Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(false),
                added => added?,
            }
        }
        for id in reached.ids() {
            if !index.has(&self.reader, id)? {
                return Ok(false);
            }
        }
        index.note_whole(&name)?;
        Ok(true)
    }

    /// Bytes that are on their way to the bucket.
    pub fn pending_bytes(&self) -> u64 {
        self.uploads.pending_bytes()
    }

    /// Stores chunks that have no other content than zeroes; few enough for one pack. What became of each.
    pub(super) fn store(&self, chunks: &[&[u8]]) -> Result<Vec<Stored>> {
        let keys = &self.reader.keys;
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        let names = in_parallel(chunks, threads, |chunk| Ok(keys.name_of(chunk)))?;
        let mut filling = self.filling.lock();
        if filling.chunks.is_full_for(chunks.len()) {
            self.send(&mut filling.chunks)?;
        }
        let mut places = Vec::with_capacity(chunks.len());
        let (mut new, mut numbered) = (Vec::new(), HashMap::new());
        for (chunk, name) in chunks.iter().zip(names) {
            let known = match numbered.get(&name) {
                Some(id) => Some(*id),
                None => self.known.find(&self.reader, &name)?,
            };
            let id = known.unwrap_or(filling.chunks.next_id() + new.len() as u64);
            if known.is_none() {
                numbered.insert(name, id);
                new.push((id, name, *chunk));
            }
            places.push((id, known.is_some()));
        }
        let values = in_parallel(&new, threads, |(id, _, chunk)| {
            let kept = self.encoders.lock().pop();
            let mut encoder = kept.map_or_else(|| keys.encoder(), Ok)?;
            let value = keys.encode(&mut encoder, *id, chunk);
            self.encoders.lock().push(encoder);
            value
        })?;
        let mut sizes = values.iter().map(|value| value.len() as u64);
        for ((_, name, _), value) in new.iter().zip(&values) {
            filling.chunks.add(*name, value);
        }
        // Not before: after a failure these numbers are given to other chunks.
        self.known.fresh.lock().extend(numbered);
        let stored = places.into_iter().map(|(id, is_known)| match is_known {
            true => Stored::Known(id),
            false => Stored::New { id, stored_bytes: sizes.next().unwrap_or(0) },
        });
        Ok(stored.collect())
    }

    /// Stores a page of a map.
    pub(super) fn store_page(&self, level: u8, slots: &[u64]) -> Result<u64> {
        let mut filling = self.filling.lock();
        if filling.pages.is_full_for(1) {
            self.send(&mut filling.pages)?;
        }
        let id = filling.pages.next_id();
        let value = self.reader.keys.page_value(id, level, slots)?;
        filling.pages.add(Name::default(), &value);
        Ok(id)
    }

    /// Sends everything, and waits until it is in the bucket.
    pub(super) fn flush(&self) -> Result<()> {
        let mut filling = self.filling.lock();
        self.send(&mut filling.chunks)?;
        self.send(&mut filling.pages)?;
        drop(filling);
        self.uploads.wait()
    }

    fn send(&self, filling: &mut PackBuilder) -> Result<()> {
        if filling.is_empty() {
            return Ok(());
        }
        let full = std::mem::replace(filling, PackBuilder::new()?);
        self.uploads.push(full.finish(&self.reader.keys)?)
    }
}

impl Known {
    fn find(&self, reader: &PackReader, name: &Name) -> Result<Option<u64>> {
        // In this order: what leaves `fresh` is in the index before.
        let fresh = self.fresh.lock().get(name).copied();
        match fresh {
            Some(id) => Ok(Some(id)),
            None => self.index.lock().find(reader, name),
        }
    }

    fn add(&self, reader: &PackReader, pack: &Pack) -> Result<()> {
        self.index.lock().add(reader, pack)?;
        let mut fresh = self.fresh.lock();
        for name in &pack.names {
            fresh.remove(name);
        }
        Ok(())
    }
}

impl BackupTarget for BucketWriter {
    fn chunk_size_bytes(&self) -> u32 {
        self.repository.chunk_size_bytes()
    }

    fn start_disk(
        &self,
        base: Option<MapRoot>,
        size_bytes: u64,
        _options: WriteOptions,
    ) -> Result<Box<dyn DiskTarget + '_>> {
        let base = base.unwrap_or(MapRoot::EMPTY);
        Ok(Box::new(BucketDiskWriter::start(self, base, size_bytes)?))
    }

    fn put_point(&self, document: &PointDocument, files: Option<&[u8]>) -> Result<()> {
        self.uploads.wait()?;
        self.busy.check()?;
        self.repository.put_point(document, files)?;
        let name = self.repository.name_of_point(&document.machine, &document.point);
        self.known.index.lock().note_whole(&name)
    }
}
