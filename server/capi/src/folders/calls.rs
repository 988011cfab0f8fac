//! Opening the repository, and walking the tree.

use super::node::{OpenNode, HANDLE_MAX};
use super::{FoldersHandle, Shared};
use crate::guard::{bytes, c_str, defect, guarded, null};
use crate::message::{c_string, fail, fail_with};
use crate::repository::{open_repository, Given, Options};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_export::{Folders, NodeType, TreeOptions};
use std::ffi::{c_char, c_int, c_void, OsStr};
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStrExt;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// `COLDRISE_FOLDERS_READ_ONLY` of the header.
pub const FOLDERS_READ_ONLY: u32 = 1 << 0;

/// `struct coldrise_space` of the header.
#[repr(C)]
pub struct SpaceOfFolders {
    /// All of it.
    pub total_bytes: u64,
    /// What is free.
    pub free_bytes: u64,
    /// What of it users other than root can have.
    pub available_bytes: u64,
}

/// `struct coldrise_attributes` of the header.
#[repr(C)]
pub struct NodeAttributes {
    /// Size; 0 for a folder.
    pub size_bytes: u64,
    /// What of it is stored.
    pub stored_bytes: u64,
    /// Seconds since 1970.
    pub modified_s: i64,
    /// The rest, in nanoseconds.
    pub modified_ns: u32,
    /// Permissions.
    pub mode: u32,
    /// For so many seconds it may be remembered.
    pub valid_s: u32,
}

/// `coldrise_entry_callback` of the header.
pub type EntryCallback =
    unsafe extern "C" fn(*mut c_void, *const c_char, *mut OpenNode, u64) -> c_int;

/// Runs an entry on a node; a panic stops what is open of it for good.
///
/// # Safety
/// `node` is NULL or came from this library and is not released before this returns.
#[inline]
pub(super) unsafe fn on_node(
    node: *const OpenNode,
    call: impl FnOnce(&Arc<OpenNode>) -> Result<c_int>,
) -> c_int {
    if node.is_null() {
        return fail(&null("the node"));
    }
    // SAFETY: made by Arc::into_raw, and C's share of it is not given back here.
    let node = ManuallyDrop::new(unsafe { Arc::from_raw(node) });
    // Unwind safe: after a panic the open files refuse every call.
    match catch_unwind(AssertUnwindSafe(|| call(&node))) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => refuse(&node, &error),
        Err(panic) => {
            node.poison();
            let path = node.path().to_string_lossy();
            fail_with(libc::EIO, &format!("{path}: {}", defect(panic)))
        }
    }
}

/// What is not there any more is stale, and what cannot be written among a session's
/// files is a matter of permissions.
#[cold]
fn refuse(node: &OpenNode, error: &Error) -> c_int {
    match error.kind() {
        ErrorKind::NotFound => fail_with(libc::ESTALE, &error.full_message()),
        ErrorKind::ReadOnly if node.is_live() => fail_with(libc::EACCES, &error.full_message()),
        _ => fail(error),
    }
}

/// # Safety
/// `folders` is NULL or open during the lifetime that the caller picks.
unsafe fn shared<'a>(folders: *const FoldersHandle) -> Result<&'a Arc<Shared>> {
    // SAFETY: the caller's promise.
    let handle = unsafe { folders.as_ref() }.ok_or_else(|| null("the folders"))?;
    handle.shared.check()?;
    Ok(&handle.shared)
}

/// # Safety
/// `place` is NULL or can be written.
unsafe fn give(node: Arc<OpenNode>, place: *mut *mut OpenNode) -> Result<c_int> {
    if place.is_null() {
        return Err(null("the place for the node"));
    }
    // SAFETY: not NULL, and writable as the caller promises.
    unsafe { place.write(Arc::into_raw(node).cast_mut()) };
    Ok(0)
}

/// `coldrise_folders_open` of the header.
///
/// # Safety
/// The strings and the options are valid during the call; `folders` can be written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_folders_open(
    path: *const c_char,
    options: *const Options,
    mounted_at: *const c_char,
    idle_ms: u32,
    flags: u32,
    folders: *mut *mut FoldersHandle,
) -> c_int {
    guarded(|| {
        if folders.is_null() {
            return Err(null("the place for the folders"));
        }
        if flags & !FOLDERS_READ_ONLY != 0 {
            let what = format!("unknown flags in {flags:#x}: only COLDRISE_FOLDERS_READ_ONLY is");
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        // SAFETY: the caller's promise.
        let given = unsafe { Given::read(options) }?;
        // SAFETY: the caller's promise, and the path is used during the call only.
        let repository = open_repository(unsafe { file_path("the repository's path", path) }?, &given)?;
        let mounted_at = match mounted_at.is_null() {
            true => None,
            // SAFETY: as before.
            false => Some(unsafe { file_path("the root's path", mounted_at) }?),
        };
        let options = TreeOptions {
            program: &given.program,
            cache_bytes: given.cache_bytes,
            folder: mounted_at,
        };
        let opened = Folders::new(&repository, &options, flags & FOLDERS_READ_ONLY != 0)?;
        let handle = FoldersHandle::new(opened, Duration::from_millis(u64::from(idle_ms)))?;
        // SAFETY: not NULL, and writable as the caller promises.
        unsafe { folders.write(Box::into_raw(Box::new(handle))) };
        Ok(0)
    })
}

/// # Safety
/// As for [`c_str`].
unsafe fn file_path<'a>(what: &str, text: *const c_char) -> Result<&'a Path> {
    // SAFETY: passed on to the caller.
    let text = unsafe { c_str(what, text) }?;
    Ok(Path::new(OsStr::from_bytes(text.to_bytes())))
}

/// `coldrise_folders_close` of the header.
///
/// # Safety
/// `folders` is NULL or came from `coldrise_folders_open`, and is used by no call now
/// or later.
#[no_mangle]
pub unsafe extern "C" fn coldrise_folders_close(folders: *mut FoldersHandle) {
    if folders.is_null() {
        return;
    }
    // SAFETY: made by Box::into_raw, and given back once.
    let handle = unsafe { Box::from_raw(folders) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| handle.end())) {
        fail_with(libc::EIO, &defect(panic));
    }
}

/// `coldrise_folders_space` of the header.
///
/// # Safety
/// `folders` is open during the call; `space` can be written.
#[no_mangle]
pub unsafe extern "C" fn coldrise_folders_space(
    folders: *const FoldersHandle,
    space: *mut SpaceOfFolders,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let found = unsafe { shared(folders) }?.folders.space()?;
        if space.is_null() {
            return Err(null("the place for the space"));
        }
        let told = SpaceOfFolders {
            total_bytes: found.total_bytes,
            free_bytes: found.free_bytes,
            available_bytes: found.available_bytes,
        };
        // SAFETY: not NULL, and writable as the caller promises.
        unsafe { space.write(told) };
        Ok(0)
    })
}

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
        node.close_all();
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
            for (cookie, name) in folder.entries(after)? {
                let node = match folder.find(&name) {
                    // It has gone meanwhile.
                    Err(error) if error.kind() == ErrorKind::NotFound => continue,
                    node => Arc::into_raw(node?).cast_mut(),
                };
                if callback(context, c_string(&name).as_ptr(), node, cookie) != 0 {
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
                modified_s: i64::try_from(shown.since_1970.as_secs()).unwrap_or(i64::MAX),
                modified_ns: shown.since_1970.subsec_nanos(),
                mode: shown.mode,
                valid_s: shown.valid_s,
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
