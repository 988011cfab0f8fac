//! The UEFI firmware of a machine on a host, and the variables that it starts with.
//!
//! A machine starts with its stored variables. Points without them, of an image or an older backup, hold only disks: a machine whose
//! boot entry lay in its variables would stop in the UEFI shell. So it starts with new variables: the empty ones of the
//! firmware's package, with a boot entry for each boot loader that lies on the machine's EFI system partitions.
//!
//! ```text
//!   installed        the firmware of a host          /usr/share/qemu/firmware/*.json
//!   loaders          the boot loaders of a session   partitions ─▶ fat
//!   first_variables  the stored variables, or a copy of the empty ones with boot entries
//! ```

#![forbid(unsafe_code)]

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::SessionDocument;
use coldrise_store::{FIRMWARE_VARIABLES, MachinePart, RAW, Repository};

mod fat;
mod installed;
mod loaders;
mod partitions;
mod variables;

pub use installed::{Uefi, UefiNeeds, installed};
pub use loaders::{Found, Loader};

/// The first variables of a session's machine: those that are stored with it, and `None`. If there are none for firmware of this size,
/// `empty`, the content of the firmware's own file, with a boot entry for each loader on its disks. If that is not
/// possible, [`Found::unread`] says why, and the variables are `empty`.
pub fn first_variables(
    repository: &Arc<Repository>,
    session: &SessionDocument,
    empty: Vec<u8>,
) -> (Vec<u8>, Option<Found>) {
    let mut unfit = None;
    match session.part(FIRMWARE_VARIABLES).map(|part| stored(part, empty.len())) {
        Some(Ok(content)) => return (content, None),
        Some(Err(error)) => unfit = Some(error.full_message()),
        None => {}
    }
    let mut found = loaders::loaders(repository, session);
    found.unfit = unfit;
    found.secure_boot = variables::have_keys(&empty);
    match variables::new_variables(&empty, &found.loaders) {
        Ok(made) => (made, Some(found)),
        Err(error) => {
            found.loaders.clear();
            found.unread.push(error.full_message());
            (empty, Some(found))
        }
    }
}

/// The content of stored variables, for firmware that has `size` bytes of them.
fn stored(part: &MachinePart, size: usize) -> Result<Vec<u8>> {
    if part.format == RAW && part.size_bytes == size as u64 {
        return part.content();
    }
    let text = format!(
        "they have {} bytes ({}), and the firmware of this host takes {size}",
        part.size_bytes, part.format
    );
    Err(Error::new(ErrorKind::Unsupported, text))
}
