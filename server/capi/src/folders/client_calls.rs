//! Making, removing and renaming what clients keep in sessions.

use super::calls::{give, on_node};
use super::node::OpenNode;
use crate::guard::{bytes, c_str, null};
use crate::message::fail_with;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_export::{Creation, NodeType, Removal};
use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// `COLDRISE_VERIFIER_BYTES` of the header.
const VERIFIER_BYTES: usize = size_of::<u64>();

/// `struct coldrise_changes` of the header.
#[repr(C)]
pub struct NodeChanges {
    /// Which of the following are to be set.
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
const PERMISSIONS: u32 = 0o7777;

/// # Safety
/// As for [`c_str`].
unsafe fn name_of<'a>(name: *const c_char) -> Result<&'a str> {
    // SAFETY: passed on to the caller.
    let name = unsafe { c_str("the name", name) }?;
    let text = "a name that is not UTF-8: files in sessions have UTF-8 names";
    name.to_str().map_err(|_| Error::new(ErrorKind::InvalidInput, text))
}

/// Runs a call that changes a folder, which keeps its session open for a while.
///
/// # Safety
/// As for [`on_node`].
unsafe fn in_folder(
    folder: *const OpenNode,
    call: impl FnOnce(&Arc<OpenNode>) -> Result<c_int>,
) -> c_int {
    // SAFETY: passed on to the caller.
    unsafe {
        on_node(folder, |folder| {
            if folder.node_type() != NodeType::Folder {
                return Ok(fail_with(libc::ENOTDIR, "no folder"));
            }
            if folder.node().takes_files() {
                folder.file(true)?;
            }
            call(folder)
        })
    }
}

/// The folder is there, as was seen: what is missing is a name in it.
fn named(done: Result<()>) -> Result<c_int> {
    match done {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Ok(fail_with(libc::ENOENT, &error.full_message()))
        }
        done => done.map(|()| 0),
    }
}

/// `coldrise_node_create` of the header.
///
/// # Safety
/// `folder` is not released and `name` valid during the call; `verifier` is NULL or holds
/// 8 bytes; `node` can be written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_create(
    folder: *const OpenNode,
    name: *const c_char,
    how: c_int,
    verifier: *const c_void,
    mode: u32,
    node: *mut *mut OpenNode,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        in_folder(folder, |folder| {
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
            let name = name_of(name)?;
            let made = folder.folders().create(folder.node(), name, how, mode & PERMISSIONS)?;
            give(folder.child(made), node)
        })
    }
}

/// `coldrise_node_make_folder` of the header.
///
/// # Safety
/// `folder` is not released and `name` valid during the call; `node` can be written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_make_folder(
    folder: *const OpenNode,
    name: *const c_char,
    mode: u32,
    node: *mut *mut OpenNode,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        in_folder(folder, |folder| {
            let name = name_of(name)?;
            let made = folder.folders().make_folder(folder.node(), name, mode & PERMISSIONS)?;
            give(folder.child(made), node)
        })
    }
}

/// `coldrise_node_remove` of the header.
///
/// # Safety
/// `folder` is not released and `name` valid during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_remove(
    folder: *const OpenNode,
    name: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        in_folder(folder, |folder| {
            named(folder.folders().remove(folder.node(), name_of(name)?, Removal::Any))
        })
    }
}

/// `coldrise_node_rename` of the header.
///
/// # Safety
/// The folders are not released and the names valid during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_rename(
    folder: *const OpenNode,
    name: *const c_char,
    new_folder: *const OpenNode,
    new_name: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        in_folder(folder, |folder| {
            if new_folder.is_null() {
                return Err(null("the new folder"));
            }
            // Made by Arc::into_raw, and C's share of it is not given back here.
            let other = ManuallyDrop::new(Arc::from_raw(new_folder));
            other.check()?;
            let (name, new_name) = (name_of(name)?, name_of(new_name)?);
            match folder.folders().rename(folder.node(), name, other.node(), new_name) {
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    Ok(fail_with(libc::EXDEV, &error.full_message()))
                }
                done => named(done),
            }
        })
    }
}

/// `coldrise_node_change` of the header.
///
/// # Safety
/// `node` is not released and `changes` valid during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_change(
    node: *const OpenNode,
    changes: *const NodeChanges,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(node, |node| {
            let changes = changes.as_ref().ok_or_else(|| null("the changes"))?;
            node.check()?;
            let mode = (changes.what & CHANGE_MODE != 0).then_some(changes.mode & PERMISSIONS);
            let modified = (changes.what & CHANGE_MODIFIED != 0).then(|| {
                // What was before 1970 is shown as from then.
                let seconds = u64::try_from(changes.modified_s).unwrap_or(0);
                UNIX_EPOCH + Duration::new(seconds, changes.modified_ns.min(999_999_999))
            });
            if !node.node().is_of_clients() {
                // Programs that copy insist, and it is no use to them to be refused.
                return Ok(0);
            }
            if node.node_type() == NodeType::File {
                node.file(true)?;
            }
            let changed = node.folders().set(node.node(), mode, modified);
            node.has_changed();
            changed.map(|()| 0)
        })
    }
}
