//! The TPM of a recovered machine: its state lies in a folder of its UUID before libvirt starts swtpm there.

use std::path::{Path, PathBuf};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::{FileKind, Host};
use coldrise_inventory::LOST_TPM;
use coldrise_session::SessionDocument;
use coldrise_store::{MachinePart, SWTPM_PERMALL, TPM_STATE};
use roxmltree::Node;

use super::PATIENCE;
use super::domain_xml::{child, escaped, span, tag};
use super::part_files::tpm_state;
use crate::virsh::Virsh;

/// What libvirt starts for a TPM.
const PROGRAMS: [&str; 3] = ["/usr/bin/swtpm", "/usr/bin/swtpm_setup", "/usr/bin/swtpm_ioctl"];

/// Whether a machine with this stored state of a TPM can have it under a host's libvirt.
///
/// # Errors
/// A sentence that says why not.
pub fn check_tpm(
    host: &Host,
    connect: &str,
    part: Option<&MachinePart>,
) -> std::result::Result<(), String> {
    let Some(part) = part else { return Err(LOST_TPM.to_owned()) };
    let without = |why: &str| Err(format!("the machine starts without its TPM: {why}"));
    if part.format != SWTPM_PERMALL {
        return without("its stored state has a format that this version does not know");
    }
    let found = match host.look(PROGRAMS.map(Path::new)) {
        Ok(found) => found,
        Err(error) => return without(&error.full_message()),
    };
    if !found.iter().all(|found| found.is_some_and(|found| found.kind == FileKind::File)) {
        let text = format!(
            "swtpm is not installed on {} (Debian: apt install swtpm swtpm-tools)",
            host.sentence_name()
        );
        return without(&text);
    }
    let is_root = host.facts().is_ok_and(|facts| facts.is_root);
    if !connect.contains(":///session") && !is_root {
        return without("only root can give its state to libvirt; run the command as root");
    }
    Ok(())
}

/// The emulated TPM of a stored domain.
pub(super) fn emulated<'a, 'i>(devices: Node<'a, 'i>) -> Option<Node<'a, 'i>> {
    devices.children().find(|device| {
        let backend = child(*device, "backend");
        let has = |name, value| backend.is_some_and(|b| b.attribute(name) == Some(value));
        tag(*device) == "tpm" && has("type", "emulator") && has("version", "2.0")
    })
}

/// The new device. Its state outlives the domain, which is transient.
pub(super) fn element(source: &str, tpm: Node<'_, '_>) -> String {
    let model = escaped(tpm.attribute("model").unwrap_or("tpm-crb"));
    let encryption = child(tpm, "backend").and_then(|backend| child(backend, "encryption"));
    let encryption = encryption.map(|node| span(source, node)).unwrap_or_default();
    format!(
        "<tpm model='{model}'><backend type='emulator' version='2.0' persistent_state='yes'>\
         {encryption}</backend></tpm>"
    )
}

/// The state of the TPM of a domain that is about to be recovered. The folder of its UUID must be its own.
///
/// # Errors
/// `AlreadyExists` if the folder is there: it is the original's.
pub fn own_tpm(host: &Host, connect: &str, uuid: &str) -> Result<PathBuf> {
    let file = tpm_state(connect, uuid);
    let folder = folder_of(&file);
    match host.look([folder])? {
        [None] => Ok(file),
        [Some(_)] => {
            let text = format!(
                "the TPM of the original is on {}: {}",
                host.sentence_name(),
                folder.display()
            );
            Err(Error::new(ErrorKind::AlreadyExists, text).advise(
                "recover beside it with --new-uuid, which gives the machine a copy of the stored TPM; or remove that folder, if \
                 the original will never start again here",
            ))
        }
    }
}

/// The folder of the UUID.
pub(super) fn folder_of(file: &Path) -> &Path {
    file.ancestors().nth(2).unwrap_or(file)
}

/// Removes the folder, unless another domain of its UUID is known here: that one uses it, too.
///
/// # Errors
/// `Busy` then; `ToolFailed` if libvirt does not answer; errors of the operating system.
pub(super) fn remove(virsh: &Virsh, file: &Path) -> Result<()> {
    let folder = folder_of(file);
    if let [None] = virsh.host().look([folder])? {
        return Ok(());
    }
    let known = virsh.run(&["list", "--all", "--uuid"], PATIENCE)?;
    if known.lines().any(|uuid| folder.ends_with(uuid.trim()) && !uuid.trim().is_empty()) {
        let text = format!("{} stays: another domain has its UUID", folder.display());
        return Err(Error::new(ErrorKind::Busy, text));
    }
    virsh.host().remove_tpm(folder)
}

/// Puts the state of a session's TPM there, unless the machine ran before. libvirt gives it to swtpm's user, who goes through the
/// folders above.
///
/// # Errors
/// Errors of the host's operating system.
pub(super) fn place(host: &Host, session: &SessionDocument, file: &Path) -> Result<()> {
    let Some(part) = session.part(TPM_STATE) else { return Ok(()) };
    match host.look([file])? {
        [None] => host.write_file(file, &part.content()?, true),
        [Some(_)] => Ok(()),
    }
}
