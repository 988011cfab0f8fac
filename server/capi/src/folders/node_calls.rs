//! Walking the tree.

use super::calls::{give, on_node, shared};
use super::node::{OpenNode, HANDLE_MAX};
use super::FoldersHandle;
use crate::guard::{bytes, c_str, defect, guarded, null};
use crate::message::{c_string, fail_with};
use coldrise_block::ErrorKind;
use coldrise_export::NodeType;
use std::ffi::{c_char, c_int, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;

/// `struct coldrise_attributes` of the header.
#[repr(C)]
pub struct NodeAttributes {
    /// Size; 0 for a folder.
    pub size_bytes: u64,
    /// What of it is stored.
    pub stored_bytes: u64,
    /// Seconds since 1970.
    pub modified_s: i64,
    /// When anything of it changed, in seconds since 1970.
    pub changed_s: i64,
    /// Another number after every change.
    pub change: u64,
    /// The rest of `modified_s`, in nanoseconds.
    pub modified_ns: u32,
    /// The rest of `changed_s`, in nanoseconds.
    pub changed_ns: u32,
    /// Permissions.
    pub mode: u32,
    /// For so many seconds it may be remembered.
    pub valid_s: u32,
    /// Whether there is a verifier.
    pub has_verifier: u32,
    /// Of a file that was made exclusively.
    pub verifier: [u8; 8],
}

/// `coldrise_entry_callback` of the header.
pub type EntryCallback =
    unsafe extern "C" fn(*mut c_void, *const c_char, *mut OpenNode, u64) -> c_int;

/// `coldrise_node_root` of the header.
///
/// # Safety
/// `folders` is open during the call; `node` can be written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_root(
    folders: *const FoldersHandle,
    node: *mut *mut OpenNode,
) -> c_int {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { give(OpenNode::root(shared(folders)?), node) })
}

/// `coldrise_node_find` of the header.
///
/// # Safety
/// `folder` is not released and `name` valid during the call; `node` can be written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_find(
    folder: *const OpenNode,
    name: *const c_char,
    node: *mut *mut OpenNode,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(folder, |folder| {
            if folder.node_type() != NodeType::Folder {
                return Ok(fail_with(libc::ENOTDIR, "no folder"));
            }
            folder.check()?;
            // No name that is not UTF-8 exists.
            let Ok(name) = c_str("the name", name)?.to_str() else {
                return Ok(fail_with(libc::ENOENT, "a name that is not UTF-8"));
            };
            match folder.find(name) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    Ok(fail_with(libc::ENOENT, &error.full_message()))
                }
                found => give(found?, node),
            }
        })
    }
}

/// `coldrise_node_parent` of the header.
///
/// # Safety
/// `node` is not released during the call; `parent` can be written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_parent(
    node: *const OpenNode,
    parent: *mut *mut OpenNode,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(node, |node| give(node.parent()?, parent)) }
}

/// `coldrise_node_release` of the header.
///
/// # Safety
/// `node` is NULL or came from this library, and is used by no call now or later.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_release(node: *mut OpenNode) {
    if node.is_null() {
        return;
    }
    // SAFETY: made by Arc::into_raw, and given back once.
    let node = unsafe { Arc::from_raw(node) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| {
        node.release();
        drop(node);
    })) {
        fail_with(libc::EIO, &defect(panic));
    }
}

/// `coldrise_node_handle` of the header.
///
/// # Safety
/// `node` is not released during the call; `handle` holds `COLDRISE_HANDLE_MAX` bytes.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_handle(node: *const OpenNode, handle: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(node, |node| {
            let bytes = node.handle();
            if handle.is_null() || bytes.len() > HANDLE_MAX {
                return Err(null("the place for the handle"));
            }
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), handle.cast(), bytes.len());
            // No longer than HANDLE_MAX.
            Ok(bytes.len() as c_int)
        })
    }
}

