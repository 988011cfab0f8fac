//! Makes, removes and renames client files in sessions.

use super::NodeHandle;
use super::calls::{give, on_node, refuse_name};
use crate::guard::{bytes, c_str, null};
use crate::message::fail_with;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_export::Creation;
use coldrise_nfs::Named;
use std::ffi::{c_char, c_int, c_void};
use std::time::{Duration, UNIX_EPOCH};

/// `COLDRISE_VERIFIER_BYTES` of the header.
const VERIFIER_BYTES: usize = size_of::<u64>();

/// `struct coldrise_changes` of the header.
#[repr(C)]
pub struct NodeChanges {
    /// The fields to set.
    pub what: u32,
    /// Permissions.
    pub mode: u32,
    /// Seconds since 1970.
    pub modified_s: i64,
    /// The rest, in nanoseconds.
    pub modified_ns: u32,
}

/// `COLDRISE_CHANGE_MODE` of the header.
const CHANGE_MODE: u32 = 1 << 0;
/// `COLDRISE_CHANGE_MODIFIED` of the header.
const CHANGE_MODIFIED: u32 = 1 << 1;

/// # Safety
/// As for [`c_str`].
unsafe fn name_of<'a>(name: *const c_char) -> Result<&'a str> {
    // SAFETY: passed on to the caller.
    let name = unsafe { c_str("the name", name) }?;
    let text = "a name that is not UTF-8: files in sessions have UTF-8 names";
    name.to_str().map_err(|_| Error::new(ErrorKind::InvalidInput, text))
}

fn named(done: Named<()>) -> c_int {
    done.map_or_else(|missing| refuse_name(&missing), |()| 0)
}

/// `coldrise_node_create` of the header.
///
/// # Safety
/// `folder` is not released and `name` valid during the call; `verifier` is NULL or holds
/// 8 bytes; `node` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_create(
    folder: *const NodeHandle,
    name: *const c_char,
    how: c_int,
    verifier: *const c_void,
    mode: u32,
    node: *mut *mut NodeHandle,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(folder, |folder| {
            let how = match how {
                1 => Creation::Unchecked,
                2 => Creation::Guarded,
                3 => {
                    let mut number = [0; VERIFIER_BYTES];
                    number.copy_from_slice(bytes(verifier.cast(), VERIFIER_BYTES)?);
                    Creation::Exclusive(u64::from_le_bytes(number))
                }
                _ => {
                    let text = "a file is made unchecked, guarded or exclusively";
                    return Err(Error::new(ErrorKind::InvalidInput, text));
                }
            };
            give(folder.create(name_of(name)?, how, mode)?, node)
        })
    }
}

/// `coldrise_node_make_folder` of the header.
///
/// # Safety
/// `folder` is not released and `name` valid during the call; `node` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_make_folder(
    folder: *const NodeHandle,
    name: *const c_char,
    mode: u32,
    node: *mut *mut NodeHandle,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(folder, |folder| give(folder.make_folder(name_of(name)?, mode)?, node)) }
}

/// `coldrise_node_remove` of the header.
///
/// # Safety
/// `folder` is not released and `name` valid during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_remove(
    folder: *const NodeHandle,
    name: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(folder, |folder| folder.remove(name_of(name)?).map(named)) }
}

/// `coldrise_node_rename` of the header.
///
/// # Safety
/// The folders are not released and the names valid during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_rename(
    folder: *const NodeHandle,
    name: *const c_char,
    new_folder: *const NodeHandle,
    new_name: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(folder, |folder| {
            let new_folder = new_folder.as_ref().ok_or_else(|| null("the new folder"))?;
            match folder.rename(name_of(name)?, &new_folder.node, name_of(new_name)?) {
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    Ok(fail_with(libc::EXDEV, &error.full_message()))
                }
                done => done.map(named),
            }
        })
    }
}

/// `coldrise_node_change` of the header.
///
/// # Safety
/// `node` is not released and `changes` valid during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_change(
    node: *const NodeHandle,
    changes: *const NodeChanges,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(node, |node| {
            let changes = changes.as_ref().ok_or_else(|| null("the changes"))?;
            let mode = (changes.what & CHANGE_MODE != 0).then_some(changes.mode);
            let modified = (changes.what & CHANGE_MODIFIED != 0).then(|| {
                // Times before 1970 are shown as 1970.
                let seconds = u64::try_from(changes.modified_s).unwrap_or(0);
                UNIX_EPOCH + Duration::new(seconds, changes.modified_ns.min(999_999_999))
            });
            node.change(mode, modified).map(|()| 0)
        })
    }
}
