//! `coldrise attest`: signed proofs of the content of restore points, and their check.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use coldrise_attest::{
    Content, DiskStatement, Proof, PublicKey, SigningKey, check_copy, hash_disk,
};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::source::{SourceOptions, open_source};
use coldrise_ingest::{Location, SourceSpec};
use coldrise_inventory::find_disk;
use coldrise_requests::parse_percent;
use coldrise_session::{Catalog, ReadLease, open_point_disk};
use coldrise_store::{Address, DiskName, Repository};
use serde::Serialize;

use super::restore::open_disk;
use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::{Report, table};
use crate::units::{show_count, show_duration, show_size};
use coldrise_hosting::signals::cancel_flag;

/// The program's name in leases, for people.
const PROGRAM: &str = "attest";

/// Sign a proof of a restore point's content, or check a copy against one.
///
/// The proof is a small file that anybody can check without the repository and its passphrase: on
/// a restored image, an NBD export, or another repository with other chunk sizes. See
/// docs/recovery.md. A check exits with 1 if the copy differs.
#[derive(Debug, Args)]
pub(crate) struct AttestArguments {
    /// MACHINE/POINT[/DISK] to sign. With --check: copies as [DISK=][FORMAT:]SOURCE or as
    /// addresses.
    ///
    /// SOURCE is an image file, a device or an NBD URI, as of backup. DISK= may be left out if the
    /// proof is of one disk. An address without a disk stands for all disks of the proof.
    #[arg(value_name = "ADDRESS|COPY", required_unless_present = "new_key")]
    subjects: Vec<String>,

    /// Sign with the private key in this file.
    #[arg(long, value_name = "FILE", required_unless_present_any = ["check", "new_key"])]
    key: Option<PathBuf>,

    /// Write the proof to this new file.
    #[arg(short, long, value_name = "PROOF", requires = "key")]
    #[arg(required_unless_present_any = ["check", "new_key"])]
    output: Option<PathBuf>,

    /// Check copies against this proof.
    #[arg(long, value_name = "PROOF", conflicts_with = "key")]
    check: Option<PathBuf>,

    /// Refuse a proof that was not signed by this public key (PEM).
    #[arg(long, value_name = "FILE", requires = "check")]
    public_key: Option<PathBuf>,

    /// Check only about this percentage of each disk, chosen at random, but at least one section.
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent, requires = "check")]
    sample: Option<f64>,

    /// Make a private key in this new file, and its public key in FILE.pub.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["check", "key", "subjects"])]
    new_key: Option<PathBuf>,
}

#[derive(Serialize)]
struct NewKey {
    key: String,
    public_key: String,
    fingerprint: String,
}

