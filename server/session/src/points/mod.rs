//! Restore points: the catalog with the sealed points that are not yet in it, their removal, and
//! the parts of the repository that they use.
//!
//! Functions that take a `RepositoryWriter` run in the process that holds `writer.lock`. They read
//! the sessions under `live/lock`, and the leases after that.

pub(crate) mod catalog;
pub(crate) mod change;
pub(crate) mod forget;
pub(crate) mod in_use;
pub(crate) mod inventory;
pub(crate) mod prune;
pub(crate) mod quarantine;
pub(crate) mod read_lease;
pub(crate) mod usage;
