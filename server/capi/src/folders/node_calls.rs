//! Walks the tree.

use super::calls::{datastore, give, into_raw, on_node, refuse_name};
use super::{FoldersHandle, NodeHandle};
use crate::guard::{bytes, c_str, defect, guarded, null};
use crate::message::{c_string, fail_with};
use coldrise_block::ErrorKind;
use coldrise_export::NodeType;
use coldrise_nfs::MAX_HANDLE_BYTES;
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// `COLDRISE_HANDLE_MAX` of the header.
const HANDLE_MAX: usize = 32;
const _: () = assert!(MAX_HANDLE_BYTES <= HANDLE_MAX);

/// `struct coldrise_attributes` of the header.
#[repr(C)]
pub struct NodeAttributes {
    /// Size; 0 for a folder.
    pub size_bytes: u64,
    /// Its stored bytes.
    pub stored_bytes: u64,
    /// Seconds since 1970.
    pub modified_s: i64,
    /// The last change of content, mode or name, in seconds since 1970.
    pub changed_s: i64,
    /// A number that differs after every change.
    pub change: u64,
    /// The rest of `modified_s`, in nanoseconds.
    pub modified_ns: u32,
    /// The rest of `changed_s`, in nanoseconds.
    pub changed_ns: u32,
    /// Permissions.
    pub mode: u32,
    /// Seconds for which the host may cache it.
    pub valid_s: u32,
    /// Whether there is a verifier.
    pub has_verifier: u32,
    /// The verifier of an exclusive creation.
    pub verifier: [u8; 8],
}

/// `coldrise_entry_callback` of the header.
pub type EntryCallback =
    unsafe extern "C" fn(*mut c_void, *const c_char, *mut NodeHandle, u64) -> c_int;

/// `coldrise_node_root` of the header.
///
/// # Safety
/// `folders` is open during the call; `node` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_root(
    folders: *const FoldersHandle,
    node: *mut *mut NodeHandle,
) -> c_int {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { give(datastore(folders)?.root()?, node) })
}

/// `coldrise_node_find` of the header.
///
/// # Safety
/// `folder` is not released and `name` valid during the call; `node` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_find(
    folder: *const NodeHandle,
    name: *const c_char,
    node: *mut *mut NodeHandle,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(folder, |folder| {
            // A name that is not UTF-8 never exists.
            let Ok(name) = c_str("the name", name)?.to_str() else {
                return Ok(fail_with(libc::ENOENT, "a name that is not UTF-8"));
            };
            match folder.find(name)? {
                Ok(found) => give(found, node),
                Err(missing) => Ok(refuse_name(&missing)),
            }
        })
    }
}

/// `coldrise_node_parent` of the header.
///
/// # Safety
/// `node` is not released during the call; `parent` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_parent(
    node: *const NodeHandle,
    parent: *mut *mut NodeHandle,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_node(node, |node| give(node.parent()?, parent)) }
}

/// `coldrise_node_release` of the header.
///
/// # Safety
/// `node` is NULL or came from this library, and is used by no call now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_release(node: *mut NodeHandle) {
    if node.is_null() {
        return;
    }
    // SAFETY: made by Box::into_raw, and given back once.
    let handle = unsafe { Box::from_raw(node) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| {
        handle.node.release();
        drop(handle);
    })) {
        fail_with(libc::EIO, &defect(panic));
    }
}

/// `coldrise_node_handle` of the header.
///
/// # Safety
/// `node` is not released during the call; `handle` holds `COLDRISE_HANDLE_MAX` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_handle(
    node: *const NodeHandle,
    handle: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(node, |node| {
            let bytes = node.handle();
            if handle.is_null() || bytes.len() > HANDLE_MAX {
                return Err(null("the place for the handle"));
            }
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), handle.cast(), bytes.len());
            // At most HANDLE_MAX.
            Ok(bytes.len() as c_int)
        })
    }
}

/// `coldrise_node_of_handle` of the header.
///
/// # Safety
/// `folders` is open during the call, `handle` holds `length` bytes; `node` can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_of_handle(
    folders: *const FoldersHandle,
    handle: *const c_void,
    length: usize,
    node: *mut *mut NodeHandle,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (datastore, bytes) = unsafe { (datastore(folders)?, bytes(handle.cast(), length)?) };
        match datastore.node_of_handle(bytes) {
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_list(
    folder: *const NodeHandle,
    after: u64,
    callback: Option<EntryCallback>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise, for the node and for the callback.
    unsafe {
        on_node(folder, |folder| {
            let callback = callback.ok_or_else(|| null("the callback"))?;
            let is_end = folder.list(after, |name, node, cookie| {
                callback(context, c_string(name).as_ptr(), into_raw(node), cookie) == 0
            })?;
            Ok(c_int::from(is_end))
        })
    }
}

/// `coldrise_node_type` of the header; 0 for NULL.
///
/// # Safety
/// `node` is NULL or not released during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_type(node: *const NodeHandle) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { node.as_ref() }.map_or(0, |handle| match handle.node.node_type() {
        NodeType::Folder => 1,
        NodeType::File => 2,
        NodeType::Link => 3,
    })
}

/// `coldrise_node_id` of the header; 0 for NULL.
///
/// # Safety
/// `node` is NULL or not released during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_id(node: *const NodeHandle) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { node.as_ref() }.map_or(0, |handle| handle.node.id())
}

/// `coldrise_node_path` of the header; empty for NULL.
///
/// # Safety
/// `node` is NULL or not released as long as the string is used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_path(node: *const NodeHandle) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { node.as_ref() }.map_or(c"".as_ptr(), |handle| handle.path.as_ptr())
}

fn seconds(since_1970: Duration) -> i64 {
    i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX)
}

/// `coldrise_node_attributes` of the header.
///
/// # Safety
/// `node` is not released during the call; `attributes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_attributes(
    node: *const NodeHandle,
    attributes: *mut NodeAttributes,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_node(node, |node| {
            if attributes.is_null() {
                return Err(null("the place for the attributes"));
            }
            let found = node.attributes()?;
            attributes.write(NodeAttributes {
                size_bytes: found.size_bytes,
                stored_bytes: found.stored_bytes,
                modified_s: seconds(found.modified),
                changed_s: seconds(found.changed),
                change: found.change(),
                modified_ns: found.modified.subsec_nanos(),
                changed_ns: found.changed.subsec_nanos(),
                mode: found.mode,
                valid_s: found.valid_s,
                has_verifier: u32::from(found.verifier.is_some()),
                verifier: found.verifier.unwrap_or(0).to_le_bytes(),
            });
            Ok(0)
        })
    }
}

/// `coldrise_node_target` of the header.
///
/// # Safety
/// `link` is not released during the call; `target` holds `COLDRISE_NAME_MAX` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_node_target(
    link: *const NodeHandle,
    target: *mut c_char,
) -> c_int {
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
