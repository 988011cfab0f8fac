//! The data path.

use crate::ExportHandle;
use crate::guard::{bytes, bytes_mut, null, on_export};
use crate::message::fail_with;
use coldrise_block::{Disk, Error, ErrorKind, Result};
use std::ffi::{c_char, c_int, c_void};

/// `COLDRISE_EXPORT_WRITABLE` of the header.
pub const EXPORT_WRITABLE: u32 = 1 << 0;
/// `COLDRISE_FUA` of the header.
pub const FUA: u32 = 1 << 0;
/// `COLDRISE_EXTENT_HOLE` of the header.
pub const EXTENT_HOLE: u32 = 1 << 0;

/// `coldrise_export_size` of the header; 0 for NULL.
///
/// # Safety
/// `export` is NULL or open during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_size(export: *const ExportHandle) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { export.as_ref() }.map_or(0, |handle| handle.size_bytes)
}

/// `coldrise_export_flags` of the header; 0 for NULL.
///
/// # Safety
/// `export` is NULL or open during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_flags(export: *const ExportHandle) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { export.as_ref() }.map_or(0, |handle| handle.flags)
}

/// `coldrise_export_name` of the header; empty for NULL.
///
/// # Safety
/// `export` is NULL or open as long as the string is used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_name(export: *const ExportHandle) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { export.as_ref() }.map_or(c"".as_ptr(), |handle| handle.name.as_ptr())
}

/// `coldrise_export_description` of the header; empty for NULL.
///
/// # Safety
/// `export` is NULL or open as long as the string is used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_description(export: *const ExportHandle) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { export.as_ref() }.map_or(c"".as_ptr(), |handle| handle.description.as_ptr())
}

/// `coldrise_export_read` of the header.
///
/// # Safety
/// `export` is NULL or open during the call; `buffer` can be written for
/// `length` bytes by this call alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_read(
    export: *const ExportHandle,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
) -> c_int {
    // SAFETY: the caller's promise, for the export and for the buffer.
    unsafe {
        on_export(export, |export| export.disk().read_at(bytes_mut(buffer.cast(), length)?, offset))
    }
}

/// `coldrise_export_write` of the header.
///
/// # Safety
/// `export` is NULL or open during the call; `buffer` holds `length` bytes that nothing
/// changes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_write(
    export: *const ExportHandle,
    buffer: *const c_void,
    length: usize,
    offset: u64,
    flags: u32,
) -> c_int {
    // SAFETY: the caller's promise, for the export and for the buffer.
    unsafe {
        on_export(export, |export| {
            let disk = export.disk();
            check_flags(flags)?;
            disk.write_at(bytes(buffer.cast(), length)?, offset)?;
            flush_if_asked(disk, flags)
        })
    }
}

/// `coldrise_export_flush` of the header.
///
/// # Safety
/// `export` is NULL or open during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_flush(export: *const ExportHandle) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_export(export, |export| export.disk().flush()) }
}

/// `coldrise_export_zero` of the header.
///
/// # Safety
/// `export` is NULL or open during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_zero(
    export: *const ExportHandle,
    length: u64,
    offset: u64,
    flags: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_export(export, |export| {
            let disk = export.disk();
            check_flags(flags)?;
            disk.write_zeroes(offset, length)?;
            flush_if_asked(disk, flags)
        })
    }
}

/// `coldrise_export_trim` of the header.
///
/// # Safety
/// `export` is NULL or open during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_trim(
    export: *const ExportHandle,
    length: u64,
    offset: u64,
    flags: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        on_export(export, |export| {
            let disk = export.disk();
            check_flags(flags)?;
            disk.trim(offset, length)?;
            flush_if_asked(disk, flags)
        })
    }
}

/// `coldrise_export_prefetch` of the header.
///
/// # Safety
/// `export` is NULL or open during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_prefetch(
    export: *const ExportHandle,
    length: u64,
    offset: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_export(export, |export| export.prefetch(offset, length)) }
}

/// `coldrise_extent_callback` of the header.
pub type ExtentCallback =
    unsafe extern "C" fn(context: *mut c_void, offset: u64, length: u64, flags: u32) -> c_int;

/// `coldrise_export_extents` of the header.
///
/// # Safety
/// `export` is NULL or open during the call; `callback` takes `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_export_extents(
    export: *const ExportHandle,
    length: u64,
    offset: u64,
    limit: usize,
    callback: Option<ExtentCallback>,
    context: *mut c_void,
) -> c_int {
    let mut stopped = false;
    // SAFETY: the caller's promise, for the export and for the callback.
    let result = unsafe {
        on_export(export, |export| {
            let callback = callback.ok_or_else(|| null("the callback"))?;
            let limit = limit.max(1);
            for extent in export.disk().extents(offset, length, limit)?.iter().take(limit) {
                let flags = if extent.kind.reads_zero() { EXTENT_HOLE } else { 0 };
                if callback(context, extent.offset_bytes, extent.length_bytes, flags) != 0 {
                    stopped = true;
                    break;
                }
            }
            Ok(())
        })
    };
    if stopped {
        return fail_with(libc::ECANCELED, "the caller stopped the extents");
    }
    result
}

#[inline]
fn check_flags(flags: u32) -> Result<()> {
    if flags & !FUA != 0 {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("unknown flags in {flags:#x}: only COLDRISE_FUA is known"),
        ));
    }
    Ok(())
}

#[inline]
fn flush_if_asked(disk: &dyn Disk, flags: u32) -> Result<()> {
    if flags & FUA != 0 {
        return disk.flush();
    }
    Ok(())
}
