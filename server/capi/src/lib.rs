//! The C ABI that the nbdkit plugin and the Ganesha FSAL call; its contract is
//! `include/coldrise.h`, where every function is described, and
//! `include/coldrise-folders.h` for front ends that show folders and files.
//!
//! Every entry goes through [`guard`]: a panic becomes EIO and stops its export, and never
//! unwinds into C. This is one of the few places that need `unsafe`: C passes raw pointers,
//! and only the header can state their rules. Each entry converts them to references once,
//! at its start.
//!
//! On the data path an entry costs one relaxed load, one `catch_unwind` and one virtual
//! call; it allocates no memory and takes no lock.

mod data;
mod folders;
mod guard;
mod handles;
mod message;
mod names;
mod repository;

pub use data::*;
pub use folders::*;
pub use message::coldrise_last_error;
pub use names::*;
pub use repository::*;

use coldrise_export::{Export, ExportTree};
use handles::OpenHandles;
use std::ffi::{CString, c_char};
use std::sync::Arc;

/// `coldrise_repository` of the header.
pub struct RepositoryHandle {
    tree: ExportTree,
    exports: Arc<OpenHandles>,
}

/// `coldrise_export` of the header.
pub struct ExportHandle {
    opened_by: Arc<OpenHandles>,
    export: Export,
    name: CString,
    description: CString,
    size_bytes: u64,
    flags: u32,
}

impl ExportHandle {
    fn new(export: Export, opened_by: &Arc<OpenHandles>) -> ExportHandle {
        let name = message::c_string(export.name());
        let description = message::c_string(export.description());
        let size_bytes = export.disk().size_bytes();
        let flags = if export.disk().is_read_only() { 0 } else { EXPORT_WRITABLE };
        ExportHandle {
            opened_by: Arc::clone(opened_by),
            export,
            name,
            description,
            size_bytes,
            flags,
        }
    }
}

/// `coldrise_version` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn coldrise_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[cfg(test)]
mod tests;
