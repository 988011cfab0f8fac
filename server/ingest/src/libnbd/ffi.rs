//! The libnbd functions in use, declared as in `libnbd.h` (1.14).
//!
//! Only [`super`] calls them.

use std::ffi::{c_char, c_int, c_void};

/// `struct nbd_handle`, opaque outside libnbd.
#[repr(C)]
pub(super) struct NbdHandle {
    private: [u8; 0],
}

/// `nbd_extent_callback`: called while libnbd reads a block status reply.
#[repr(C)]
pub(super) struct ExtentCallback {
    pub callback: Option<
        unsafe extern "C" fn(
            user_data: *mut c_void,
            metacontext: *const c_char,
            offset: u64,
            entries: *mut u32,
            nr_entries: usize,
            error: *mut c_int,
        ) -> c_int,
    >,
    pub user_data: *mut c_void,
    pub free: Option<unsafe extern "C" fn(user_data: *mut c_void)>,
}

/// `nbd_completion_callback`. Always the null one here: callers poll for completion.
#[repr(C)]
pub(super) struct CompletionCallback {
    pub callback: Option<unsafe extern "C" fn(user_data: *mut c_void, error: *mut c_int) -> c_int>,
    pub user_data: *mut c_void,
    pub free: Option<unsafe extern "C" fn(user_data: *mut c_void)>,
}

impl CompletionCallback {
    /// `NBD_NULL_COMPLETION`.
    pub(super) const NULL: CompletionCallback =
        CompletionCallback { callback: None, user_data: std::ptr::null_mut(), free: None };
}

/// `LIBNBD_SIZE_MINIMUM` for `nbd_get_block_size`.
pub(super) const SIZE_MINIMUM: c_int = 0;
/// `LIBNBD_SIZE_MAXIMUM` for `nbd_get_block_size`.
pub(super) const SIZE_MAXIMUM: c_int = 2;

#[link(name = "nbd")]
extern "C" {
    pub(super) fn nbd_create() -> *mut NbdHandle;
    pub(super) fn nbd_close(h: *mut NbdHandle);
    pub(super) fn nbd_get_error() -> *const c_char;
    pub(super) fn nbd_get_errno() -> c_int;
    pub(super) fn nbd_set_uri_allow_local_file(h: *mut NbdHandle, allow: bool) -> c_int;
    pub(super) fn nbd_add_meta_context(h: *mut NbdHandle, name: *const c_char) -> c_int;
    pub(super) fn nbd_can_meta_context(h: *mut NbdHandle, name: *const c_char) -> c_int;
    pub(super) fn nbd_aio_connect_uri(h: *mut NbdHandle, uri: *const c_char) -> c_int;
    pub(super) fn nbd_aio_connect_unix(h: *mut NbdHandle, path: *const c_char) -> c_int;
    pub(super) fn nbd_aio_disconnect(h: *mut NbdHandle, flags: u32) -> c_int;
    pub(super) fn nbd_aio_is_ready(h: *mut NbdHandle) -> c_int;
    pub(super) fn nbd_aio_is_dead(h: *mut NbdHandle) -> c_int;
    pub(super) fn nbd_aio_is_closed(h: *mut NbdHandle) -> c_int;
    pub(super) fn nbd_get_size(h: *mut NbdHandle) -> i64;
    pub(super) fn nbd_get_block_size(h: *mut NbdHandle, size_type: c_int) -> i64;
    pub(super) fn nbd_is_read_only(h: *mut NbdHandle) -> c_int;
    pub(super) fn nbd_can_zero(h: *mut NbdHandle) -> c_int;
    pub(super) fn nbd_can_flush(h: *mut NbdHandle) -> c_int;
    pub(super) fn nbd_can_multi_conn(h: *mut NbdHandle) -> c_int;
    pub(super) fn nbd_poll(h: *mut NbdHandle, timeout: c_int) -> c_int;
    pub(super) fn nbd_aio_command_completed(h: *mut NbdHandle, cookie: u64) -> c_int;
    pub(super) fn nbd_aio_pread(
        h: *mut NbdHandle,
        buf: *mut c_void,
        count: usize,
        offset: u64,
        completion: CompletionCallback,
        flags: u32,
    ) -> i64;
    pub(super) fn nbd_aio_pwrite(
        h: *mut NbdHandle,
        buf: *const c_void,
        count: usize,
        offset: u64,
        completion: CompletionCallback,
        flags: u32,
    ) -> i64;
    pub(super) fn nbd_aio_zero(
        h: *mut NbdHandle,
        count: u64,
        offset: u64,
        completion: CompletionCallback,
        flags: u32,
    ) -> i64;
    pub(super) fn nbd_aio_flush(
        h: *mut NbdHandle,
        completion: CompletionCallback,
        flags: u32,
    ) -> i64;
    pub(super) fn nbd_aio_block_status(
        h: *mut NbdHandle,
        count: u64,
        offset: u64,
        extent: ExtentCallback,
        completion: CompletionCallback,
        flags: u32,
    ) -> i64;
}
