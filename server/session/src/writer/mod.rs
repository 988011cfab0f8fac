//! The one writer of the repository: who holds it, and how other processes get their work done.
//!
//! Locks, in order: `backups.lock` (the backup that hosts others), the background lock, and then
//! `writer.lock`, which the store takes. The locks of sessions come after these.

pub(crate) mod access;
pub(crate) mod background_lock;
pub(crate) mod gc;
pub(crate) mod shared;
