//! Giving freed memory back to the operating system.
#![allow(unsafe_code)]

/// Returns what was freed to the operating system, whole pages of it wherever they lie.
/// The allocator keeps most of it otherwise: entries of a cache are freed in no order.
pub(crate) fn return_free_memory() {
    // SAFETY: malloc_trim has no preconditions and may be called from any thread.
    unsafe { libc::malloc_trim(0) };
}
