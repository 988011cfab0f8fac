//! Opens the repository, and runs every call on a node.

use super::{FoldersHandle, NodeHandle};
use crate::guard::{c_str, defect, guarded, null};
use crate::message::{c_string, fail, fail_with};
use crate::repository::{Given, Options, open_repository};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_export::{Folders, TreeOptions};
use coldrise_nfs::{AttributeWatcher, Datastore, MissingName, OpenNode};
use std::ffi::{OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// `COLDRISE_FOLDERS_READ_ONLY` of the header.
pub const FOLDERS_READ_ONLY: u32 = 1 << 0;

/// `coldrise_forget_callback` of the header.
pub type ForgetCallback = unsafe extern "C" fn(*mut c_void, *const c_void, usize);

/// `struct coldrise_space` of the header.
#[repr(C)]
pub struct SpaceOfFolders {
    /// The total.
    pub total_bytes: u64,
    /// The free part.
    pub free_bytes: u64,
    /// The part that users other than root can fill.
    pub available_bytes: u64,
}

/// A host's context. The host keeps it valid, for any thread, while it may be used.
#[derive(Clone, Copy)]
pub(super) struct Context(*mut c_void);

// SAFETY: the host promises that it may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as before.
unsafe impl Sync for Context {}

impl Context {
    /// # Safety
    /// `context` may be used from any thread while the receiver of this value needs it.
    pub(super) unsafe fn new(context: *mut c_void) -> Context {
        Context(context)
    }

    pub(super) fn get(self) -> *mut c_void {
        self.0
    }
}

/// Runs an entry on a node; a panic stops its open files permanently.
///
/// # Safety
/// `node` is NULL or came from this library and is not released before this returns.
#[inline]
pub(super) unsafe fn on_node(
    node: *const NodeHandle,
    call: impl FnOnce(&Arc<OpenNode>) -> Result<c_int>,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { node.as_ref() }) else { return fail(&null("the node")) };
    let node = &handle.node;
    // Unwind safe: after a panic the open files refuse every call.
    match catch_unwind(AssertUnwindSafe(|| call(node))) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => refuse(node, &error),
        Err(panic) => {
            node.poison();
            fail_with(libc::EIO, &format!("{}: {}", node.path(), defect(panic)))
        }
    }
}

/// A missing node is stale, and a read-only file of a session is a permission error.
#[cold]
pub(super) fn refuse(node: &OpenNode, error: &Error) -> c_int {
    match error.kind() {
        ErrorKind::NotFound => fail_with(libc::ESTALE, &error.full_message()),
        ErrorKind::ReadOnly if node.is_live() => fail_with(libc::EACCES, &error.full_message()),
        _ => fail(error),
    }
}

/// The folder exists: a name in it is missing.
#[cold]
pub(super) fn refuse_name(missing: &MissingName) -> c_int {
    fail_with(libc::ENOENT, &missing.0.full_message())
}

/// # Safety
/// `folders` is NULL or open during the lifetime that the caller picks.
pub(super) unsafe fn datastore<'a>(folders: *const FoldersHandle) -> Result<&'a Datastore> {
    // SAFETY: the caller's promise.
    let handle = unsafe { folders.as_ref() }.ok_or_else(|| null("the folders"))?;
    Ok(&handle.datastore)
}

/// A node for C, which must release it.
pub(super) fn into_raw(node: Arc<OpenNode>) -> *mut NodeHandle {
    let path = c_string(node.path());
    Box::into_raw(Box::new(NodeHandle { node, path }))
}

/// # Safety
/// `place` is NULL or can be written.
pub(super) unsafe fn give(node: Arc<OpenNode>, place: *mut *mut NodeHandle) -> Result<c_int> {
    if place.is_null() {
        return Err(null("the place for the node"));
    }
    // SAFETY: not NULL, and writable as the caller promises.
    unsafe { place.write(into_raw(node)) };
    Ok(0)
}

/// `coldrise_folders_open` of the header.
///
/// # Safety
/// The strings and the options are valid during the call; `folders` can be written.
#[unsafe(no_mangle)]
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
        let repository =
            open_repository(unsafe { file_path("the repository's path", path) }?, &given)?;
        let mounted_at = if mounted_at.is_null() {
            None
        } else {
            // SAFETY: as before.
            Some(unsafe { file_path("the root's path", mounted_at) }?)
        };
        let options = TreeOptions {
            program: &given.program,
            cache_bytes: given.cache_bytes,
            folder: mounted_at,
        };
        let opened = Folders::new(&repository, &options, flags & FOLDERS_READ_ONLY != 0)?;
        let datastore = Datastore::new(opened, Duration::from_millis(u64::from(idle_ms)))?;
        let handle = FoldersHandle { datastore };
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
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_folders_close(folders: *mut FoldersHandle) {
    if folders.is_null() {
        return;
    }
    // SAFETY: made by Box::into_raw, and given back once.
    let handle = unsafe { Box::from_raw(folders) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| handle.datastore.end())) {
        fail_with(libc::EIO, &defect(panic));
    }
}

/// `coldrise_folders_watch` of the header.
///
/// # Safety
/// `folders` is open during the call; `callback` takes `context` from any thread until it
/// is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_folders_watch(
    folders: *const FoldersHandle,
    callback: Option<ForgetCallback>,
    context: *mut c_void,
) {
    // SAFETY: the caller's promise.
    if let Some(handle) = unsafe { folders.as_ref() } {
        // SAFETY: the caller's promise.
        let context = unsafe { Context::new(context) };
        handle.datastore.watch(callback.map(|callback| -> AttributeWatcher {
            Box::new(move |handle| {
                // SAFETY: the caller's promise; taking the callback back waits for this call.
                unsafe { callback(context.get(), handle.as_ptr().cast(), handle.len()) }
            })
        }));
    }
}

/// `coldrise_folders_space` of the header.
///
/// # Safety
/// `folders` is open during the call; `space` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_folders_space(
    folders: *const FoldersHandle,
    space: *mut SpaceOfFolders,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let found = unsafe { datastore(folders) }?.space()?;
        if space.is_null() {
            return Err(null("the place for the space"));
        }
        let found = SpaceOfFolders {
            total_bytes: found.total_bytes,
            free_bytes: found.free_bytes,
            available_bytes: found.available_bytes,
        };
        // SAFETY: not NULL, and writable as the caller promises.
        unsafe { space.write(found) };
        Ok(0)
    })
}
