//! The UEFI firmware of a machine on this host, and the variables that it starts with.
//!
//! Restore points hold disks, not the firmware's variables. A machine whose boot entry lies only in its variables would
//! stop in the UEFI shell. So the machine starts with new variables: the empty ones of the firmware's package, with a
//! boot entry for each boot loader that lies on the machine's EFI system partitions.
//!
//! ```text
//!   installed        the firmware of this host       /usr/share/qemu/firmware/*.json
//!   loaders          the boot loaders of a session   partitions ─▶ fat
//!   new_variables    a copy of the empty variables, with boot entries
//! ```

mod fat;
mod installed;
mod loaders;
mod partitions;
mod variables;

pub use installed::{installed, Uefi, UefiNeeds};
pub use loaders::{loaders, Found, Loader};
pub use variables::new_variables;
