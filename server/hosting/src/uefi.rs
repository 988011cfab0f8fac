//! The UEFI firmware of booted machines, and how a machine starts whose variables are in no backup.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{read_small_file, Context, Error, ErrorKind, Result};
use coldrise_firmware::{first_variables, installed, Found, Uefi, UefiNeeds};
use coldrise_session::{SessionDocument, SessionNotes};
use coldrise_store::Repository;

use crate::caller::Caller;
use coldrise_inventory::{Firmware, Hardware};

/// The session's note with the variables that its machine had when it was last off.
const NOTE: &str = "firmware-variables";
/// The machine's variables in its folder.
const FILE: &str = "uefi-variables";
/// Maximum length of variables, in bytes: what a note takes.
const MAX_BYTES: u64 = 1000 << 10;

/// The firmware's files for QEMU.
pub struct Flash {
    /// The firmware's program.
    pub code: PathBuf,
    /// The machine's variables, which QEMU writes.
    pub variables: PathBuf,
}

/// Firmware for a machine without Secure Boot.
///
/// # Errors
/// `Unsupported` if none is installed.
pub fn plain() -> Result<Uefi> {
    let mut firmware = installed().into_iter();
    firmware.find(|uefi| uefi.fits(UefiNeeds::default())).ok_or_else(|| {
        let text = "the machine needs UEFI, which is not installed here (Debian: apt install ovmf)";
        Error::new(ErrorKind::Unsupported, text)
    })
}

/// The firmware of a session's machine, whose variables are copied into `folder`: those that it had when it was last off, else new
/// ones with boot entries for the loaders on its disks. `None` for a BIOS.
///
/// # Errors
/// As for [`plain`]; errors of the operating system.
pub fn prepare(
    caller: &Caller,
    repository: &Arc<Repository>,
    session: &SessionDocument,
    hardware: &Hardware,
    folder: &Path,
) -> Result<Option<Flash>> {
    if hardware.firmware != Firmware::Uefi {
        return Ok(None);
    }
    let uefi = plain()?;
    let empty = read_small_file(&uefi.variables, MAX_BYTES)?;
    let kept = SessionNotes::of(repository, &session.name)?.read(NOTE)?;
    let content = match kept.filter(|kept| kept.len() == empty.len()) {
        Some(kept) => kept,
        None => {
            let (made, found) = first_variables(repository, session, empty);
            tell_start(caller, &found);
            made
        }
    };
    let variables = folder.join(FILE);
    std::fs::write(&variables, content).context(|| format!("writing {}", variables.display()))?;
    Ok(Some(Flash { code: uefi.code, variables }))
}

/// Keeps the variables of a machine that is off with its session.
///
/// # Errors
/// Errors of the operating system.
pub fn keep(repository: &Arc<Repository>, session: &SessionDocument, flash: &Flash) -> Result<()> {
    let content = read_small_file(&flash.variables, MAX_BYTES)?;
    SessionNotes::of(repository, &session.name)?.write(NOTE, &content)
}

/// Says how a machine starts that has new variables.
pub fn tell_start(caller: &Caller, found: &Found) {
    for text in &found.unread {
        caller.remark(&format!("warning: no boot entry could be made: {text}"));
    }
    match found.loaders.first() {
        Some(loader) => {
            let keys = match found.secure_boot {
                true => "; Secure Boot is on with the keys of the firmware's package: coldrise boot starts a loader \
                         that is signed with others",
                false => "",
            };
            caller.remark(&format!(
                "the backup has no firmware variables: the machine starts {} of {}{keys}",
                loader.path, loader.disk
            ));
        }
        None if found.has_fallback => {}
        None => caller.remark(
            "warning: the backup has no firmware variables, and no EFI system partition has a boot loader: the machine \
             will stop in the firmware's shell. If its system starts by BIOS: coldrise boot --firmware bios",
        ),
    }
}
