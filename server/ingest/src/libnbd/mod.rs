//! A connection to an NBD server, through libnbd.
//!
//! One [`Connection`] belongs to one thread at a time. Every call splits its range into
//! requests that the server accepts and keeps several of them in flight, so a single
//! connection can fill a link. A waiting call checks the caller's cancel flag every 50 ms.
//!
//! This module is the only one of the crate with `unsafe`: libnbd is a C library. Two facts
//! justify every block below. First, libnbd starts no thread: it touches a handle, and the
//! memory of its requests, only inside a call on that handle, and a `Connection` is the
//! handle's only owner. Second, a request borrows the caller's memory only during one method
//! here. The method returns when all its requests are retired, or after it has closed the
//! handle, which drops the requests. So libnbd never touches borrowed memory after the
//! borrow ends.
#![allow(unsafe_code)]

mod ffi;
mod in_flight;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, MAX_DISK_SIZE_BYTES, Result};

/// The largest single request, in bytes; the server's own limit may be lower.
const MAX_REQUEST_BYTES: u64 = 1 << 20;
/// Longest range of one block status request: the protocol's length field has 32 bits, and a
/// multiple of every block size keeps the range aligned.
const MAX_STATUS_BYTES: u64 = 1 << 30;
/// Longest range of one zero request, for the same reason.
const MAX_ZERO_BYTES: u64 = 1 << 30;
/// How often a waiting call checks the cancel flag.
const POLL_MS: c_int = 50;
/// Time limit of an orderly disconnect.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);
/// Entries kept of one block status reply; the rest is requested again.
const MAX_STATUS_ENTRIES: usize = 1 << 16;

/// The unit in which QEMU's copy-before-write saves old content, in bytes.
const SAVED_BYTES: u64 = 64 << 10;

/// The metadata context that distinguishes allocated from unallocated ranges.
pub(crate) const BASE_ALLOCATION: &str = "base:allocation";

/// Loads libnbd, which sources and targets over NBD and images that are not raw need.
///
/// # Errors
/// `Unsupported` if it is not installed.
pub fn check_libnbd() -> Result<()> {
    ffi::load()
}

/// The server's address.
#[derive(Clone, Debug)]
pub(crate) enum Endpoint {
    /// An NBD URI, as the user wrote it.
    Uri(String),
    /// A Unix socket created by us, its default export.
    Socket(PathBuf),
}

/// One run of a block status reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StatusRun {
    /// Length of the run in bytes; never 0.
    pub length_bytes: u64,
    /// The context's flags (`base:allocation`: 1 hole, 2 zero; a dirty bitmap: 1 dirty).
    pub flags: u32,
}

/// The server's properties of an export, from the negotiation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExportFacts {
    /// Size of the export in bytes.
    pub size_bytes: u64,
    /// Smallest unit that may be read or written, in bytes; a power of two.
    pub minimum_block_bytes: u64,
    /// True when the export refuses writes.
    pub is_read_only: bool,
    /// True when the server writes zeroes by itself.
    pub can_zero: bool,
    /// True when the server knows FLUSH.
    pub can_flush: bool,
    /// True when a FLUSH on one connection covers the writes of all.
    pub can_multi_conn: bool,
}

/// A connection, ready for requests.
pub(crate) struct Connection<'c> {
    /// `None` after an error or a cancel has closed it.
    handle: Option<NonNull<ffi::NbdHandle>>,
    facts: ExportFacts,
    max_request_bytes: u64,
    read_flags: u32,
    cancel: &'c AtomicBool,
}

// SAFETY: a libnbd handle may be used from any thread (libnbd locks it), and the connection
// is its only owner. `ffi::NbdHandle` is only an opaque type for a pointer.
unsafe impl Send for Connection<'_> {}

/// The text and kind of libnbd's last error on this thread.
fn last_error(what: &str) -> Error {
    // SAFETY: no arguments; the errno belongs to this thread.
    let errno = unsafe { ffi::nbd_get_errno() };
    // SAFETY: the returned string belongs to this thread and stays valid until the
    // next libnbd call on it; it is copied here at once.
    let text = unsafe {
        let text = ffi::nbd_get_error();
        if text.is_null() {
            "no reason was given".to_string()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    };
    // "nbd_aio_pread: …" names a C function, which does not help the user.
    let text = match text.split_once(": ") {
        Some((call, rest)) if call.starts_with("nbd_") => rest.to_string(),
        _ => text,
    };
    let kind = match errno {
        libc::ENOSPC => ErrorKind::NoSpace,
        libc::EROFS => ErrorKind::ReadOnly,
        libc::ENOENT => ErrorKind::NotFound,
        _ => ErrorKind::Io,
    };
    Error::with_source(kind, what, text)
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Interrupted, "cancelled")
}

