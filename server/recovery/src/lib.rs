//! Backup from and recovery into running hypervisors.
#![forbid(unsafe_code)]

pub mod attest;
pub mod rollback;
