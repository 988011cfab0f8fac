//! Locks between processes: `flock` on files of the repository, released by the kernel when their
//! holder ends.
//!
//! Every other module of the crate may take them; the order stands in the header of the crate.
//! A waiting caller holds no lock that comes later in that order.

pub(crate) mod file_lock;
pub(crate) mod lease;
pub(crate) mod owner_lock;