/// `what` as a C string.
fn c_string(text: impl Into<Vec<u8>>, what: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| Error::new(ErrorKind::InvalidInput, format!("{what} contains a NUL byte")))
}

/// The runs that [`collect_runs`] gathers for one context.
struct Collected<'a> {
    context: &'a CStr,
    offset_bytes: u64,
    runs: Vec<StatusRun>,
}

/// The extent callback: keeps the entries of the wanted context.
///
/// # Safety
/// `user_data` points to a live `Collected` without other users; `metacontext` is a C string
/// and `entries` an array of `nr_entries` numbers (libnbd's promise).
unsafe extern "C" fn collect_runs(
    user_data: *mut c_void,
    metacontext: *const c_char,
    offset: u64,
    entries: *mut u32,
    nr_entries: usize,
    _error: *mut c_int,
) -> c_int {
    // SAFETY: see above; `Connection::status` keeps the value alive and unused
    // until the request is retired or the handle closed.
    let (collected, context, entries) = unsafe {
        (
            &mut *user_data.cast::<Collected>(),
            CStr::from_ptr(metacontext),
            std::slice::from_raw_parts(entries, nr_entries),
        )
    };
    if context != collected.context || offset != collected.offset_bytes {
        return 0;
    }
    for pair in entries.chunks_exact(2).take(MAX_STATUS_ENTRIES) {
        if pair[0] == 0 {
            break;
        }
        collected.runs.push(StatusRun { length_bytes: u64::from(pair[0]), flags: pair[1] });
    }
    0
}

