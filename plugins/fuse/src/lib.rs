//! A local mount: the tree of a repository as folders and files.
//!
//! ```text
//!   program ─ kernel ─ /dev/fuse ─▶ fuser's threads ─▶ Filesystem ─▶ Folders (export)
//!                                                       │   nodes: inode number ─▶ Node
//!                                                       └─  handles: open files and listings
//! ```
//!
//! This crate converts: requests to calls, errors to errno, a panic to EIO. What
//! there is, and what becomes of a write, is decided by [`coldrise_export::Folders`].
//!
//! Several threads serve requests side by side, so that a chunk which is being
//! decoded or a flush holds up nobody else. Locks: the served tree (shared by
//! every request, alone only to the end), then the nodes or the handles for the
//! time of one look-up.
#![forbid(unsafe_code)]

mod answer;
mod attributes;
mod client_requests;
mod filesystem;
mod folder;
mod handles;
mod mount;
mod nodes;
mod requests;
mod served;

pub use mount::{Mount, MountOptions, Unmounted};
