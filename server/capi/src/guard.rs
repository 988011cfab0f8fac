//! The border between C and Rust: pointers become references, results become errno, and
//! panics are caught.

use crate::ExportHandle;
use crate::message::{fail, fail_with};
pub(crate) use coldrise_block::defect;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_export::Export;
use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs an entry without an export.
pub(crate) fn guarded(call: impl FnOnce() -> Result<c_int>) -> c_int {
    // Unwind safe: state of a panicked call is dropped with the entry, or lies behind locks
    // and atomics of the tree, whose tables stay valid on unwinding.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => fail(&error),
        Err(panic) => fail_with(libc::EIO, &defect(panic)),
    }
}

/// Runs an entry on an export; a panic stops the export permanently.
///
/// # Safety
/// `handle` is NULL or came from `coldrise_export_open` and is not closed before
/// this returns.
#[inline]
pub(crate) unsafe fn on_export(
    handle: *const ExportHandle,
    call: impl FnOnce(&Export) -> Result<()>,
) -> c_int {
    // SAFETY: see above. The handle is only ever shared, never borrowed mutably.
    let Some(handle) = (unsafe { handle.as_ref() }) else { return fail(&null("the export")) };
    let export = &handle.export;
    // Unwind safe: after a panic the export refuses every call.
    match catch_unwind(AssertUnwindSafe(|| {
        export.check()?;
        call(export)
    })) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => fail(&error),
        Err(panic) => {
            export.poison();
            fail_with(libc::EIO, &format!("{}: {}", export.name(), defect(panic)))
        }
    }
}

/// The error for a pointer that must not be NULL.
#[cold]
pub(crate) fn null(what: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("{what} is NULL"))
}

/// A C string as UTF-8.
///
/// # Safety
/// `text` is NULL or a NUL-terminated string that stays unchanged during the
/// lifetime that the caller picks.
pub(crate) unsafe fn utf8<'a>(what: &str, text: *const c_char) -> Result<&'a str> {
    // SAFETY: passed on to the caller.
    let bytes = unsafe { c_str(what, text) }?;
    bytes.to_str().map_err(|error| {
        Error::with_source(ErrorKind::InvalidInput, format!("{what} is not UTF-8"), error)
    })
}

/// A C string.
///
/// # Safety
/// As for [`utf8`].
pub(crate) unsafe fn c_str<'a>(what: &str, text: *const c_char) -> Result<&'a CStr> {
    if text.is_null() {
        return Err(null(what));
    }
    // SAFETY: not NULL, and NUL-terminated as the caller promises.
    Ok(unsafe { CStr::from_ptr(text) })
}

/// Memory to fill.
///
/// # Safety
/// `buffer` is valid for writing `length` bytes, and nothing else accesses it, for the
/// lifetime that the caller picks. (Its bytes may have any value: they come from C, so the
/// compiler assumes nothing about them.)
#[inline]
pub(crate) unsafe fn bytes_mut<'a>(buffer: *mut u8, length: usize) -> Result<&'a mut [u8]> {
    if length == 0 {
        return Ok(&mut []);
    }
    check_memory(buffer, length)?;
    // SAFETY: not NULL, no longer than a slice may be, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer, length) })
}

/// Memory to read.
///
/// # Safety
/// `buffer` is valid for reading `length` bytes, which do not change, for the
/// lifetime that the caller picks.
#[inline]
pub(crate) unsafe fn bytes<'a>(buffer: *const u8, length: usize) -> Result<&'a [u8]> {
    if length == 0 {
        return Ok(&[]);
    }
    check_memory(buffer, length)?;
    // SAFETY: not NULL, no longer than a slice may be, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(buffer, length) })
}

#[inline]
fn check_memory(buffer: *const u8, length: usize) -> Result<()> {
    if buffer.is_null() {
        return Err(null("the buffer"));
    }
    if isize::try_from(length).is_err() {
        return Err(Error::new(ErrorKind::InvalidInput, "a buffer as large as half of memory"));
    }
    Ok(())
}
