//! Files: opens, reads and writes.

use super::NodeHandle;
use super::calls::{Context, on_node, refuse};
use crate::guard::{bytes, bytes_mut, null};
use crate::message::fail_with;
use coldrise_block::{ErrorKind, Result};
use coldrise_nfs::{OpenError, OpenNode, OpenResult, Share, ShareDenied};
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// `coldrise_task_callback` of the header.
pub type Task = unsafe extern "C" fn(*mut c_void);
/// `coldrise_done_callback` of the header.
pub type DoneCallback = unsafe extern "C" fn(*mut c_void, c_int);

/// Converts a refused open to errno and message.
fn opened(file: &OpenNode, result: OpenResult) -> Result<c_int> {
    match result {
        Ok(()) => Ok(0),
        Err(OpenError::Failed(error)) => Err(error),
        Err(OpenError::Denied(denied)) => Ok(refuse_share(file, denied)),
    }
}

fn refuse_share(file: &OpenNode, denied: ShareDenied) -> c_int {
    fail_with(libc::ETXTBSY, &format!("{}: {denied}", file.path()))
}

/// `coldrise_node_open` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_open(file: *const NodeHandle, share: u32) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| opened(file, file.open(Share::of_bits(share)))) }
}

/// `coldrise_node_reopen` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_reopen(
    file: *const NodeHandle,
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_check_share(file: *const NodeHandle, share: u32) -> c_int {
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_take_over(
    file: *const NodeHandle,
    other: *const NodeHandle,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            let other = other.as_ref().ok_or_else(|| null("the other node"))?;
            file.take_over(&other.node).map(|()| 0)
        })
    }
}

/// `coldrise_node_close` of the header.
///
/// # Safety
/// `file` is NULL or not released during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_close(file: *const NodeHandle, share: u32) {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { file.as_ref() }) else { return };
    // Unwind safe: after a panic the open files refuse every call.
    if catch_unwind(AssertUnwindSafe(|| handle.node.close(Share::of_bits(share)))).is_err() {
        handle.node.poison();
    }
}

/// `coldrise_node_check_writable` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_check_writable(file: *const NodeHandle) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| file.check_writable().map(|()| 0)) }
}

/// A flag of `coldrise_node_read`: answer only from memory.
const READ_IN_MEMORY: c_int = 1 << 0;

/// `coldrise_node_read` of the header.
///
/// # Safety
/// `file` is not released during the call; `buffer` can be written for `length` bytes
/// by this call alone, `filled` and `is_end` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_read(
    file: *const NodeHandle,
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
                return Err(null("the place for the number of bytes"));
            }
            let buffer = bytes_mut(buffer.cast(), length)?;
            let read = if flags & READ_IN_MEMORY == 0 {
                file.read(buffer, offset)?
            } else {
                file.read_in_memory(buffer, offset)?
            };
            filled.write(read.length);
            is_end.write(c_int::from(read.is_end));
            Ok(0)
        })
    }
}

/// `coldrise_node_write_waits` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_write_waits(
    file: *const NodeHandle,
    length: usize,
    offset: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| Ok(c_int::from(file.write_waits(offset, length)?))) }
}

/// `coldrise_node_flush_later` of the header.
///
/// # Safety
/// `file` is not released during the call; `done` takes `context` from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_flush_later(
    file: *const NodeHandle,
    done: Option<DoneCallback>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            let done = done.ok_or_else(|| null("the callback"))?;
            let (node, context) = (Arc::clone(file), Context::new(context));
            let call = move |flushed: &Result<()>| {
                // Set each time: the previous callback may have made other calls.
                let result = flushed.as_ref().map_or_else(|error| refuse(&node, error), |()| 0);
                // SAFETY: the caller's promise.
                done(context.get(), result)
            };
            file.flush_later(call).map(|()| 0)
        })
    }
}

/// `coldrise_node_run_later` of the header.
///
/// # Safety
/// `file` is not released before the task has run, which takes `context` from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_run_later(
    file: *const NodeHandle,
    task: Option<Task>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            let task = task.ok_or_else(|| null("the task"))?;
            let context = Context::new(context);
            let call = move || {
                // SAFETY: the caller's promise.
                task(context.get())
            };
            file.run_later(call).map(|()| 0)
        })
    }
}

/// `coldrise_node_write` of the header.
///
/// # Safety
/// `file` is not released during the call; `buffer` holds `length` bytes that nothing
/// changes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_write(
    file: *const NodeHandle,
    buffer: *const c_void,
    length: usize,
    offset: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(file, |file| {
            match file.write(bytes(buffer.cast(), length)?, offset) {
                // EFBIG, as other file systems answer at their size limit.
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_flush(file: *const NodeHandle) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| file.flush().map(|()| 0)) }
}

/// `coldrise_node_has_stopped` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_has_stopped(file: *const NodeHandle) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| Ok(c_int::from(file.has_stopped()))) }
}

/// `coldrise_node_set_size` of the header.
///
/// # Safety
/// `file` is not released during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_set_size(file: *const NodeHandle, size: u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(file, |file| file.set_size_bytes(size).map(|()| 0)) }
}
