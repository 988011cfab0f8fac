//! Calls to the operating system about memory of the allocator.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Returns freed memory to the operating system, in whole pages. Otherwise the allocator keeps most
/// of it, because cache entries are freed in random order.
pub fn return_free_memory() {
    // SAFETY: malloc_trim has no preconditions and may be called from any thread.
    unsafe { libc::malloc_trim(0) };
}

/// Asks the kernel for huge pages for a large new buffer, so that filling it takes few page faults.
/// Without them it works as well.
pub(crate) fn prefer_huge_pages<T>(buffer: &mut [MaybeUninit<T>]) {
    let start = buffer.as_mut_ptr().cast::<u8>();
    let skipped = start.align_offset(HUGE_PAGE_BYTES);
    let bytes = size_of_val(buffer).saturating_sub(skipped) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    // SAFETY: these bytes lie in the buffer, and the advice changes none of them.
    unsafe { libc::madvise(start.wrapping_add(skipped).cast(), bytes, libc::MADV_HUGEPAGE) };
}
