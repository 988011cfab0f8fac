//! The counters of a store: one sealed document in the `default` family.

use coldrise_block::{Error, ErrorKind, Result};

use crate::repository::Repository;
use crate::rocks::{Batch, Database, Family, LiveFile, ReadMode};

const KEY: &[u8] = b"state";
const PURPOSE: &str = "store state";
const VERSION: u64 = 1;
const FIELDS: usize = 5;

/// The plaintext of the document after its version (8 bytes): five numbers of 8
/// bytes, little endian, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreState {
    /// Chunks from this id on are not committed.
    pub(crate) next_chunk: u64,
    /// Pages from this id on are not committed.
    pub(crate) next_page: u64,
    /// Committed chunks.
    pub(crate) chunks: u64,
    /// Bytes of the values of committed chunks.
    pub(crate) stored_bytes: u64,
    /// Reserved, 0.
    pub(crate) reserved: u64,
}

pub(crate) fn is_key(key: &[u8]) -> bool {
    key == KEY
}

impl StoreState {
    pub(crate) const NEW: StoreState =
        StoreState { next_chunk: 1, next_page: 1, chunks: 0, stored_bytes: 0, reserved: 0 };

    /// The committed state; the initial state if the store is new.
    pub(crate) fn read(repository: &Repository) -> Result<Self> {
        Self::read_in(repository, repository.database())
    }

    /// Like [`StoreState::read`], but from a database handle that was opened in
    /// another way.
    pub(crate) fn read_in(repository: &Repository, database: &Database) -> Result<Self> {
        let Some(value) = database.get(Family::State, KEY, ReadMode::Cached)? else {
            return Ok(Self::NEW);
        };
        let corrupt =
            || Error::new(ErrorKind::Corrupt, "the state of the store has an unknown form");
        let plaintext = repository.decrypt_document(PURPOSE, &value)?;
        if plaintext.len() != 8 * (FIELDS + 1) {
            return Err(corrupt());
        }
        let field = |position: usize| -> u64 {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&plaintext[8 * position..8 * position + 8]);
            u64::from_le_bytes(bytes)
        };
        let state = StoreState {
            next_chunk: field(1),
            next_page: field(2),
            chunks: field(3),
            stored_bytes: field(4),
            reserved: field(5),
        };
        if field(0) != VERSION || state.next_chunk == 0 || state.next_page == 0 {
            return Err(corrupt());
        }
        Ok(state)
    }

    /// Sets the chunk counters to the totals of the files, durably. Leaves no log
    /// to replay at the next open.
    pub(crate) fn recount(&mut self, repository: &Repository) -> Result<()> {
        let database = repository.database();
        database.flush()?;
        let files = database.live_files(Family::Chunks)?;
        self.chunks = files.iter().map(LiveFile::values).sum();
        self.stored_bytes = files.iter().map(|file| file.properties.value_bytes).sum();
        let mut batch = database.batch();
        self.put(repository, &mut batch)?;
        repository.commit(batch)?;
        database.flush()
    }

    /// [`StoreState::recount`] for the counts that a gc beside a disk has left undone.
    pub(crate) fn count_after_gc(&mut self, repository: &Repository) {
        // Counters that are too high do no harm until the next gc.
        if let Err(error) = self.recount(repository) {
            tracing::warn!(error = %error.full_message(), "chunks were not counted again");
        }
    }

    /// Adds the state to `batch`.
    pub(crate) fn put(&self, repository: &Repository, batch: &mut Batch<'_>) -> Result<()> {
        repository.high_water().reach(self.next_chunk, self.next_page);
        let fields = [
            VERSION,
            self.next_chunk,
            self.next_page,
            self.chunks,
            self.stored_bytes,
            self.reserved,
        ];
        let plaintext: Vec<u8> = fields.iter().flat_map(|field| field.to_le_bytes()).collect();
        batch.put(Family::State, KEY, &repository.encrypt_document(PURPOSE, &plaintext)?)
    }
}
