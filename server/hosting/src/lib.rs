//! Starts and watches the programs that serve and boot backups.
//!
//! ```text
//!   nbdkit, nfs-ganesha          disk servers, with plugins that open the repository themselves
//!   smbd, tgtd                   over a mount of this process
//!   swtpm                        the TPM of a booted machine
//!   QEMU                         a booted machine, a boot check, the machine that reads file systems
//! ```
//!
//! Every program is a child that ends with its starter, whatever ends that. What a kill leaves
//! (sessions, folders, mounts) the next command removes: [`leftovers`].
//!
//! A [`Caller`] says which repository is served and prints remarks; [`signals`] say when to end.

pub mod boot_check;
pub mod boot_console;
mod caller;
pub mod child;
pub mod disk_server;
pub mod files_machine;
pub mod ganesha;
pub mod installed;
pub mod leftovers;
pub mod mount_server;
pub mod nbdkit;
pub mod netns;
mod origin;
mod place;
pub mod qemu;
mod qemu_host;
pub mod qemu_process;
pub(crate) mod serial_log;
pub mod signals;
pub mod tpm;
pub mod uefi;
pub mod vmx;

pub use caller::{Caller, PASSPHRASE_COMMAND, PASSPHRASE_FILE};
pub use origin::{Origin, tell_newer};
pub use place::QemuPlace;
pub use qemu_host::QemuHost;
