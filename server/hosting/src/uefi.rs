//! The UEFI firmware of booted machines, and the variables with which they start.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result, read_small_file};
use coldrise_firmware::{Found, Uefi, UefiNeeds, first_variables, installed};
use coldrise_host::Host;
use coldrise_session::{SessionDocument, SessionNotes, update_parts};
use coldrise_store::{FIRMWARE_VARIABLES, MachinePart, RAW, Repository, SessionName};

use crate::caller::Caller;
use crate::place::QemuPlace;
use crate::tpm;
use coldrise_inventory::{Firmware, Hardware};

/// The machine's variables in its folder.
const FILE: &str = "uefi-variables";
/// Maximum length of variables, in bytes.
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
pub fn plain(host: &Host) -> Result<Uefi> {
    choose(host, None)
}

/// The same, with variables of this size if there is such firmware.
fn choose(host: &Host, bytes: Option<u64>) -> Result<Uefi> {
    let installed = installed(host)?;
    let fitting = installed.into_iter().filter(|uefi| uefi.fits(UefiNeeds::default()));
    let mut fitting: Vec<Uefi> = fitting.collect();
    let takes_stored = |uefi: &Uefi| bytes.is_none_or(|bytes| uefi.variables_bytes == bytes);
    let at = fitting.iter().position(takes_stored).unwrap_or(0);
    (at < fitting.len()).then(|| fitting.swap_remove(at)).ok_or_else(|| {
        let place = host.name().map_or("here".to_owned(), |name| format!("on host {name}"));
        let text = format!(
            "the machine needs UEFI, which is not installed {place} (Debian: apt install ovmf)"
        );
        Error::new(ErrorKind::Unsupported, text)
    })
}

/// The firmware of a session's machine, whose variables are copied into the folder of `place`: those of the session, which are the point's or as the
/// machine left them; else new ones with boot entries for the loaders on its disks. `None` for a BIOS.
///
/// # Errors
/// As for [`plain`]; errors of the operating system.
pub fn prepare(
    caller: &Caller,
    repository: &Arc<Repository>,
    session: &SessionDocument,
    hardware: &Hardware,
    place: &QemuPlace,
) -> Result<Option<Flash>> {
    if hardware.firmware != Firmware::Uefi {
        return Ok(None);
    }
    let host = &place.qemu.host;
    let uefi = choose(host, session.part(FIRMWARE_VARIABLES).map(|part| part.size_bytes))?;
    let empty = host.read_file(&uefi.variables, MAX_BYTES)?;
    let (content, found) = first_variables(repository, session, empty);
    if let Some(found) = found {
        tell_start(caller, &found);
    }
    let variables = place.folder.join(FILE);
    host.write_file(&variables, &content, true)?;
    Ok(Some(Flash { code: uefi.code, variables }))
}

/// Keeps the variables of a machine with its session: the next seal takes them over.
///
/// # Errors
/// Errors of the operating system.
pub fn keep(repository: &Repository, session: &SessionName, variables: &Path) -> Result<()> {
    let content = read_small_file(variables, MAX_BYTES)?;
    update_parts(repository, session, vec![MachinePart::new(FIRMWARE_VARIABLES, RAW, &content)?])
}

/// Keeps the variables and the TPM's state of a machine that `coldrise boot` runs, if it does so.
///
/// # Errors
/// As for [`keep`].
pub fn keep_of_running(
    repository: &Repository,
    session: &SessionName,
    notes: &SessionNotes,
) -> Result<()> {
    // The monitor's socket lies in the same folder, which ends with the machine.
    let Some(monitor) = notes.monitor() else { return Ok(()) };
    let (variables, state) = (monitor.with_file_name(FILE), monitor.with_file_name(tpm::STATE));
    if variables.is_file() {
        keep(repository, session, &variables)?;
    }
    match state.is_file() {
        true => tpm::keep(repository, session, &state),
        false => Ok(()),
    }
}

/// Says how a machine starts that has new variables.
pub fn tell_start(caller: &Caller, found: &Found) {
    if let Some(why) = &found.unfit {
        caller.remark(&format!("warning: the stored firmware variables are not used: {why}"));
    }
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
