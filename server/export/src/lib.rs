//! The tree of names: every disk of every restore point and of every published session, and
//! each disk as an image file in every format. Front ends open them by name.
//!
//! ```text
//!   front end ─ name ─▶ ExportTree ─┬─ MACHINE/POINT/DISK ─▶ Catalog, read-only disk
//!                          │        │  MACHINE/POINT/FILE ─▶ ImageFile: the same through a layout
//!                          │        │─ live/SESSION/DISK ──▶ OpenSessions, one Session for all
//!                          │        └─ live/SESSION/FILE ──▶ ImageFile: the same, and a side file
//!                          └─ Lease: what this process serves, so that nothing of it is deleted
//! ```
//!
//! Front ends call [`ExportTree`] and nothing below it. Locks, outermost first:
//! the table of open sessions (never held while a session opens or closes), the
//! lease's own lock, the lock of the leases directory.
//!
//! | at the same time | what settles it |
//! |---|---|
//! | open and open of one session | the second waits and shares the first's session |
//!  last close and open of one session | the open waits until the session is closed, then opens it again |
//! | open here and in another process | the session's own lock: the second is `Busy` |
//! | open of a point and its deletion | the lease is written first, then the point is looked up again |
//! | two front ends starting | the lock of the leases directory |
#![forbid(unsafe_code)]

mod client_file;
mod export;
mod folders;
mod image;
mod image_file;
mod image_name;
mod length;
mod listing;
mod open_sessions;
mod tree;

pub use coldrise_session::{
    Creation, Lease, LeaseDocument, LeaseHold, Removal, Served, read_leases,
};
pub use export::Export;
pub use folders::{Attributes, FolderEntry, Folders, Node, NodeKey, NodeType, OpenFile, Space};
pub use listing::{ExportEntry, Listed};
pub use tree::{ExportTree, MAX_EXPORT_NAME_BYTES, TreeOptions};
