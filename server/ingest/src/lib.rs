//! Backup and restore: everything between an image file or an NBD export and the
//! repository.
//!
//! [`backup`] reads [`source`]s and writes one restore point; [`restore`] writes one
//! disk to a file, a device or an NBD export; [`ExistingDisk`] makes an
//! existing disk equal to one, and [`rollback`] all disks of a machine. QEMU's tools parse all foreign image formats,
//! in processes that can open the image and nothing else.
//!
//! Unsafe code is allowed in one module only, the binding to libnbd.
#![deny(unsafe_code)]

mod appliance;
mod backup;
mod changes;
mod configuration;
mod heal;
mod heal_disk;
mod in_place;
mod libnbd;
mod qemu;
mod restore;
pub mod rollback;
pub mod source;
mod zeroing;

pub use appliance::{Appliance, appliance_path, open_appliance};
pub use backup::{
    BackupRequest, BackupStart, BackupSummary, DiskSummary, Flow, Pace, Proof, Rate, RateLimit,
    StoredDisk, StoredDisks, Watch, backup, read_disks, store_shared, store_source,
    unrecorded_difference,
};
pub use changes::{Changes, write_changes};
pub use configuration::read_configuration;
pub use heal::{HealSummary, check_source, heal};
pub use heal_disk::heal_from_disk;
pub use in_place::{Differences, ExistingDisk, Purpose, united};
pub use libnbd::check_libnbd;
pub use qemu::ImageServer;
pub use restore::{
    Ova, OvaDisk, PartFiles, RestoreOptions, RestoreSummary, RestoreTarget, is_ova, restore,
    restore_ova,
};
pub use source::{ImageFormat, LiveBitmap, Location, MachineImage, SourceSpec, keep_out};
