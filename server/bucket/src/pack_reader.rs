//! Reading the values of packs.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::in_parallel::in_parallel;
use super::keys::BucketKeys;
use super::pack::{HEAD_BYTES, Head, PackNumber, Table, Tables, damaged, object_name, parts_of};
use coldrise_objects::Objects;
use coldrise_store::format::PageCache;
use coldrise_store::format::{Page, PageId, PageSource};

const VERIFY: &str = "coldrise bucket verify shows what it affects";

/// Requests at the same time.
pub(super) const REQUESTS: usize = 8;
/// The first read of a pack: most have their sizes in it, and small ones everything.
const FIRST_BYTES: u64 = 64 << 10;
/// Pages of a disk lie side by side; they are read in blocks of this size.
const BLOCK_BYTES: u64 = 128 << 10;
/// Values with less than this between them are read in one request.
const GAP_BYTES: u64 = 64 << 10;
/// Most bytes of one request for values.
const MOST_REQUEST_BYTES: u64 = 4 << 20;
const TABLE_CACHE_BYTES: u64 = 32 << 20;
const BLOCK_CACHE_BYTES: u64 = 32 << 20;
const PAGE_CACHE_BYTES: u64 = 16 << 20;

#[derive(Clone)]
struct Bytes;

impl Weighter<PackNumber, Arc<Table>> for Bytes {
    fn weight(&self, _: &PackNumber, table: &Arc<Table>) -> u64 {
        table.count() as u64 * 4 + 64
    }
}

impl Weighter<(PackNumber, u64), Arc<Vec<u8>>> for Bytes {
    fn weight(&self, _: &(PackNumber, u64), block: &Arc<Vec<u8>>) -> u64 {
        block.len() as u64 + 64
    }
}

/// The values of a bucket, and what is kept of them in memory.
pub(super) struct PackReader {
    pub(super) objects: Arc<dyn Objects>,
    pub(super) keys: BucketKeys,
    tables: Cache<PackNumber, Arc<Table>, Bytes>,
    /// Parts of packs, by number and block.
    blocks: Cache<(PackNumber, u64), Arc<Vec<u8>>, Bytes>,
    pages: PageCache,
}

/// A chunk that is wanted: its number, and where its content goes.
pub(super) struct Wanted<'a> {
    pub(super) id: u64,
    pub(super) chunk: &'a mut [u8],
}

/// Chunks that lie close to each other in one pack.
struct Request<'a> {
    pack: PackNumber,
    range: Range<u64>,
    chunks: Vec<(Range<u64>, Wanted<'a>)>,
}

impl PackReader {
    pub(super) fn new(objects: Arc<dyn Objects>, keys: BucketKeys) -> PackReader {
        PackReader {
            objects,
            keys,
            tables: Cache::with_weighter(4096, TABLE_CACHE_BYTES, Bytes),
            blocks: Cache::with_weighter(256, BLOCK_CACHE_BYTES, Bytes),
            pages: PageCache::new(PAGE_CACHE_BYTES),
        }
    }

    /// Reads chunks, each into its place.
    ///
    /// # Errors
    /// `Corrupt`, naming the pack, if one is missing or damaged; errors of reaching the store.
    pub(super) fn read(&self, wanted: Vec<Wanted<'_>>) -> Result<()> {
        let requests: Vec<_> =
            self.requests(wanted)?.into_iter().map(parking_lot::Mutex::new).collect();
        in_parallel(&requests, REQUESTS, |request| {
            let mut request = request.lock();
            self.fetch(&mut request)
        })?;
        Ok(())
    }

