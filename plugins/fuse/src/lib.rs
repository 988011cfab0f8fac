//! A local mount: the tree of a repository as folders and files.
//!
//! ```text
//!   program ─ kernel ─ /dev/fuse ─▶ fuser's threads ─▶ Filesystem ─▶ Folders (export)
//!                                                       │   nodes: inode number ─▶ Node
//!                                                       └─  handles: open files and listings
//! ```
//!
//! This crate converts: requests to calls, errors to errnos, a panic to EIO.
//! [`coldrise_export::Folders`] decides which files exist and where writes go.
//!
//! Several threads serve requests in parallel, so that decoding a chunk or a flush does not
//! delay other requests. Lock order: the served tree (shared by requests, exclusive only at
//! the end), then the nodes or the handles, each for one look-up.
#![forbid(unsafe_code)]

mod answer;
mod attributes;
mod cached_writers;
mod client_requests;
mod filesystem;
mod folder;
mod handles;
mod mount;
mod nodes;
mod requests;
mod served;

pub use folder::end_abandoned_mounts;
pub use mount::{Mount, MountOptions, Unmounted};
