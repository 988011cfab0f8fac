//! Machines under other hypervisors: libvirt on this host, vCenter and ESXi.
//!
//! ```text
//!   libvirt   a recovered domain ─▶ virsh      one child per question
//!   vsphere   a recovered machine ─▶ the vSphere API over HTTPS
//!   moves     disks from a session to files, by QEMU's or libvirt's copies
//!   attach    a disk beside those of a running machine
//! ```
//!
//! A note of the session says what was begun, so that the next command finishes or undoes it.
#![forbid(unsafe_code)]

pub mod attach;
pub mod libvirt;
pub mod moves;
pub mod virsh;
pub mod vsphere;
