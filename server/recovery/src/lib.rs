//! Backup from and recovery into running hypervisors.
#![forbid(unsafe_code)]

pub mod attach;
pub mod attest;
pub mod backup_domain;
pub mod backup_source;
pub mod files;
pub mod firmware;
pub mod https;
pub mod libvirt;
pub mod relocation;
pub mod rollback;
pub mod secret_file;
pub mod shares;
pub mod virsh;
pub mod vsphere;
