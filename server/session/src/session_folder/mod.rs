//! The files of one session in `live/HASH`, and their order of writes.
//!
//! `points` and `sessions` change them, and hold the session's `lock` and then `live/lock` while
//! they do. Readers take no lock: each file is replaced whole.

pub(crate) mod addresses;
pub(crate) mod document;
pub(crate) mod ended;
pub(crate) mod notes;
pub(crate) mod progress;
pub(crate) mod rollback_guard;
pub(crate) mod side_file;
pub(crate) mod stamps;
pub(crate) mod top_layers;
