//! Lists and opens exports.

use crate::guard::{defect, guarded, null, utf8};
use crate::message::{c_string, fail_with};
use crate::{ExportHandle, RepositoryHandle};
use coldrise_block::{Error, ErrorKind};
use coldrise_export::{Listed, MAX_EXPORT_NAME_BYTES};
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// `COLDRISE_NAME_MAX` of the header.
pub(crate) const NAME_MAX: usize = 256;
const _: () = assert!(MAX_EXPORT_NAME_BYTES < NAME_MAX);

/// `COLDRISE_LIST_IMAGES` of the header.
pub const LIST_IMAGES: u32 = 1 << 0;

/// `coldrise_list_callback` of the header.
pub type ListCallback =
    unsafe extern "C" fn(context: *mut c_void, *const c_char, *const c_char) -> c_int;

/// `coldrise_exports_list` of the header.
///
/// # Safety
/// `repository` is open during the call; `callback` takes `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_exports_list(
    repository: *const RepositoryHandle,
    limit: usize,
    flags: u32,
    callback: Option<ListCallback>,
    context: *mut c_void,
) -> c_int {
    let mut stopped = false;
    let result = guarded(|| {
        // SAFETY: the caller's promise.
        let repository = unsafe { repository.as_ref() }.ok_or_else(|| null("the repository"))?;
        let callback = callback.ok_or_else(|| null("the callback"))?;
        let listed = match flags {
            0 => Listed::Disks,
            LIST_IMAGES => Listed::DisksAndImages,
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("unknown flags in {flags:#x}: only COLDRISE_LIST_IMAGES is known"),
                ));
            }
        };
        for entry in repository.tree.list(limit, listed)? {
            let (name, description) = (c_string(&entry.name), c_string(&entry.description));
            // SAFETY: both strings outlive the call, and the context is the one
            // that the caller gave for this callback.
            if unsafe { callback(context, name.as_ptr(), description.as_ptr()) } != 0 {
                stopped = true;
                break;
            }
        }
        Ok(0)
    });
    if stopped {
        return fail_with(libc::ECANCELED, "the caller stopped the listing");
    }
    result
}

/// `coldrise_exports_default` of the header.
///
/// # Safety
/// `repository` is open during the call; `name` holds `COLDRISE_NAME_MAX` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_exports_default(
    repository: *const RepositoryHandle,
    name: *mut c_char,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let repository = unsafe { repository.as_ref() }.ok_or_else(|| null("the repository"))?;
        if name.is_null() {
            return Err(null("the place for the name"));
        }
        let Some(found) = repository.tree.default_name()? else { return Ok(0) };
        let found = c_string(&found);
        let bytes = found.as_bytes_with_nul();
        if bytes.len() > NAME_MAX {
            return Err(Error::new(ErrorKind::Internal, "a name is too long"));
        }
        // SAFETY: the caller's room is NAME_MAX bytes, and not ours.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), name.cast(), bytes.len()) };
        Ok(1)
    })
}

/// `coldrise_export_open` of the header.
///
/// # Safety
/// `repository` is open and `name` valid during the call; `export` can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_open(
    repository: *const RepositoryHandle,
    name: *const c_char,
    read_only: c_int,
    export: *mut *mut ExportHandle,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let repository = unsafe { repository.as_ref() }.ok_or_else(|| null("the repository"))?;
        if export.is_null() {
            return Err(null("the place for the export"));
        }
        // SAFETY: the caller's promise.
        let name = unsafe { utf8("the export's name", name) }?;
        let opened = repository.tree.open(name, read_only != 0)?;
        let exports = &repository.exports;
        let handle = exports.give(Box::new(ExportHandle::new(opened, exports)));
        // SAFETY: not NULL, and writable as the caller promises.
        unsafe { export.write(handle) };
        Ok(0)
    })
}

/// `coldrise_export_close` of the header.
///
/// # Safety
/// `export` is NULL or came from `coldrise_export_open`, and is not used by any
/// call now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_close(export: *mut ExportHandle) {
    // SAFETY: the caller's promise. The table outlives the handle.
    let Some(opened_by) = (unsafe { export.as_ref() }).map(|handle| Arc::clone(&handle.opened_by))
    else {
        return;
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(opened_by.take_back(export)))) {
        fail_with(libc::EIO, &defect(panic));
    }
}
