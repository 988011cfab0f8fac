//! Whole machines in OVF: an .ova, or an .ovf with its files beside it.
//!
//! ```text
//!   acme.ova ── tar: members in place ──┐             ┌─ descriptor ──▶ configuration, disks in its order
//!   acme.ovf ── files beside it ────────┴─ Package ───┤
//!                                                     └─ manifest ──▶ every digest, before anything is stored
//! ```
//!
//! Only files of the archive, or of the descriptor's own folder, are opened. QEMU reads the disks, as it reads other
//! VMDKs.

pub(crate) mod manifest;
mod package;
pub(crate) mod tar;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use aws_lc_rs::digest::Context as Digest;
use coldrise_block::{Error, ErrorKind, Phase, Progress, ProgressState, Result};
use coldrise_inventory::{Envelope, EnvelopeDisk};
use coldrise_store::{Configuration, DiskName, MAX_CONFIGURATION_BYTES, MAX_DISKS, OVF};

use crate::backup::Watch;
use crate::source::{SourceOptions, SourceSpec, is_appliance, open_source};
use manifest::StatedDigest;
use package::{Package, Part};

/// Longest manifest, in bytes.
const MAX_MANIFEST_BYTES: usize = 1 << 20;
/// Sizes of VMDKs are multiples of this, in bytes.
const SECTOR_BYTES: u64 = 512;
/// Bytes of one read for a digest.
const READ_BYTES: usize = 1 << 20;

/// A machine, ready for a backup.
#[derive(Clone, Debug)]
pub struct Appliance {
    /// Its disks, named vda, vdb and so on, in its order.
    pub disks: Vec<SourceSpec>,
    /// The descriptor.
    pub configuration: Configuration,
    /// Remarks for the user.
    pub remarks: Vec<String>,
}

/// The path of a whole machine, if the argument of a backup is one: a file .ova or .ovf without a disk's name.
pub fn appliance_path(argument: &str) -> Option<&Path> {
    let path = Path::new(argument);
    let names_disk =
        argument.split_once('=').is_some_and(|(disk, _)| DiskName::parse(disk).is_ok());
    (is_appliance(path) && !names_disk).then_some(path)
}