    fn requests<'a>(&self, wanted: Vec<Wanted<'a>>) -> Result<Vec<Request<'a>>> {
        let packs: BTreeSet<_> = wanted.iter().map(|wanted| parts_of(wanted.id).0).collect();
        let unknown: Vec<_> =
            packs.into_iter().filter(|pack| self.tables.peek(pack).is_none()).collect();
        in_parallel(&unknown, REQUESTS, |pack| self.table(*pack))?;
        let mut placed = Vec::with_capacity(wanted.len());
        for wanted in wanted {
            let (pack, place) = parts_of(wanted.id);
            let range = self.table(pack)?.range(place).ok_or_else(|| lost(wanted.id))?;
            placed.push((pack, range, wanted));
        }
        placed.sort_by_key(|(pack, range, _)| (*pack, range.start));
        let mut requests: Vec<Request<'a>> = Vec::new();
        for (pack, range, wanted) in placed {
            if let Some(last) = requests.last_mut() {
                let is_near = last.pack == pack
                    && range.start.saturating_sub(last.range.end) <= GAP_BYTES
                    && range.end - last.range.start <= MOST_REQUEST_BYTES;
                if is_near {
                    last.range.end = last.range.end.max(range.end);
                    last.chunks.push((range, wanted));
                    continue;
                }
            }
            requests.push(Request { pack, range: range.clone(), chunks: vec![(range, wanted)] });
        }
        Ok(requests)
    }

    /// Reads the chunks of a request. If one is not where it was, a compaction may have rewritten the pack: looks again.
    fn fetch(&self, request: &mut Request<'_>) -> Result<()> {
        match self.try_fetch(request) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.tables.remove(&request.pack);
                let table = self.table(request.pack)?;
                for (range, wanted) in &mut request.chunks {
                    let place = parts_of(wanted.id).1;
                    *range = table.range(place).ok_or_else(|| lost(wanted.id))?;
                }
                let starts = request.chunks.iter().map(|(range, _)| range.start);
                let ends = request.chunks.iter().map(|(range, _)| range.end);
                request.range = starts.min().unwrap_or(0)..ends.max().unwrap_or(0);
                self.try_fetch(request)
            }
            read => read,
        }
    }

    fn try_fetch(&self, request: &mut Request<'_>) -> Result<()> {
        let Range { start, end } = request.range;
        let name = object_name(request.pack);
        let content = self
            .objects
            .get_range(&name, start, end - start)
            .map_err(|error| self.lost_pack(request.pack, error))?;
        for (range, wanted) in &mut request.chunks {
            let place = (range.start - start) as usize..(range.end - start) as usize;
            let is_read = content
                .get(place)
                .is_some_and(|value| self.keys.decode(wanted.id, value, wanted.chunk).is_ok());
            if !is_read {
                let text = format!("{name}: value {} is damaged", parts_of(wanted.id).1);
                return Err(Error::new(ErrorKind::Corrupt, text).advise(VERIFY));
            }
        }
        Ok(())
    }

    /// A missing pack is damage.
    fn lost_pack(&self, pack: PackNumber, error: Error) -> Error {
        match error.kind() {
            ErrorKind::NotFound => {
                let text = format!("{}: the pack {pack:012x} is missing", self.objects.place());
                Error::new(ErrorKind::Corrupt, text).advise(VERIFY)
            }
            _ => error,
        }
    }

    /// Where the values of a pack lie.
    pub(super) fn table(&self, pack: PackNumber) -> Result<Arc<Table>> {
        if let Some(table) = self.tables.get(&pack) {
            return Ok(table);
        }
        let (head, first) = self.head(pack)?;
        let sizes = self.part(pack, &head.sizes, &first)?;
        let table = Table::open(&self.keys, pack, &head, &sizes);
        let table = Arc::new(table.map_err(|error| error.context(object_name(pack)))?);
        self.tables.insert(pack, Arc::clone(&table));
        Ok(table)
    }

    /// The tables at the beginning of a pack. They are not cached.
    ///
    /// # Errors
    /// `Corrupt` if none of its values can be found; errors of reaching the store.
    pub(super) fn tables(&self, pack: PackNumber) -> Result<Tables> {
        let (head, first) = self.head(pack)?;
        let sizes = self.part(pack, &head.sizes, &first)?;
        let names = self.part(pack, &head.names, &first)?;
        Tables::open(&self.keys, pack, &head, &sizes, &names)
            .map_err(|error| error.context(object_name(pack)))
    }

    /// The head of a pack, and its first bytes.
    fn head(&self, pack: PackNumber) -> Result<(Head, Vec<u8>)> {
        let name = object_name(pack);
        let first = self.objects.get_range(&name, 0, FIRST_BYTES);
        let first = first.map_err(|error| self.lost_pack(pack, error))?;
        let head = Head::parse(&first[..HEAD_BYTES.min(first.len())]);
        Ok((head.map_err(|error| error.context(name))?, first))
    }

    /// A part of a pack of which the first bytes are here.
    fn part(&self, pack: PackNumber, range: &Range<u64>, first: &[u8]) -> Result<Vec<u8>> {
        if let Some(part) = first.get(range.start as usize..range.end as usize) {
            return Ok(part.to_vec());
        }
        self.objects
            .get_range(&object_name(pack), range.start, range.end - range.start)
            .map_err(|error| self.lost_pack(pack, error))
    }

    /// As for chunks, looks again if a page is not where it was.
    fn load_page(&self, id: PageId, level: u8) -> Result<Page> {
        match self.try_load_page(id, level) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let (pack, _) = parts_of(id);
                self.tables.remove(&pack);
                self.blocks.retain(|(kept, _), _| *kept != pack);
                self.try_load_page(id, level)
            }
            read => read,
        }
    }

    fn try_load_page(&self, id: PageId, level: u8) -> Result<Page> {
        let (pack, place) = parts_of(id);
        let range = self.table(pack)?.range(place).ok_or_else(|| lost(id))?;
        let mut value = Vec::with_capacity((range.end - range.start) as usize);
        for block in range.start / BLOCK_BYTES..=(range.end - 1) / BLOCK_BYTES {
            let content = self.block(pack, block)?;
            let base = block * BLOCK_BYTES;
            let from = range.start.max(base) - base;
            let to = (range.end.min(base + BLOCK_BYTES) - base) as usize;
            let part = content.get(from as usize..to);
            value.extend_from_slice(part.ok_or_else(|| damaged("it is too short"))?);
        }
        let page: Page = match self.keys.page(id, level, &value) {
            Ok(slots) => slots.into(),
            Err(_) => {
                let text = format!("{}: the page {place} is damaged", object_name(pack));
                return Err(Error::new(ErrorKind::Corrupt, text).advise(VERIFY));
            }
        };
        self.pages.insert(id, level, Arc::clone(&page));
        Ok(page)
    }

    fn block(&self, pack: PackNumber, block: u64) -> Result<Arc<Vec<u8>>> {
        if let Some(content) = self.blocks.get(&(pack, block)) {
            return Ok(content);
        }
        let name = object_name(pack);
        let content = self.objects.get_range(&name, block * BLOCK_BYTES, BLOCK_BYTES);
        let content = Arc::new(content.map_err(|error| self.lost_pack(pack, error))?);
        self.blocks.insert((pack, block), Arc::clone(&content));
        Ok(content)
    }
}

impl PageSource for PackReader {
    fn page(&self, id: PageId, level: u8) -> Result<Page> {
        match self.pages.get(id, level) {
            Some(page) => Ok(page),
            None => self.load_page(id, level),
        }
    }
}

fn lost(id: u64) -> Error {
    let (pack, place) = parts_of(id);
    let text = format!("the pack {pack:012x} does not have its value {place} any more");
    Error::new(ErrorKind::Corrupt, text).advise(VERIFY)
}
