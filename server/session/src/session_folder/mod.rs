//! The files of one session in `live/HASH`, and their order of writes.
//!
//! `points` and `sessions` change them. `session.json` changes under `live/lock`, the other files
//! under the session's `lock`. Readers take no lock: each file is replaced whole.

pub(crate) mod addresses;
pub(crate) mod document;
pub(crate) mod ended;
pub(crate) mod notes;
pub(crate) mod progress;
pub(crate) mod rollback_guard;
pub(crate) mod side_file;
pub(crate) mod stamps;
pub(crate) mod top_layers;
