//! Returns freed memory to the operating system.
#![allow(unsafe_code)]

/// Returns freed memory to the operating system, in whole pages. Otherwise the allocator keeps most
/// of it, because cache entries are freed in random order.
pub fn return_free_memory() {
    // SAFETY: malloc_trim has no preconditions and may be called from any thread.
    unsafe { libc::malloc_trim(0) };
}
