//! The outcome of a failing call: errno and a message.

use coldrise_block::Error;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// `coldrise_last_error` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn coldrise_last_error() -> *const c_char {
    // The string lives until this thread's next failure replaces it. A thread
    // that is past its thread-locals gets a message that always exists.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"the thread is ending".as_ptr())
}

/// Stores `error` for the caller. Returns -1, the entry's return value.
#[cold]
pub(crate) fn fail(error: &Error) -> c_int {
    fail_with(error.kind().errno(), &error.full_message())
}

/// Like [`fail`], for an errno without an error kind.
#[cold]
pub(crate) fn fail_with(errno: c_int, message: &str) -> c_int {
    let message = c_string(message);
    // A thread past its thread-locals can no longer read a message.
    let _ = LAST.try_with(|last| *last.borrow_mut() = message);
    // SAFETY: the C library gives every thread an errno of its own, valid as
    // long as the thread runs.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// A string for C: it contains no NUL, because C would lose the rest.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}
