//! The one writer of the repository: who holds it, and how other processes get their work done.
//!
//! A backup takes `backups.lock`, background work the background lock; each then opens the
//! repository, which takes `writer.lock`. The locks of sessions come after these.

pub(crate) mod access;
pub(crate) mod background_lock;
pub(crate) mod gc;
pub(crate) mod shared;
