//! The keys of a bucket's repository, and what they seal.

use coldrise_block::Result;

use coldrise_block::hex;
use coldrise_store::format::Keys;
use coldrise_store::format::RepositoryConfig;
use coldrise_store::format::document;
use coldrise_store::format::{ChunkCodec, ChunkId, EncoderState};
use coldrise_store::format::{PageId, page_value, parse_page_value};
use coldrise_store::{MachineName, Passphrase, RepositoryId};

/// The name of a chunk's content: a keyed hash, or zeroes for a page.
pub(super) type Name = [u8; NAME_BYTES];
pub(super) const NAME_BYTES: usize = 16;

/// The keys and parameters of a bucket's repository.
pub(super) struct BucketKeys {
    pub(super) config: RepositoryConfig,
    keys: Keys,
    codec: ChunkCodec,
}

impl BucketKeys {
    pub(super) fn new(
        config: RepositoryConfig,
        passphrase: Option<&Passphrase>,
    ) -> Result<BucketKeys> {
        let keys = Keys::new(&*config.master(passphrase)?, config.is_encrypted())?;
        let codec = ChunkCodec::new(config.id, config.compression, config.chunk_size_bytes);
        Ok(BucketKeys { config, keys, codec })
    }

    pub(super) fn id(&self) -> &RepositoryId {
        &self.config.id
    }

    pub(super) fn chunk_size(&self) -> usize {
        self.config.chunk_size_bytes as usize
    }

    pub(super) fn encrypt(&self, purpose: &str, plaintext: &[u8]) -> Result<Vec<u8>> {
        document::encrypt(&self.keys.documents, self.config.id.as_bytes(), purpose, plaintext)
    }

    pub(super) fn decrypt(&self, purpose: &str, bytes: &[u8]) -> Result<Vec<u8>> {
        document::decrypt(&self.keys.documents, self.config.id.as_bytes(), purpose, bytes)
    }

    /// The name of a chunk's content.
    pub(super) fn name_of(&self, chunk: &[u8]) -> Name {
        let hash = blake3::keyed_hash(&self.keys.chunk_hash, blake3::hash(chunk).as_bytes());
        first_bytes(&hash)
    }

    /// Binds an entry of the local index to this repository.
    pub(super) fn index_tag(&self, name: &Name, id: u64) -> [u8; 8] {
        let mut hasher = blake3::Hasher::new_keyed(&self.keys.dedup_tag);
        hasher.update(name);
        hasher.update(&id.to_be_bytes());
        first_bytes(&hasher.finalize())
    }

    /// The folder of a machine's points: reveals no name.
    pub(super) fn folder_of(&self, machine: &MachineName) -> String {
        let hash = blake3::keyed_hash(&self.keys.name_hash, machine.as_str().as_bytes());
        hex::encode(&first_bytes::<NAME_BYTES>(&hash))
    }

    /// The hash of the files that a point carries.
    pub(super) fn hash_of_files(&self, files: &[u8]) -> String {
        let key = self.keys.export("files of a point", b"");
        hex::encode(blake3::keyed_hash(&key, files).as_bytes())
    }

    pub(super) fn encoder(&self) -> Result<EncoderState> {
        self.codec.encoder()
    }

    pub(super) fn encode(
        &self,
        state: &mut EncoderState,
        id: ChunkId,
        chunk: &[u8],
    ) -> Result<Vec<u8>> {
        let mut value = Vec::new();
        self.codec.encode(state, &self.keys.chunks, id, chunk, &mut value)?;
        Ok(value)
    }

    pub(super) fn decode(&self, id: ChunkId, value: &[u8], chunk: &mut [u8]) -> Result<()> {
        self.codec.decode(&self.keys.chunks, id, value, chunk)
    }

    /// The name that the value of that number has in its pack; `None` if it is neither chunk nor page. `chunk`, of the chunk size,
    /// is overwritten.
    pub(super) fn identify(&self, id: u64, value: &[u8], chunk: &mut [u8]) -> Option<Name> {
        match self.decode(id, value, chunk) {
            Ok(()) => Some(self.name_of(chunk)),
            Err(_) => self.page(id, *value.get(1)?, value).ok().map(|_| Name::default()),
        }
    }

    /// Whether a value is the chunk or page of that number. `chunk`, of the chunk size, is overwritten.
    pub(super) fn authenticates(&self, id: u64, value: &[u8], chunk: &mut [u8]) -> bool {
        let is_page = |level: &u8| self.page(id, *level, value).is_ok();
        self.decode(id, value, chunk).is_ok() || value.get(1).is_some_and(is_page)
    }

    pub(super) fn page_value(&self, id: PageId, level: u8, slots: &[u64]) -> Result<Vec<u8>> {
        page_value(&self.config.id, &self.keys.pages, id, level, slots)
    }

    pub(super) fn page(&self, id: PageId, level: u8, value: &[u8]) -> Result<Vec<u64>> {
        parse_page_value(&self.config.id, &self.keys.pages, id, level, value)
    }
}

fn first_bytes<const N: usize>(hash: &blake3::Hash) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&hash.as_bytes()[..N]);
    bytes
}