/// `coldrise_node_of_handle` of the header.
///
/// # Safety
/// `folders` is open during the call, `handle` holds `length` bytes; `node` can be
/// written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_of_handle(
    folders: *const FoldersHandle,
    handle: *const c_void,
    length: usize,
    node: *mut *mut OpenNode,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (shared, bytes) = unsafe { (shared(folders)?, bytes(handle.cast(), length)?) };
        match OpenNode::of_handle(shared, bytes) {
            // SAFETY: the caller's promise.
            Ok(found) => unsafe { give(found, node) },
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Ok(fail_with(libc::ESTALE, &error.full_message()))
            }
            Err(error) => Err(error),
        }
    })
}

/// `coldrise_node_list` of the header.
///
/// # Safety
/// `folder` is not released during the call; `callback` takes `context`.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_list(
    folder: *const OpenNode,
    after: u64,
    callback: Option<EntryCallback>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise, for the node and for the callback.
    unsafe {
        on_node(folder, |folder| {
            let callback = callback.ok_or_else(|| null("the callback"))?;
            folder.check()?;
            for (cookie, entry) in folder.entries(after)? {
                let node = Arc::into_raw(folder.child(entry.node)).cast_mut();
                if callback(context, c_string(&entry.name).as_ptr(), node, cookie) != 0 {
                    return Ok(0);
                }
            }
            Ok(1)
        })
    }
}

/// `coldrise_node_type` of the header; 0 for NULL.
///
/// # Safety
/// `node` is NULL or not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_type(node: *const OpenNode) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { node.as_ref() }.map_or(0, |node| match node.node_type() {
        NodeType::Folder => 1,
        NodeType::File => 2,
        NodeType::Link => 3,
    })
}

/// `coldrise_node_id` of the header; 0 for NULL.
///
/// # Safety
/// `node` is NULL or not released during the call.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_id(node: *const OpenNode) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { node.as_ref() }.map_or(0, OpenNode::id)
}

/// `coldrise_node_path` of the header; empty for NULL.
///
/// # Safety
/// `node` is NULL or not released as long as the string is used.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_path(node: *const OpenNode) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { node.as_ref() }.map_or(c"".as_ptr(), |node| node.path().as_ptr())
}

fn seconds(since_1970: Duration) -> i64 {
    i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX)
}

/// `coldrise_node_attributes` of the header.
///
/// # Safety
/// `node` is not released during the call; `attributes` can be written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_attributes(
    node: *const OpenNode,
    attributes: *mut NodeAttributes,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(node, |node| {
            if attributes.is_null() {
                return Err(null("the place for the attributes"));
            }
            node.check()?;
            let shown = node.attributes()?;
            attributes.write(NodeAttributes {
                size_bytes: shown.attributes.size_bytes,
                stored_bytes: shown.attributes.stored_bytes,
                modified_s: seconds(shown.modified),
                changed_s: seconds(shown.changed),
                change: shown.change(),
                modified_ns: shown.modified.subsec_nanos(),
                changed_ns: shown.changed.subsec_nanos(),
                mode: shown.mode,
                valid_s: shown.valid_s,
                has_verifier: u32::from(shown.attributes.verifier.is_some()),
                verifier: shown.attributes.verifier.unwrap_or(0).to_le_bytes(),
            });
            Ok(0)
        })
    }
}

/// `coldrise_node_target` of the header.
///
/// # Safety
/// `link` is not released during the call; `target` holds `COLDRISE_NAME_MAX` bytes.
#[no_mangle]
pub unsafe extern "C" fn coldrise_node_target(link: *const OpenNode, target: *mut c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(link, |link| {
            let name = c_string(&link.target()?);
            let bytes = name.as_bytes_with_nul();
            if target.is_null() || bytes.len() > crate::names::NAME_MAX {
                return Err(null("the place for the target"));
            }
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.cast(), bytes.len());
            Ok(0)
        })
    }
}
