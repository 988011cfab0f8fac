//! Files: what is read and written.

use super::calls::on_node;
use super::later::{self, DoneCallback, Task};
use super::node::{OpenError, OpenNode, Opened};
use super::share_reservations::{Share, ShareDenied};
use crate::guard::{bytes, bytes_mut, null};
use crate::message::fail_with;
use coldrise_block::{would_wait, ErrorKind, Result};
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

/// What an open that was refused leaves behind.
fn opened(file: &OpenNode, result: Opened) -> Result<c_int> {
    match result {
        Ok(()) => Ok(0),
        Err(OpenError::Failed(error)) => Err(error),
        Err(OpenError::Denied(denied)) => Ok(refuse_share(file, denied)),
    }
}

fn refuse_share(file: &OpenNode, denied: ShareDenied) -> c_int {
    fail_with(libc::ETXTBSY, &format!("{}: {denied}", file.path().to_string_lossy()))
}

/// `coldrise_node_open` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_open(file: *const OpenNode, share: u32) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| opened(file, file.open(Share::of_bits(share)))) }
}

/// `coldrise_node_reopen` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_reopen(
    file: *const OpenNode,
    held: u32,
    share: u32,
) -> c_int {
    let (held, share) = (Share::of_bits(held), Share::of_bits(share));
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| opened(file, file.reopen(held, share))) }
}

/// `coldrise_node_check_share` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_check_share(file: *const OpenNode, share: u32) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| match file.check_share(Share::of_bits(share)) {
            Ok(()) => Ok(0),
            Err(denied) => Ok(refuse_share(file, denied)),
        })
    }
}

/// `coldrise_node_take_over` of the header.
///
/// # Safety
/// `file` and `other` are not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_take_over(
    file: *const OpenNode,
    other: *const OpenNode,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            let other = other.as_ref().ok_or_else(|| null("the other node"))?;
            file.take_over(other).map(|()| 0)
        })
    }
}

/// `coldrise_node_close` of the header.
///
/// # Safety
/// `file` is NULL or not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_close(file: *const OpenNode, share: u32) {
    if file.is_null() {
        return;
    }
    // SAFETY: made by Arc::into_raw, and C's share of it is not given back here.
    let file = ManuallyDrop::new(unsafe { Arc::from_raw(file) });
    // Unwind safe: after a panic the open files refuse every call.
    if catch_unwind(AssertUnwindSafe(|| file.close(Share::of_bits(share)))).is_err() {
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

/// Only what is in memory: a flag of `coldrise_node_read`.
const READ_IN_MEMORY: c_int = 1 << 0;
/// What a layer captures in one piece.
const BLOCK_BYTES: u64 = coldrise_block::BLOCK_SIZE_BYTES;

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
    flags: c_int,
    filled: *mut usize,
    is_end: *mut c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            if filled.is_null() || is_end.is_null() {
                return Err(null("the place for what was read"));
            }
            let buffer = bytes_mut(buffer.cast(), length)?;
            let (open, read) = if flags & READ_IN_MEMORY == 0 {
                let open = file.file(false)?;
                let read = open.read(buffer, offset)?;
                (open, read)
            } else {
                // An open reads the repository.
                let open = file.opened(false)?.ok_or_else(would_wait)?;
                let read = open.read_in_memory(buffer, offset)?;
                (open, read)
            };
            filled.write(read);
            let end = offset.saturating_add(read as u64);
            is_end.write(c_int::from(end >= open.size_bytes()));
            Ok(0)
        })
    }
}

/// `coldrise_node_write_waits` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_write_waits(
    file: *const OpenNode,
    length: usize,
    offset: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            let Some(open) = file.opened(true)? else { return Ok(1) };
            let end = offset.saturating_add(length as u64).min(open.size_bytes());
            // Of blocks that are written in part the rest is read.
            let edges = [offset, end].into_iter().filter(|edge| edge % BLOCK_BYTES != 0);
            for edge in edges {
                let read = open.read_in_memory(&mut [0], edge - edge % BLOCK_BYTES);
                if matches!(&read, Err(error) if error.kind() == ErrorKind::WouldWait) {
                    return Ok(1);
                }
            }
            Ok(0)
        })
    }
}

/// `coldrise_node_flush_later` of the header.
///
/// # Safety
/// `file` is not released during the call; `done` takes `context` from any thread.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_flush_later(
    file: *const OpenNode,
    done: Option<DoneCallback>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            let done = done.ok_or_else(|| null("the callback"))?;
            later::flush(file, &file.shared().later.syncing, done, context).map(|()| 0)
        })
    }
}

/// `coldrise_node_run_later` of the header.
///
/// # Safety
/// `file` is not released before the task has run, which takes `context` from any thread.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_run_later(
    file: *const OpenNode,
    task: Option<Task>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            let task = task.ok_or_else(|| null("the task"))?;
            later::run(&file.shared().later.reading, task, context).map(|()| 0)
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
