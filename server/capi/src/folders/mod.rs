//! The repository as folders and files; the contract is `include/coldrise-folders.h`.
//! `coldrise_nfs` makes the decisions of an NFS server; here pointers become references,
//! results errno.

mod calls;
mod client_calls;
mod file_calls;
mod node_calls;

pub use calls::*;
pub use client_calls::*;
pub use file_calls::*;
pub use node_calls::*;

use coldrise_nfs::{Datastore, OpenNode};
use std::ffi::CString;
use std::sync::Arc;

/// `coldrise_folders` of the header.
pub struct FoldersHandle {
    datastore: Datastore,
}

/// `coldrise_node` of the header.
pub struct NodeHandle {
    node: Arc<OpenNode>,
    path: CString,
}