#[derive(Serialize)]
struct Signed {
    address: String,
    proof: String,
    fingerprint: String,
    disks: Vec<DiskStatement>,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct Checked {
    machine: String,
    point: String,
    fingerprint: String,
    is_trusted_key: bool,
    is_equal: bool,
    disks: Vec<CheckedDisk>,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct CheckedDisk {
    disk: String,
    copy: String,
    is_equal: bool,
    section_bytes: u64,
    sections: u64,
    checked_sections: u64,
    differing_offsets: Vec<u64>,
}

pub(crate) fn run(invocation: &Invocation, arguments: AttestArguments) -> Result<Report> {
    match (&arguments.new_key, &arguments.check) {
        (Some(path), _) => new_key(path),
        (None, Some(proof)) => check(invocation, proof, &arguments),
        (None, None) => sign(invocation, &arguments),
    }
}

fn new_key(path: &Path) -> Result<Report> {
    let mut public_path = path.as_os_str().to_owned();
    public_path.push(".pub");
    let public_path = PathBuf::from(public_path);
    let key = SigningKey::create(path)?.public();
    std::fs::write(&public_path, key.to_pem())
        .map_err(|error| Error::io(format!("writing {}", public_path.display()), error))?;
    let answer = NewKey {
        key: path.display().to_string(),
        public_key: public_path.display().to_string(),
        fingerprint: key.fingerprint(),
    };
    let text = format!(
        "made the key {} ({}); give {} to those who check",
        answer.fingerprint, answer.key, answer.public_key
    );
    Ok(Report::done(&answer, text))
}

fn sign(invocation: &Invocation, arguments: &AttestArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let ([subject], Some(key), Some(output)) =
        (&arguments.subjects[..], &arguments.key, &arguments.output)
    else {
        let text = "a proof is of one restore point: give one MACHINE/POINT";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    };
    let Address::Point { machine, selector, disk } = Address::parse(subject)? else {
        return Err(Error::new(ErrorKind::InvalidInput, "a session changes: seal it first"));
    };
    let key = SigningKey::read(key)?;
    if output.symlink_metadata().is_ok() {
        let text = format!("{} exists: choose another name", output.display());
        return Err(Error::new(ErrorKind::AlreadyExists, text));
    }
    let repository = invocation.open_for_disks()?;
    let mut point = Catalog::new(&repository).point(&machine, &selector)?;
    let names = match disk {
        Some(name) => vec![find_disk(&point, &name)?.name.clone()],
        None => point.disks.iter().map(|disk| disk.name.clone()).collect(),
    };
    let _held = ReadLease::point(&repository, PROGRAM, &mut point)?;
    let view = ProgressView::new(invocation);
    let mut disks = Vec::with_capacity(names.len());
    for name in names {
        let content = Content::Stored(open_point_disk(&repository, &point, &name)?);
        let sections = hash_disk(&content, name.as_str(), &view, &cancel)
            .map_err(|error| error.context(&name))?;
        disks.push((name, content.size_bytes(), sections));
    }
    drop(view);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now_ms = u64::try_from(now.as_millis()).unwrap_or(0);
    let proof = Proof::sign((&point.machine, &point.point), disks, now_ms, &key)?;
    proof.write(output)?;
    let signed = Signed {
        address: format!("{}/{}", point.machine, point.point),
        proof: output.display().to_string(),
        fingerprint: proof.public_key.fingerprint(),
        disks: proof.statement.disks,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let size = signed.disks.iter().map(|disk| disk.size_bytes).sum();
    let text = format!(
        "signed {} ({}) of {} with key {} in {}",
        show_count(signed.disks.len() as u64, "disk"),
        show_size(size),
        signed.address,
        signed.fingerprint,
        show_duration(invocation.elapsed())
    );
    Ok(Report::done(&signed, text))
}

fn check(invocation: &Invocation, path: &Path, arguments: &AttestArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let proof = Proof::read(path)?;
    let trusted = arguments.public_key.as_deref().map(PublicKey::read).transpose()?;
    if trusted.is_some_and(|key| key != proof.public_key) {
        let text = format!(
            "{}: signed with another key ({})",
            path.display(),
            proof.public_key.fingerprint()
        );
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    let mut repository = None;
    let mut disks = Vec::new();
    for subject in &arguments.subjects {
        for (stated, copy) in copies(&proof, subject)? {
            let checked =
                check_one(invocation, &proof, stated, copy, &mut repository, arguments, &cancel);
            disks.push(checked.map_err(|error| error.context(subject))?);
        }
    }
    let statement = &proof.statement;
    let missing = statement.disks.iter().filter(|d| !disks.iter().any(|c| c.disk == d.disk));
    for disk in missing {
        invocation.remark(&format!("warning: {} was not checked: name its copy, too", disk.disk));
    }
    let checked = Checked {
        machine: statement.machine.clone(),
        point: statement.point.clone(),
        fingerprint: proof.public_key.fingerprint(),
        is_trusted_key: trusted.is_some(),
        is_equal: disks.iter().all(|disk| disk.is_equal),
        disks,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = checked_text(invocation, &checked);
    let mut report = Report::answer(&checked, text);
    if !checked.is_equal {
        report.exit_code = coldrise_runs::exit_code(ErrorKind::Corrupt);
    }
    Ok(report)
}

/// A copy that the user names.
enum Copy {
    Address(Address),
    Source(Location),
}

/// The disks of the proof that a word of the command line names, and their copies.
fn copies<'p>(proof: &'p Proof, subject: &str) -> Result<Vec<(&'p DiskStatement, Copy)>> {
    let disks = &proof.statement.disks;
    if let Ok(address) = Address::parse(subject) {
        let disk = address.disk().map(DiskName::as_str);
        let is_meant = |stated: &&DiskStatement| disk.is_none_or(|name| name == stated.disk);
        let found: Vec<_> = disks.iter().filter(is_meant).collect();
        // The copy may have another name than the proof's only disk.
        let found = if found.is_empty() && disks.len() == 1 { vec![&disks[0]] } else { found };
        if found.is_empty() {
            return Err(unknown_disk(proof, disk.unwrap_or_default()));
        }
        return Ok(found
            .into_iter()
            .map(|stated| (stated, Copy::Address(address.clone())))
            .collect());
    }
    let named = subject.split_once('=').filter(|(name, _)| DiskName::parse(name).is_ok());
    let (stated, source) = match (named, &disks[..]) {
        (Some((name, source)), _) => {
            let stated = disks.iter().find(|stated| stated.disk == name);
            (stated.ok_or_else(|| unknown_disk(proof, name))?, source)
        }
        (None, [only]) => (only, subject),
        (None, _) => {
            let text = format!("'{subject}': the proof is of several disks: write DISK={subject}");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    };
    Ok(vec![(stated, Copy::Source(Location::parse(source)?))])
}

fn unknown_disk(proof: &Proof, name: &str) -> Error {
    let names: Vec<&str> = proof.statement.disks.iter().map(|disk| disk.disk.as_str()).collect();
    let text = format!("the proof is of {}, not of {name}", names.join(", "));
    Error::new(ErrorKind::NotFound, text)
}

fn check_one(
    invocation: &Invocation,
    proof: &Proof,
    stated: &DiskStatement,
    copy: Copy,
    repository: &mut Option<Arc<Repository>>,
    arguments: &AttestArguments,
    cancel: &AtomicBool,
) -> Result<CheckedDisk> {
    let (content, name, _held) = match copy {
        Copy::Source(location) => {
            let name = location.to_string();
            let spec = SourceSpec { disk: DiskName::parse(&stated.disk)?, location };
            let source = open_source(&spec, &SourceOptions::default(), cancel)?;
            (Content::Copy(source), name, None)
        }
        Copy::Address(address) => {
            let opened = match repository.take() {
                Some(opened) => opened,
                None => invocation.open_for_disks()?,
            };
            let repository = repository.insert(opened);
            let address = match (address, proof.statement.disks.len()) {
                (Address::Point { machine, selector, disk: None }, 2..) => {
                    let disk = Some(DiskName::parse(&stated.disk)?);
                    Address::Point { machine, selector, disk }
                }
                (Address::Live { session, disk: None }, 2..) => {
                    Address::Live { session, disk: Some(DiskName::parse(&stated.disk)?) }
                }
                (Address::Marked { session, time, disk: None }, 2..) => {
                    let disk = Some(DiskName::parse(&stated.disk)?);
                    Address::Marked { session, time, disk }
                }
                (address, _) => address,
            };
            let opened = open_disk(invocation, repository, &address)?;
            (Content::Stored(Arc::clone(&opened.disk)), opened.shown.clone(), Some(opened))
        }
    };
    let view = ProgressView::new(invocation);
    let result = check_copy(proof, stated, &content, arguments.sample, &view, cancel)?;
    Ok(CheckedDisk {
        disk: stated.disk.clone(),
        copy: name,
        is_equal: result.differing.is_empty(),
        section_bytes: result.section_bytes,
        sections: result.sections,
        checked_sections: result.checked,
        differing_offsets: result.differing,
    })
}

fn checked_text(invocation: &Invocation, checked: &Checked) -> String {
    let row = |disk: &CheckedDisk| {
        vec![
            disk.disk.clone(),
            if disk.is_equal { "equal".to_owned() } else { "DIFFERS".to_owned() },
            format!("{} of {}", disk.checked_sections, disk.sections),
            disk.differing_offsets.len().to_string(),
            disk.copy.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = checked.disks.iter().map(row).collect();
    let mut text = table(&["DISK", "RESULT", ">SECTIONS", ">DIFFER", "COPY"], &rows);
    for disk in checked.disks.iter().filter(|disk| !disk.is_equal) {
        let first = disk.differing_offsets[0];
        let size = show_size(disk.section_bytes);
        text.push_str(&format!("{}: first difference in the {size} at {first}\n", disk.disk));
    }
    let key = match checked.is_trusted_key {
        true => "the given key",
        false => "compare this fingerprint with the one you know, or give --public-key",
    };
    text.push_str(&format!(
        "proof of {}/{}, signed with {} ({key}), checked in {}",
        checked.machine,
        checked.point,
        checked.fingerprint,
        show_duration(invocation.elapsed())
    ));
    text
}