impl<'c> Connection<'c> {
    /// Connects and negotiates. Requests `contexts`; [`Connection::has_context`] tells
    /// whether the server has them.
    pub(crate) fn open(
        endpoint: &Endpoint,
        contexts: &[&str],
        cancel: &'c AtomicBool,
    ) -> Result<Connection<'c>> {
        ffi::load()?;
        // SAFETY: no arguments; a null result is an error.
        let handle = NonNull::new(unsafe { ffi::nbd_create() })
            .ok_or_else(|| last_error("preparing an NBD connection"))?;
        // From here on, dropping `connection` closes the handle.
        let mut connection = Connection {
            handle: Some(handle),
            facts: ExportFacts {
                size_bytes: 0,
                minimum_block_bytes: 1,
                is_read_only: true,
                can_zero: false,
                can_flush: false,
                can_multi_conn: false,
            },
            max_request_bytes: MAX_REQUEST_BYTES,
            read_flags: 0,
            cancel,
        };
        // Buffers are initialised: libnbd need not write zeroes into them before each read.
        // SAFETY: a live handle.
        unsafe { ffi::nbd_set_pread_initialize(handle.as_ptr(), false) };
        for context in contexts {
            let name = c_string(*context, "the name of a bitmap")?;
            // SAFETY: a live handle and a C string that libnbd copies.
            if unsafe { ffi::nbd_add_meta_context(handle.as_ptr(), name.as_ptr()) } < 0 {
                return Err(last_error("asking for block status"));
            }
        }
        let started = match endpoint {
            Endpoint::Uri(uri) => {
                let uri = c_string(uri.as_str(), "the NBD URI")?;
                // The user wrote the URI, so the user named the files in it (TLS
                // credentials).
                // SAFETY: a live handle and C strings that libnbd copies.
                unsafe {
                    ffi::nbd_set_uri_allow_local_file(handle.as_ptr(), true);
                    ffi::nbd_aio_connect_uri(handle.as_ptr(), uri.as_ptr())
                }
            }
            Endpoint::Socket(path) => {
                let path = c_string(path.as_os_str().as_encoded_bytes(), "the socket's path")?;
                // SAFETY: a live handle and a C string that libnbd copies.
                unsafe { ffi::nbd_aio_connect_unix(handle.as_ptr(), path.as_ptr()) }
            }
        };
        if started < 0 {
            return Err(last_error("connecting to the NBD server"));
        }
        connection.wait("connecting to the NBD server", |handle| {
            // SAFETY: a live handle.
            match unsafe { ffi::nbd_aio_is_ready(handle) } {
                0 => Ok(false),
                1 => Ok(true),
                _ => Err(last_error("connecting to the NBD server")),
            }
        })?;
        connection.learn_facts(handle)?;
        Ok(connection)
    }

    fn learn_facts(&mut self, handle: NonNull<ffi::NbdHandle>) -> Result<()> {
        let h = handle.as_ptr();
        // SAFETY: a live, connected handle; every call only reads negotiated values.
        let (size, minimum, maximum, read_only, zero, flush, multi) = unsafe {
            (
                ffi::nbd_get_size(h),
                ffi::nbd_get_block_size(h, ffi::SIZE_MINIMUM),
                ffi::nbd_get_block_size(h, ffi::SIZE_MAXIMUM),
                ffi::nbd_is_read_only(h),
                ffi::nbd_can_zero(h),
                ffi::nbd_can_flush(h),
                ffi::nbd_can_multi_conn(h),
            )
        };
        let size_bytes =
            u64::try_from(size).map_err(|_| last_error("asking for the export's size"))?;
        if size_bytes > MAX_DISK_SIZE_BYTES {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the export has {size_bytes} bytes: more than {MAX_DISK_SIZE_BYTES}, the \
                     largest disk that can be kept"
                ),
            ));
        }
        // 0 means that the server did not report it.
        let minimum = u64::try_from(minimum).unwrap_or(0).max(1);
        let maximum = match u64::try_from(maximum).unwrap_or(0) {
            0 => MAX_REQUEST_BYTES,
            bytes => bytes.min(MAX_REQUEST_BYTES),
        };
        if !minimum.is_power_of_two() || minimum > maximum {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the server accepts requests of {minimum} to {maximum} bytes only"),
            ));
        }
        self.max_request_bytes = maximum - maximum % minimum;
        self.facts = ExportFacts {
            size_bytes,
            minimum_block_bytes: minimum,
            is_read_only: read_only == 1,
            can_zero: zero == 1,
            can_flush: flush == 1,
            can_multi_conn: multi == 1,
        };
        Ok(())
    }

    /// The server's properties of the export.
    pub(crate) fn facts(&self) -> &ExportFacts {
        &self.facts
    }

    /// True when the server agreed to report the context.
    pub(crate) fn has_context(&self, context: &str) -> Result<bool> {
        let name = c_string(context, "the name of a bitmap")?;
        let handle = self.live()?;
        // SAFETY: a live, connected handle and a C string.
        Ok(unsafe { ffi::nbd_can_meta_context(handle, name.as_ptr()) } == 1)
    }

    /// For a view of the content of an instant (QEMU's snapshot-access): from now on the server answers each read with its data, and does not
    /// leave out ranges that it takes for zeroes; and no request has parts that QEMU saves apart. QEMU 7.2 reads a request of saved and
    /// other parts from the present disk.
    pub(crate) fn read_whole(&mut self) -> Result<()> {
        let handle = self.live()?;
        // SAFETY: a live, connected handle.
        match unsafe { ffi::nbd_can_df(handle) } {
            1 => {
                // SAFETY: as above.
                let done = unsafe {
                    let mode = ffi::nbd_get_strict_mode(handle) & !ffi::STRICT_FLAGS;
                    ffi::nbd_set_strict_mode(handle, mode)
                };
                if done != 0 {
                    return Err(last_error("preparing the connection"));
                }
                self.read_flags = ffi::FLAG_DF;
            }
            // Without structured replies each reply is one piece of data.
            0 => {}
            _ => return Err(last_error("asking for the export's flags")),
        }
        Ok(())
    }

    /// Fills `buffer` from `offset_bytes` on.
    pub(crate) fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        // The first request ends where those of the unit begin.
        let first = offset_bytes.next_multiple_of(SAVED_BYTES) - offset_bytes;
        if self.read_flags == 0 || first == 0 || first >= buffer.len() as u64 {
            return self.read_aligned(buffer, offset_bytes);
        }
        let (head, rest) = buffer.split_at_mut(first as usize);
        self.read_aligned(head, offset_bytes)?;
        self.read_aligned(rest, offset_bytes + first)
    }

    fn read_aligned(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        let total = buffer.len() as u64;
        let (base, flags) = (buffer.as_mut_ptr(), self.read_flags);
        let most = match flags {
            0 => self.max_request_bytes,
            _ => self.max_request_bytes.min(SAVED_BYTES),
        };
        self.batch(total, most, "reading", |handle, at, length| {
            // SAFETY: `at + length` lies within `buffer` (batch's promise) and the pieces
            // do not overlap; the buffer stays borrowed until `batch` has retired or
            // dropped every request.
            unsafe {
                ffi::nbd_aio_pread(
                    handle,
                    base.add(at as usize).cast(),
                    length as usize,
                    offset_bytes + at,
                    ffi::CompletionCallback::NULL,
                    flags,
                )
            }
        })
    }

    /// Writes `bytes` at `offset_bytes`.
    pub(crate) fn write_at(&mut self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let base = bytes.as_ptr();
        self.batch(bytes.len() as u64, self.max_request_bytes, "writing", |handle, at, length| {
            // SAFETY: as in `read_at`; libnbd only reads the memory.
            unsafe {
                ffi::nbd_aio_pwrite(
                    handle,
                    base.add(at as usize).cast(),
                    length as usize,
                    offset_bytes + at,
                    ffi::CompletionCallback::NULL,
                    0,
                )
            }
        })
    }

    /// Makes a range read as zeroes. Requires `can_zero`.
    pub(crate) fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.batch(length_bytes, MAX_ZERO_BYTES, "zeroing", |handle, at, length| {
            // SAFETY: a live handle; no memory is lent.
            unsafe {
                ffi::nbd_aio_zero(
                    handle,
                    length,
                    offset_bytes + at,
                    ffi::CompletionCallback::NULL,
                    0,
                )
            }
        })
    }

    /// Makes every completed write durable. Requires `can_flush`.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.batch(1, 1, "flushing", |handle, _, _| {
            // SAFETY: a live handle; no memory is lent.
            unsafe { ffi::nbd_aio_flush(handle, ffi::CompletionCallback::NULL, 0) }
        })
    }

    /// The runs of one context from `offset_bytes` on: at least one, at most up to the end
    /// of the range. The server may end its answer early.
    pub(crate) fn status(
        &mut self,
        context: &str,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<Vec<StatusRun>> {
        let name = c_string(context, "the name of a bitmap")?;
        let length = length_bytes.min(MAX_STATUS_BYTES);
        let mut collected = Collected { context: &name, offset_bytes, runs: Vec::new() };
        let user_data: *mut c_void = (&raw mut collected).cast();
        self.batch(length, MAX_STATUS_BYTES, "asking for block status", |handle, _, length| {
            // SAFETY: `collected` outlives `batch`, which returns only when the request is
            // retired or dropped, and nothing else touches it until then.
            unsafe {
                ffi::nbd_aio_block_status(
                    handle,
                    length,
                    offset_bytes,
                    ffi::ExtentCallback { callback: Some(collect_runs), user_data, free: None },
                    ffi::CompletionCallback::NULL,
                    0,
                )
            }
        })?;
        let mut left = length;
        let mut runs = std::mem::take(&mut collected.runs);
        runs.retain_mut(|run| {
            run.length_bytes = run.length_bytes.min(left);
            left -= run.length_bytes;
            run.length_bytes > 0
        });
        if runs.is_empty() {
            return Err(Error::new(
                ErrorKind::Io,
                format!("the server returned no {context} at offset {offset_bytes}"),
            ));
        }
        Ok(runs)
    }

    fn live(&self) -> Result<*mut ffi::NbdHandle> {
        self.handle.map(NonNull::as_ptr).ok_or_else(|| {
            Error::new(ErrorKind::Io, "an earlier error closed the connection to the NBD server")
        })
    }

    /// Closes without an orderly disconnect; requests in flight are dropped.
    fn close(&mut self) {
        if let Some(handle) = self.handle.take() {
            // SAFETY: the handle was live, and it was taken out above, so it is closed only
            // once.
            unsafe { ffi::nbd_close(handle.as_ptr()) }
        }
    }

    /// Disconnects in order, so that the server can close in order.
    fn say_goodbye(&mut self) {
        let Some(handle) = self.handle.map(NonNull::as_ptr) else { return };
        // SAFETY: a live handle; no request is in flight outside of a method.
        let is_leaving = unsafe {
            ffi::nbd_aio_is_ready(handle) == 1 && ffi::nbd_aio_disconnect(handle, 0) == 0
        };
        if !is_leaving {
            return;
        }
        let started = Instant::now();
        // SAFETY: a live handle.
        while unsafe { ffi::nbd_aio_is_closed(handle) == 0 && ffi::nbd_aio_is_dead(handle) == 0 }
            && started.elapsed() < GOODBYE_LIMIT
        {
            // SAFETY: a live handle.
            if unsafe { ffi::nbd_poll(handle, POLL_MS) } < 0 {
                return;
            }
        }
    }
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        self.say_goodbye();
        self.close();
    }
}
