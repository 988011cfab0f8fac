//! The UEFI firmware of a machine on this host, and the variables that it starts with.
//!
//! Restore points hold disks, not the firmware's variables. A machine whose boot entry lies only in its variables would
//! stop in the UEFI shell. So the machine starts with new variables: the empty ones of the firmware's package, with a
//! boot entry for each boot loader that lies on the machine's EFI system partitions.
//!
//! ```text
//!   installed        the firmware of this host       /usr/share/qemu/firmware/*.json
//!   loaders          the boot loaders of a session   partitions ─▶ fat
//!   first_variables  a copy of the empty variables, with boot entries
//! ```

#![forbid(unsafe_code)]

use std::sync::Arc;

use coldrise_session::SessionDocument;
use coldrise_store::Repository;

mod fat;
mod installed;
mod loaders;
mod partitions;
mod variables;

pub use installed::{installed, Uefi, UefiNeeds};
pub use loaders::{Found, Loader};

/// The first variables of a session's machine: `empty`, the content of the firmware's own file, with a boot entry for each loader on
/// its disks. If that is not possible, [`Found::unread`] says why, and the variables are `empty`.
pub fn first_variables(
    repository: &Arc<Repository>,
    session: &SessionDocument,
    empty: Vec<u8>,
) -> (Vec<u8>, Found) {
    let mut found = loaders::loaders(repository, session);
    found.secure_boot = variables::have_keys(&empty);
    match variables::new_variables(&empty, &found.loaders) {
        Ok(made) => (made, found),
        Err(error) => {
            found.loaders.clear();
            found.unread.push(error.full_message());
            (empty, found)
        }
    }
}
