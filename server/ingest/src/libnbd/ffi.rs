//! The libnbd functions in use, declared as in `libnbd.h` (1.14).
//!
//! Only [`super`] calls them.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use coldrise_block::{Error, ErrorKind, Result};

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

/// `LIBNBD_CMD_FLAG_DF`: the reply to a read is one piece of data.
pub(super) const FLAG_DF: u32 = 4;
/// `LIBNBD_STRICT_FLAGS`: refuses flags that libnbd does not expect, such as the one above in `nbd_aio_pread`.
pub(super) const STRICT_FLAGS: u32 = 2;
/// `LIBNBD_SIZE_MINIMUM` for `nbd_get_block_size`.
pub(super) const SIZE_MINIMUM: c_int = 0;
/// `LIBNBD_SIZE_MAXIMUM` for `nbd_get_block_size`.
pub(super) const SIZE_MAXIMUM: c_int = 2;

/// Declares libnbd's functions, and loads them when the first connection is made: libnbd brings GnuTLS, libxml2 and
/// ICU, whose loading would take 4 ms of every command.
macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        struct Functions { $($name: unsafe extern "C" fn($($type),*) $(-> $result)?,)* }

        fn functions() -> Result<&'static Functions> {
            static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
            let loaded = FUNCTIONS.get_or_init(|| {
                // SAFETY: libnbd's constructors may run at any time. The library is never unloaded.
                let library = unsafe { libc::dlopen(c"libnbd.so.0".as_ptr(), libc::RTLD_NOW) };
                let library = NonNull::new(library)?;
                Some(Functions { $($name: {
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: the library is loaded, and the name ends with a zero byte.
                    let address = unsafe { libc::dlsym(library.as_ptr(), name.as_ptr().cast()) };
                    let address = NonNull::new(address)?;
                    // SAFETY: this is the function's type in libnbd.h.
                    unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($type),*) $(-> $result)?,
                        >(address.as_ptr())
                    }
                },)* })
            });
            loaded.as_ref().ok_or_else(|| {
                let text = "libnbd.so.0 is missing: sources over NBD and images that are not raw need the package libnbd0";
                Error::new(ErrorKind::Unsupported, text)
            })
        }

        $(
            /// # Safety
            /// As in libnbd's manual; [`load`] has succeeded.
            pub(super) unsafe fn $name($($argument: $type),*) $(-> $result)? {
                let functions = functions().expect("a connection has loaded the library");
                // SAFETY: the caller's promise.
                unsafe { (functions.$name)($($argument),*) }
            }
        )*
    };
}

/// Loads the library, once.
///
/// # Errors
/// `Unsupported` if it is not installed.
pub(super) fn load() -> Result<()> {
    functions().map(|_| ())
}

functions! {
    fn nbd_create() -> *mut NbdHandle;
    fn nbd_close(h: *mut NbdHandle);
    fn nbd_get_error() -> *const c_char;
    fn nbd_get_errno() -> c_int;
    fn nbd_set_uri_allow_local_file(h: *mut NbdHandle, allow: bool) -> c_int;
    fn nbd_set_pread_initialize(h: *mut NbdHandle, request: bool) -> c_int;
    fn nbd_add_meta_context(h: *mut NbdHandle, name: *const c_char) -> c_int;
    fn nbd_can_meta_context(h: *mut NbdHandle, name: *const c_char) -> c_int;
    fn nbd_aio_connect_uri(h: *mut NbdHandle, uri: *const c_char) -> c_int;
    fn nbd_aio_connect_unix(h: *mut NbdHandle, path: *const c_char) -> c_int;
    fn nbd_aio_disconnect(h: *mut NbdHandle, flags: u32) -> c_int;
    fn nbd_aio_is_ready(h: *mut NbdHandle) -> c_int;
    fn nbd_aio_is_dead(h: *mut NbdHandle) -> c_int;
    fn nbd_aio_is_closed(h: *mut NbdHandle) -> c_int;
    fn nbd_get_size(h: *mut NbdHandle) -> i64;
    fn nbd_get_block_size(h: *mut NbdHandle, size_type: c_int) -> i64;
    fn nbd_is_read_only(h: *mut NbdHandle) -> c_int;
    fn nbd_can_zero(h: *mut NbdHandle) -> c_int;
    fn nbd_can_flush(h: *mut NbdHandle) -> c_int;
    fn nbd_can_multi_conn(h: *mut NbdHandle) -> c_int;
    fn nbd_can_df(h: *mut NbdHandle) -> c_int;
    fn nbd_get_strict_mode(h: *mut NbdHandle) -> u32;
    fn nbd_set_strict_mode(h: *mut NbdHandle, flags: u32) -> c_int;
    fn nbd_poll(h: *mut NbdHandle, timeout: c_int) -> c_int;
    fn nbd_aio_command_completed(h: *mut NbdHandle, cookie: u64) -> c_int;
    fn nbd_aio_pread(
        h: *mut NbdHandle,
        buf: *mut c_void,
        count: usize,
        offset: u64,
        completion: CompletionCallback,
        flags: u32
    ) -> i64;
    fn nbd_aio_pwrite(
        h: *mut NbdHandle,
        buf: *const c_void,
        count: usize,
        offset: u64,
        completion: CompletionCallback,
        flags: u32
    ) -> i64;
    fn nbd_aio_zero(
        h: *mut NbdHandle,
        count: u64,
        offset: u64,
        completion: CompletionCallback,
        flags: u32
    ) -> i64;
    fn nbd_aio_flush(h: *mut NbdHandle, completion: CompletionCallback, flags: u32) -> i64;
    fn nbd_aio_block_status(
        h: *mut NbdHandle,
        count: u64,
        offset: u64,
        extent: ExtentCallback,
        completion: CompletionCallback,
        flags: u32
    ) -> i64;
}
