//! Backup from and recovery into running hypervisors.
#![forbid(unsafe_code)]

pub mod attach;
pub mod backup_domain;
pub mod backup_source;
pub mod libvirt;
pub mod relocation;
pub mod virsh;
pub mod vsphere;
