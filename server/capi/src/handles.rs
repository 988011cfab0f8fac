//! The exports that C holds, so that closing their repository also closes them.
//!
//! nbdkit needs this: if it ends while clients are connected, it does not close their
//! handles, and the sessions would stay open.

use crate::ExportHandle;
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// Pointers from `Box::into_raw` that are not closed yet.
#[derive(Default)]
pub(crate) struct OpenHandles(Mutex<HashSet<Pointer>>);

#[derive(PartialEq, Eq, Hash)]
struct Pointer(*mut ExportHandle);

// SAFETY: a pointer is only kept and compared here. The code that takes it out of the
// set owns its target, and any thread may drop an `ExportHandle`.
unsafe impl Send for Pointer {}

// The targets move between threads, so they must be `Send`.
const _: fn() = || {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<ExportHandle>();
};

impl OpenHandles {
    /// Gives an export to C.
    pub(crate) fn give(&self, handle: Box<ExportHandle>) -> *mut ExportHandle {
        let pointer = Box::into_raw(handle);
        self.set().insert(Pointer(pointer));
        pointer
    }

    /// Takes an export back; `None` if it was closed with its repository.
    pub(crate) fn take_back(&self, pointer: *mut ExportHandle) -> Option<Box<ExportHandle>> {
        let known = self.set().remove(&Pointer(pointer));
        // SAFETY: what is in the set came from `Box::into_raw` and has not been
        // taken out before.
        known.then(|| unsafe { Box::from_raw(pointer) })
    }

    /// Takes all exports back.
    pub(crate) fn take_all(&self) -> Vec<ExportHandle> {
        let all = std::mem::take(&mut *self.set());
        // SAFETY: as in `take_back`.
        all.into_iter().map(|pointer| *unsafe { Box::from_raw(pointer.0) }).collect()
    }

    fn set(&self) -> std::sync::MutexGuard<'_, HashSet<Pointer>> {
        // The set stays valid even if inserting or removing panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
