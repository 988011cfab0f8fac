//! Chunks found by the BLAKE3 of their content, as another repository names them.

use coldrise_block::{ErrorKind, Result};

use crate::dedup;
use crate::gc::Reachable;
use crate::repository::Repository;
use crate::rocks::Family;

impl Repository {
    /// Reads the chunk whose content has the BLAKE3 `name` into `chunk`, which has the chunk size. Returns false if
    /// there is none, if it is not in `allowed`, or if it is damaged: then its content is needed.
    ///
    /// # Errors
    /// Errors of the drive.
    pub fn read_named(
        &self,
        name: &[u8; 32],
        allowed: Option<&Reachable>,
        chunk: &mut [u8],
    ) -> Result<bool> {
        let hash = dedup::hash_of_name(self, name);
        let read = dedup::find(self, &hash).and_then(|id| match id {
            Some(id) if allowed.is_none_or(|allowed| allowed.has(Family::Chunks, id)) => {
                self.read_chunk(id, chunk).map(|()| blake3::hash(chunk).as_bytes() == name)
            }
            _ => Ok(false),
        });
        match read {
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(false),
            read => read,
        }
    }
}
