//! The interface of an object store for a bucket's repository.

use coldrise_block::Result;

/// A listed object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its whole name.
    pub name: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// The time of its last change by the server's clock, in milliseconds since 1970-01-01T00:00:00Z.
    pub modified_ms: u64,
}

/// Objects by name. All calls block, and may come from many threads at once. Every later call sees a stored object.
pub trait Objects: Send + Sync {
    /// Creates an object, or replaces it whole.
    ///
    /// # Errors
    /// Errors of reaching the store, and its refusals. The object is then the old one or the new one.
    fn put(&self, name: &str, content: Vec<u8>) -> Result<()>;

    /// A whole object of at most `most_bytes`.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` if it is longer; errors of reaching the store.
    fn get(&self, name: &str, most_bytes: u64) -> Result<Vec<u8>>;

    /// A part of an object; shorter if the object ends before.
    ///
    /// # Errors
    /// `NotFound`; errors of reaching the store.
    fn get_range(&self, name: &str, offset_bytes: u64, length_bytes: u64) -> Result<Vec<u8>>;

    /// All objects whose names begin with `prefix`, which ends with a slash, in the order of their names.
    ///
    /// # Errors
    /// Errors of reaching the store.
    fn list(&self, prefix: &str) -> Result<Vec<Listed>>;

    /// [`Objects::list`], with at most this many names in an answer of the store.
    ///
    /// # Errors
    /// As for [`Objects::list`].
    fn list_in_pages(&self, prefix: &str, most_names: Option<usize>) -> Result<Vec<Listed>> {
        let _ = most_names;
        self.list(prefix)
    }

    /// Removes an object; one that is not there is no error.
    ///
    /// # Errors
    /// Errors of reaching the store, and its refusals.
    fn delete(&self, name: &str) -> Result<()>;

    /// [`Objects::put`] of a heartbeat object: with a time limit of some seconds, and also after calls were cancelled.
    ///
    /// # Errors
    /// As for [`Objects::put`].
    fn put_sign(&self, name: &str, content: &[u8]) -> Result<()> {
        self.put(name, content.to_vec())
    }

    /// [`Objects::delete`] of such an object, alike.
    ///
    /// # Errors
    /// As for [`Objects::delete`].
    fn delete_sign(&self, name: &str) -> Result<()> {
        self.delete(name)
    }

    /// Where that is, for messages: `s3://bucket/prefix`.
    fn place(&self) -> &str;
}
