//! Accesses to a mapped file that the kernel cannot serve: the device has a read error, another
//! process truncated the file, or a file system that copies on write has no space.
//!
//! The kernel reports such an access by SIGBUS, which ends the process by default. For guarded
//! mappings, the handler here replaces the missing page by a private page of zeroes and records the
//! fault. The access then continues. So what was read may be zeroes and what was stored may be
//! lost: the owner of the mapping asks [`Faults::seen`] before it relies on either.
//!
//! Other signals of this kind are passed to the handler that was installed before.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Once, OnceLock};

use libc::{c_int, c_void, siginfo_t};
use parking_lot::Mutex;

/// The faults of the mappings of one file.
#[derive(Clone, Default)]
pub(crate) struct Faults(Arc<AtomicBool>);

impl Faults {
    /// Whether an access failed since the file was mapped.
    #[inline]
    pub(crate) fn seen(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// An entry of the list that the handler searches. The handler may look at any entry at any time,
/// so entries are used again, but never freed.
struct Entry {
    start: AtomicUsize,
    /// 0 while the entry is unused.
    end: AtomicUsize,
    seen: AtomicPtr<AtomicBool>,
    next: *const Entry,
}

// SAFETY: `next` is set before the entry is shared, and points to another entry, which lives as
// long as the process.
unsafe impl Send for Entry {}
// SAFETY: as above; the other fields are atomic.
unsafe impl Sync for Entry {}

static ENTRIES: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());
static UNUSED: Mutex<Vec<&'static Entry>> = Mutex::new(Vec::new());
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
static INSTALLED: Once = Once::new();

/// Guards a mapping until it is dropped, which comes before the unmapping.
pub(super) struct Guard {
    entry: &'static Entry,
    _faults: Faults,
}

impl Guard {
    /// Guards `length_bytes` bytes from `start` on, before the first access.
    pub(super) fn new(start: *const u8, length_bytes: usize, faults: &Faults) -> Guard {
        INSTALLED.call_once(install);
        let mut unused = UNUSED.lock();
        let entry = unused.pop().unwrap_or_else(|| {
            let next = ENTRIES.load(Ordering::Acquire);
            let entry = Box::leak(Box::new(Entry {
                start: AtomicUsize::new(0),
                end: AtomicUsize::new(0),
                seen: AtomicPtr::new(ptr::null_mut()),
                next,
            }));
            ENTRIES.store(entry, Ordering::Release);
            entry
        });
        entry.seen.store(Arc::as_ptr(&faults.0).cast_mut(), Ordering::SeqCst);
        entry.start.store(start as usize, Ordering::SeqCst);
        entry.end.store(start as usize + length_bytes, Ordering::SeqCst);
        Guard { entry, _faults: faults.clone() }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.entry.end.store(0, Ordering::SeqCst);
        UNUSED.lock().push(self.entry);
    }
}

/// The flag of the guarded mapping that holds `address`. Called by the handler: it takes no lock and
/// no memory.
fn flag_of(address: usize) -> Option<*mut AtomicBool> {
    let mut next: *const Entry = ENTRIES.load(Ordering::SeqCst);
    // SAFETY: entries are never freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        let end = entry.end.load(Ordering::SeqCst);
        let start = entry.start.load(Ordering::SeqCst);
        let seen = entry.seen.load(Ordering::SeqCst);
        // The end changes first and last. If it is still the same, the others belong to it.
        if (start..end).contains(&address) && entry.end.load(Ordering::SeqCst) == end {
            return Some(seen);
        }
        next = entry.next;
    }
    None
}

/// Bytes of a page of memory.
pub(super) fn page_bytes() -> usize {
    // SAFETY: it reads a constant of the system.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

fn install() {
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_fault;
    // SAFETY: both structures are valid, and the handler calls only what is safe in a handler.
    unsafe {
        let mut previous = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, ptr::null(), &mut previous) != 0 {
            return;
        }
        let _ = PREVIOUS.set(previous);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes valid pointers. The flag belongs to a mapping that the interrupted
    // thread is accessing, so its owner is alive. The new page replaces one of that mapping.
    unsafe {
        // A positive code comes from the kernel, with an address.
        let flag = match (*info).si_code > 0 {
            true => flag_of((*info).si_addr() as usize),
            false => None,
        };
        if let Some(flag) = flag {
            let errno = *libc::__errno_location();
            let page_bytes = page_bytes();
            let page = (*info).si_addr() as usize & !(page_bytes - 1);
            (*flag).store(true, Ordering::SeqCst);
            let placed = libc::mmap(
                page as *mut c_void,
                page_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            );
            *libc::__errno_location() = errno;
            if placed != libc::MAP_FAILED {
                return;
            }
        }
        pass_on(signal, info, context);
    }
}

/// Calls the handler that was installed before. Without one, the signal ends the process.
///
/// # Safety
/// Called in a signal handler, with its arguments.
unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS
        .get()
        .filter(|action| ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction));
    // SAFETY: the flags say which kind of handler it is.
    unsafe {
        match previous {
            Some(action) if action.sa_flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                    std::mem::transmute(action.sa_sigaction);
                handler(signal, info, context);
            }
            Some(action) => {
                let handler: extern "C" fn(c_int) = std::mem::transmute(action.sa_sigaction);
                handler(signal);
            }
            None => {
                libc::signal(signal, libc::SIG_DFL);
                // Delivered when this handler returns.
                libc::raise(signal);
            }
        }
    }
}
