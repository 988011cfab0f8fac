//! The parts of a domain beside its disks, as they are at the instant.
//!
//! No job of libvirt holds them still. They are read before and after the instant: equal content was there at the instant, too,
//! unless it changed and changed back meanwhile. Different content is read until it stays the same, and is
//! stored with a remark.

use std::path::{Path, PathBuf};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::{Host, ScratchSpace};
use coldrise_hypervisors::libvirt::PartFiles;
use coldrise_store::{
    FIRMWARE_VARIABLES, MAX_PART_BYTES, MachinePart, RAW, SWTPM_PERMALL, TPM_STATE, check_parts,
};

/// How often a part that changes is read, and the interval.
const MAX_READS: usize = 5;
const INTERVAL: Duration = Duration::from_millis(100);

/// The content of a domain's parts before the instant.
pub(super) struct PartsBefore {
    host: Host,
    files: PartFiles,
    variables: Option<Result<Vec<u8>>>,
    tpm: Option<Result<Vec<u8>>>,
}

impl PartsBefore {
    pub(super) fn read(host: &Host, files: PartFiles) -> PartsBefore {
        let read = |path: &Option<PathBuf>| Some(host.read_file(path.as_ref()?, MAX_PART_BYTES));
        let (variables, tpm) = (read(&files.variables), read(&files.tpm));
        PartsBefore { host: host.clone(), files, variables, tpm }
    }

    /// The parts after the instant. A part that cannot be read is named in a remark, and fails nothing.
    pub(super) fn after_instant(
        self,
        space: &ScratchSpace,
        remarks: &mut Vec<String>,
    ) -> Vec<MachinePart> {
        let PartsBefore { host, files, variables, tpm } = self;
        let missing = |what: &str| format!("not in this point: {what}");
        remarks.extend(files.lacking.iter().map(|what| missing(what)));
        let mut parts = Vec::new();
        let all = [
            (FIRMWARE_VARIABLES, RAW, "firmware variables", files.variables, variables),
            (TPM_STATE, SWTPM_PERMALL, "state of the TPM", files.tpm, tpm),
        ];
        for (kind, format, words, path, before) in all {
            let (Some(path), Some(before)) = (path, before) else { continue };
            let read = before.and_then(|before| settled(&host, &path, before, words, remarks));
            let read =
                read.and_then(|content| match kind == FIRMWARE_VARIABLES && files.is_qcow2 {
                    true => space.raw_of_qcow2(&content, MAX_PART_BYTES),
                    false => Ok(content),
                });
            let part = read.and_then(|content| {
                if content.is_empty() {
                    let text = format!("{} is empty", path.display());
                    return Err(Error::new(ErrorKind::InvalidInput, text));
                }
                parts.push(MachinePart::new(kind, format, &content)?);
                check_parts(&parts).inspect_err(|_| drop(parts.pop()))
            });
            if let Err(error) = part {
                let why = error.full_message();
                remarks.push(missing(&format!("the machine's {words}: {why}")));
            }
        }
        parts
    }
}

/// The content after the instant, when two reads in a row are equal.
fn settled(
    host: &Host,
    path: &Path,
    mut before: Vec<u8>,
    words: &str,
    remarks: &mut Vec<String>,
) -> Result<Vec<u8>> {
    for count in 0..MAX_READS {
        let now = host.read_file(path, MAX_PART_BYTES)?;
        if now == before {
            if count > 0 {
                remarks.push(format!(
                    "the {words} changed around the instant of the disks: stored as just after it"
                ));
            }
            return Ok(now);
        }
        before = now;
        std::thread::sleep(INTERVAL);
    }
    remarks.push(format!(
        "warning: the {words} changed during each read: the stored copy may be of no single moment"
    ));
    Ok(before)
}
