//! Open files and listings, by the handle that the kernel keeps.

use coldrise_export::{FolderEntry, OpenFile};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Open files or listings, by handle.
pub(crate) struct Handles<T> {
    next: AtomicU64,
    open: RwLock<HashMap<u64, T>>,
}

/// A listing as it was when it was opened, so that every entry keeps its
/// offset.
pub(crate) type Listing = Arc<Vec<FolderEntry>>;
pub(crate) type Files = Handles<Arc<OpenFile>>;
pub(crate) type Listings = Handles<Listing>;

impl<T: Clone> Handles<T> {
    pub(crate) fn new() -> Handles<T> {
        Handles { next: AtomicU64::new(1), open: RwLock::default() }
    }

    pub(crate) fn add(&self, opened: T) -> u64 {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().insert(handle, opened);
        handle
    }

    pub(crate) fn get(&self, handle: u64) -> Option<T> {
        self.open.read().get(&handle).cloned()
    }

    /// Replaces the object of a handle.
    pub(crate) fn replace(&self, handle: u64, opened: T) {
        self.open.write().insert(handle, opened);
    }

    pub(crate) fn remove(&self, handle: u64) -> Option<T> {
        self.open.write().remove(&handle)
    }
}
