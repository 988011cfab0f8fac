//! Files: what is read and written.

use super::calls::on_node;
use super::node::OpenNode;
use crate::guard::{bytes, bytes_mut, null};
use crate::message::fail_with;
use coldrise_block::ErrorKind;
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

/// `coldrise_node_open` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_open(file: *const OpenNode, for_writing: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| file.pin(for_writing != 0).map(|()| 0)) }
}

/// `coldrise_node_close` of the header.
///
/// # Safety
/// `file` is NULL or not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_close(file: *const OpenNode, for_writing: c_int) {
    if file.is_null() {
        return;
    }
    // SAFETY: made by Arc::into_raw, and C's share of it is not given back here.
    let file = ManuallyDrop::new(unsafe { Arc::from_raw(file) });
    // Unwind safe: after a panic the open files refuse every call.
    if catch_unwind(AssertUnwindSafe(|| file.unpin(for_writing != 0))).is_err() {
        file.poison();
    }
}

/// `coldrise_node_check_writable` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_check_writable(file: *const OpenNode) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| file.file(true).map(|_| 0)) }
}

/// `coldrise_node_read` of the header.
///
/// # Safety
/// `file` is not released during the call; `buffer` can be written for `length` bytes
/// by this call alone, `filled` and `is_end` can be written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_read(
    file: *const OpenNode,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
    filled: *mut usize,
    is_end: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            if filled.is_null() || is_end.is_null() {
                return Err(null("the place for what was read"));
            }
            let open = file.file(false)?;
            let read = open.read(bytes_mut(buffer.cast(), length)?, offset)?;
            filled.write(read);
            let end = offset.saturating_add(read as u64);
            is_end.write(c_int::from(end >= open.size_bytes()));
            Ok(0)
        })
    }
}

/// `coldrise_node_write` of the header.
///
/// # Safety
/// `file` is not released during the call; `buffer` holds `length` bytes that nobody
/// changes meanwhile.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_write(
    file: *const OpenNode,
    buffer: *const c_void,
    length: usize,
    offset: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            let open = file.file(true)?;
            let written = open.write(bytes(buffer.cast(), length)?, offset);
            file.has_changed();
            match written {
                // As a file system tells that a file cannot become so large.
                Err(error) if error.kind() == ErrorKind::OutOfRange => {
                    Ok(fail_with(libc::EFBIG, &error.full_message()))
                }
                written => written.map(|()| 0),
            }
        })
    }
}

/// `coldrise_node_flush` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_flush(file: *const OpenNode) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| file.flush().map(|()| 0)) }
}

/// `coldrise_node_has_stopped` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_has_stopped(file: *const OpenNode) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| Ok(c_int::from(file.has_stopped()))) }
}

/// `coldrise_node_set_size` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_set_size(file: *const OpenNode, size: u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            let set = file.file(true)?.set_size_bytes(size);
            file.has_changed();
            set.map(|()| 0)
        })
    }
}
