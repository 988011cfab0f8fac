//! The exports that C holds, so that closing their repository closes them too.
//!
//! nbdkit needs this: told to end while clients are connected, it does not close
//! their handles, and the sessions would stay unclosed.

use crate::ExportHandle;
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// Pointers that `Box::into_raw` made and that were not closed yet.
#[derive(Default)]
pub(crate) struct OpenHandles(Mutex<HashSet<Pointer>>);

#[derive(PartialEq, Eq, Hash)]
struct Pointer(*mut ExportHandle);

// SAFETY: a pointer is only kept and compared here. Whoever takes it out of the
// set owns what it points to, and an `ExportHandle` may be dropped by any thread.
unsafe impl Send for Pointer {}

// What the pointers stand for moves between threads, so it must be able to.
const _: fn() = || {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<ExportHandle>();
};

impl OpenHandles {
    /// Hands an export out to C.
    pub(crate) fn give(&self, handle: Box<ExportHandle>) -> *mut ExportHandle {
        let pointer = Box::into_raw(handle);
        self.set().insert(Pointer(pointer));
        pointer
    }

    /// Takes an export back; `None` when it was closed with its repository.
    pub(crate) fn take_back(&self, pointer: *mut ExportHandle) -> Option<Box<ExportHandle>> {
        let known = self.set().remove(&Pointer(pointer));
        // SAFETY: what is in the set came from `Box::into_raw` and has not been
        // taken out before.
        known.then(|| unsafe { Box::from_raw(pointer) })
    }

    /// Takes all of them back.
    pub(crate) fn take_all(&self) -> Vec<ExportHandle> {
        let all = std::mem::take(&mut *self.set());
        // SAFETY: as in `take_back`.
        all.into_iter().map(|pointer| *unsafe { Box::from_raw(pointer.0) }).collect()
    }

    fn set(&self) -> std::sync::MutexGuard<'_, HashSet<Pointer>> {
        // Inserting and removing leave the set whole even when they panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