/// Reads the descriptor at `path` or in the archive `path`, finds its disks and checks all files of its manifest, which
/// reads them completely.
///
/// # Errors
/// `InvalidInput` and `Unsupported` for a descriptor or an archive that cannot be read; `NotFound` for a file that is
/// missing; `Io` for a file with another digest than the manifest states, or with another length or capacity than the
/// descriptor states; `Interrupted`.
pub fn open_appliance(
    path: &Path,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<Appliance> {
    let package = Package::open(path)?;
    let descriptor = package.descriptor()?;
    let text = descriptor.text(MAX_CONFIGURATION_BYTES)?;
    let envelope = Envelope::parse(&text).map_err(|error| error.context(&descriptor.location))?;
    let files = envelope.disks.iter().map(|disk| disk_file(&package, &descriptor, disk));
    let files: Vec<Part> = files.collect::<Result<_>>()?;
    if files.len() > MAX_DISKS {
        let text = format!("{}: it has more than {MAX_DISKS} disks", descriptor.location);
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let mut remarks: Vec<String> = Vec::new();
    for id in &envelope.unattached {
        remarks.push(format!(
            "{}: the machine does not have the disk '{id}': it is left out",
            descriptor.location
        ));
    }
    match package.by_extension("mf")? {
        Some(manifest) => {
            let digests = manifest::parse(&manifest.text(MAX_MANIFEST_BYTES)?)
                .map_err(|error| error.context(&manifest.location))?;
            verify(&package, &manifest, &digests, progress, cancel)?;
            let is_listed = |part: &Part| digests.iter().any(|digest| digest.file == part.name);
            for part in files.iter().chain([&descriptor]).filter(|part| !is_listed(part)) {
                remarks.push(format!(
                    "{} has no digest of {}: that file was not verified",
                    manifest.location, part.name
                ));
            }
        }
        None => {
            remarks.push(format!("{} has no manifest: its files were not verified", path.display()))
        }
    }
    if let Some(signature) = package.by_extension("cert")? {
        remarks.push(format!("{}: the signature was not verified", signature.location));
    }
    let disks = (0..)
        .zip(files)
        .map(|(number, file)| Ok(SourceSpec { disk: disk_name(number)?, location: file.location }));
    let disks = disks.collect::<Result<Vec<SourceSpec>>>()?;
    for (disk, described) in disks.iter().zip(&envelope.disks) {
        check_capacity(disk, described, cancel)?;
    }
    Ok(Appliance { disks, configuration: Configuration { format: OVF.to_owned(), text }, remarks })
}

/// The file of a disk. The descriptor refers to it by a URI: a percent sign may stand for another character.
fn disk_file(package: &Package, descriptor: &Part, disk: &EnvelopeDisk) -> Result<Part> {
    let shown = disk.href.escape_debug();
    let plain = percent_decoded(&disk.href).filter(|name| !name.contains(['/', '\\', '\0']));
    let found = match (package.find(&disk.href)?, plain) {
        (None, Some(plain)) => package.find(&plain)?,
        (found, _) => found,
    };
    let file = found.ok_or_else(|| {
        let text = format!("{}: its file '{shown}' is missing", descriptor.location);
        Error::new(ErrorKind::NotFound, text)
    })?;
    match disk.length_bytes {
        Some(stated) if stated != file.length_bytes => {
            let text = format!(
                "{} has {} bytes, not {stated} as the descriptor states",
                file.location, file.length_bytes
            );
            Err(Error::new(ErrorKind::Io, text))
        }
        _ => Ok(file),
    }
}

/// Refuses a disk of another size than the descriptor states. Writers round the size to their unit, up or down.
fn check_capacity(disk: &SourceSpec, described: &EnvelopeDisk, cancel: &AtomicBool) -> Result<()> {
    let Some(stated) = described.capacity else { return Ok(()) };
    let size_bytes = open_source(disk, &SourceOptions::default(), cancel)?.size_bytes();
    if size_bytes.abs_diff(stated.size_bytes) < stated.unit_bytes.max(SECTOR_BYTES) {
        return Ok(());
    }
    let text = format!(
        "{disk} is a disk of {size_bytes} bytes, not {} as the descriptor states (ovf:capacity)",
        stated.size_bytes
    );
    Err(Error::new(ErrorKind::Io, text).advise("export the machine again"))
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

/// vda to vdz, then vdaa.
fn disk_name(number: usize) -> Result<DiskName> {
    let letter = |number: usize| char::from(b'a' + (number % 26) as u8);
    let text = match number / 26 {
        0 => format!("vd{}", letter(number)),
        more => format!("vd{}{}", letter(more - 1), letter(number)),
    };
    DiskName::parse(&text)
}

fn verify(
    package: &Package,
    manifest: &Part,
    digests: &[StatedDigest],
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<()> {
    let mut buffer = vec![0; READ_BYTES];
    for stated in digests {
        let shown = stated.file.escape_debug();
        let file = package.find(&stated.file)?.ok_or_else(|| {
            let text = format!("{} lists '{shown}', which is missing", manifest.location);
            Error::new(ErrorKind::NotFound, text)
        })?;
        let watch = Watch { disk: &stated.file, progress, cancel };
        let (mut digest, mut at) = (Digest::new(stated.algorithm), 0);
        while at < file.length_bytes {
            watch.check_cancel()?;
            let read = file.read_at(&mut buffer, at)?;
            digest.update(&buffer[..read]);
            at += read as u64;
            progress.update(&ProgressState {
                phase: Phase::Verifying,
                disk: &stated.file,
                done_bytes: at,
                total_bytes: file.length_bytes,
                read_bytes: at,
                stored_bytes: 0,
            });
        }
        if !stated.is_of(digest) {
            let text = format!(
                "{} is not the file of the manifest: its digest differs. Copy or export it again",
                file.location
            );
            return Err(Error::new(ErrorKind::Io, text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_named_without_a_disk() {
        for whole in ["acme.ova", "/x/Acme.OVF", "/a=b/acme.ova"] {
            assert!(appliance_path(whole).is_some(), "{whole}");
        }
        for disk in ["vda=acme.ova", "acme.vmdk", "vda=raw:acme.ova"] {
            assert!(appliance_path(disk).is_none(), "{disk}");
        }
    }

    #[test]
    fn names_of_disks_and_files() {
        let names = [0, 25, 26, 255].map(|number| disk_name(number).unwrap().to_string());
        assert_eq!(names, ["vda", "vdz", "vdaa", "vdiv"]);
        assert_eq!(percent_decoded("a%20b%C3%B6").as_deref(), Some("a bö"));
        for wrong in ["%", "%2", "%zz", "%ff", "%€"] {
            assert_eq!(percent_decoded(wrong), None, "{wrong}");
        }
    }
}
