//! Opens and closes a repository.

use crate::RepositoryHandle;
use crate::guard::{c_str, defect, guarded, null, utf8};
use crate::message::fail_with;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_export::{ExportTree, TreeOptions};
use coldrise_store::{OpenOptions, PassphraseSource, Repository, default_cache_bytes};
use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use std::ffi::{OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `COLDRISE_CACHE_DEFAULT` of the header.
const CACHE_DEFAULT: u64 = u64::MAX;

/// `struct coldrise_options` of the header.
#[repr(C)]
pub struct Options {
    /// The server's name; NULL: unknown.
    pub program: *const c_char,
    /// NULL: none.
    pub passphrase_file: *const c_char,
    /// NULL: none.
    pub passphrase_command: *const c_char,
    /// Maximum size of the cache of decoded chunks, in bytes; 0: off.
    pub cache_bytes: u64,
}

/// The options with every pointer read.
pub(crate) struct Given {
    pub(crate) program: String,
    passphrase: PassphraseSource,
    pub(crate) cache_bytes: u64,
}

impl Given {
    /// # Safety
    /// `options` is NULL or points to options whose strings are NULL or
    /// NUL-terminated, unchanged during the call.
    pub(crate) unsafe fn read(options: *const Options) -> Result<Given> {
        // SAFETY: the caller's promise.
        let Some(options) = (unsafe { options.as_ref() }) else { return Err(null("options")) };
        let program = if options.program.is_null() {
            "unknown"
        } else {
            // SAFETY: the caller's promise; copied below, before the call ends.
            unsafe { utf8("program", options.program) }?
        };
        let passphrase =
            match (options.passphrase_file.is_null(), options.passphrase_command.is_null()) {
                (true, true) => PassphraseSource::None,
                (false, true) => {
                    // SAFETY: the caller's promise; copied into the path at once.
                    let file = unsafe { path("the passphrase file", options.passphrase_file) }?;
                    PassphraseSource::File(file)
                }
                (true, false) => {
                    // SAFETY: the caller's promise; copied at once.
                    let command =
                        unsafe { utf8("passphrase command", options.passphrase_command) }?;
                    PassphraseSource::Command(command.to_owned())
                }
                (false, false) => {
                    return Err(Error::new(
                        ErrorKind::InvalidInput,
                        "a passphrase file and a passphrase command exclude each other",
                    ));
                }
            };
        let cache_bytes = match options.cache_bytes {
            CACHE_DEFAULT => default_cache_bytes(),
            bytes => bytes,
        };
        Ok(Given { program: program.to_owned(), passphrase, cache_bytes })
    }
}

/// # Safety
/// As for [`c_str`].
unsafe fn path(what: &str, text: *const c_char) -> Result<PathBuf> {
    // SAFETY: passed on to the caller; copied at once.
    let bytes = unsafe { c_str(what, text) }?;
    Ok(PathBuf::from(OsStr::from_bytes(bytes.to_bytes())))
}

/// `coldrise_repository_check` of the header.
///
/// # Safety
/// The strings and the options are valid during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_repository_check(
    repository_path: *const c_char,
    options: *const Options,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (path, given) =
            unsafe { (path("the repository's path", repository_path)?, Given::read(options)?) };
        check(&path, &given.passphrase)?;
        Ok(0)
    })
}

fn check(path: &Path, passphrase: &PassphraseSource) -> Result<()> {
    let parameters = path.join("repository.json");
    if !parameters.is_file() {
        return Err(Error::new(
            ErrorKind::NoRepository,
            format!("{} is not a Coldrise repository (it has no repository.json)", path.display()),
        ));
    }
    if let PassphraseSource::File(file) = passphrase {
        std::fs::File::open(file)
            .context(|| format!("opening the passphrase file {}", file.display()))?;
    }
    Ok(())
}

/// Opens a repository for serving. The process will hold keys, so no other process may
/// inspect it.
pub(crate) fn open_repository(path: &Path, given: &Given) -> Result<Arc<Repository>> {
    // If the system refuses, the process continues.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    // A core pattern that is a program ignores the limit.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    coldrise_store::raise_descriptor_limit();
    let options = OpenOptions { cache_bytes: given.cache_bytes };
    Repository::open(path, &given.passphrase, &options)
}

/// `coldrise_repository_open` of the header.
///
/// # Safety
/// The strings and the options are valid during the call; `repository` can be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_repository_open(
    repository_path: *const c_char,
    options: *const Options,
    repository: *mut *mut RepositoryHandle,
) -> c_int {
    guarded(|| {
        if repository.is_null() {
            return Err(null("the place for the repository"));
        }
        // SAFETY: the caller's promise.
        let (path, given) =
            unsafe { (path("the repository's path", repository_path)?, Given::read(options)?) };
        let opened = open_repository(&path, &given)?;
        let tree = ExportTree::new(
            &opened,
            &TreeOptions { program: &given.program, cache_bytes: given.cache_bytes, folder: None },
        )?;
        let handle = Box::into_raw(Box::new(RepositoryHandle { tree, exports: Arc::default() }));
        // SAFETY: not NULL, and writable as the caller promises.
        unsafe { repository.write(handle) };
        Ok(0)
    })
}

/// `coldrise_repository_close` of the header.
///
/// # Safety
/// `repository` is NULL or came from `coldrise_repository_open`; neither it nor any
/// of its exports is used by any call now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coldrise_repository_close(repository: *mut RepositoryHandle) {
    if repository.is_null() {
        return;
    }
    // SAFETY: made by Box::into_raw, and given back once.
    let handle = unsafe { Box::from_raw(repository) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| {
        drop(handle.exports.take_all());
        drop(handle);
    })) {
        fail_with(libc::EIO, &defect(panic));
    }
}
