//! Another repository as a source to heal from.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::{ErrorKind, Phase, Progress, ProgressState, Result};
use coldrise_ingest::heal_from_disk;
use coldrise_session::{Inventory, ReadLease, VerifyPart, open_point_disk};
use coldrise_store::{
    Affected, OpenOptions, PassphraseSource, PointDocument, Repository, RepositoryWriter,
};

use crate::invocation::Invocation;
use crate::progress::ProgressView;

/// The program's name in the other repository's leases, for people.
const PROGRAM: &str = "repair";

/// The repository that --from-repo names.
#[derive(Debug, Args)]
pub(super) struct OtherArguments {
    /// Another repository that may have the content: a copy, or one with the same machines.
    ///
    /// The repair searches the same places in restore points of the same machines first, newest
    /// first, then the whole repository. It changes nothing there.
    #[arg(long, value_name = "DIR")]
    from_repo: Option<PathBuf>,

    /// Read the passphrase of that repository from this file. Without this option and
    /// --from-passphrase-command, the passphrase of --repo is used, or none if that repository
    /// is not encrypted.
    #[arg(long, value_name = "FILE", requires = "from_repo")]
    from_passphrase_file: Option<PathBuf>,

    /// Run this shell command and read the passphrase of that repository from its output.
    #[arg(long, value_name = "COMMAND", requires = "from_repo")]
    #[arg(conflicts_with = "from_passphrase_file")]
    from_passphrase_command: Option<String>,
}

impl OtherArguments {
    /// Opens the repository that --from-repo names, if any.
    pub(super) fn open(&self, invocation: &Invocation) -> Result<Option<Arc<Repository>>> {
        let Some(path) = &self.from_repo else { return Ok(None) };
        let options = OpenOptions { cache_bytes: 0 };
        let own = match (&self.from_passphrase_file, &self.from_passphrase_command) {
            (Some(file), _) => Some(PassphraseSource::File(file.clone())),
            (None, Some(command)) => Some(PassphraseSource::Command(command.clone())),
            (None, None) => None,
        };
        if let Some(own) = own {
            return Repository::open(path, &own, &options).map(Some);
        }
        match Repository::open(path, &invocation.passphrase()?, &options) {
            // A foreign repository cannot supply wrong content: the chunks' hashes are checked.
            Err(error) if error.kind() == ErrorKind::WrongPassphrase => {
                Repository::open(path, &PassphraseSource::None, &options)
                    .map_err(|_| error.context("--from-passphrase-file gives its own passphrase"))
                    .map(Some)
            }
            opened => opened.map(Some),
        }
    }
}

/// Heals the `affected` ranges and all other known damage from another repository.
/// Returns the number of healed chunks.
pub(super) fn heal(
    writer: &RepositoryWriter,
    other: &Arc<Repository>,
    affected: &[Affected],
    view: &ProgressView,
    cancel: &AtomicBool,
) -> Result<u64> {
    if writer.damaged_chunks() == 0 {
        return Ok(0);
    }
    let (mut inventory, _held) = ReadLease::everything(other, PROGRAM, cancel)?;
    inventory.points.sort_by(|a, b| b.point.cmp(&a.point));
    let mut healed = same_places(writer, other, &inventory, affected, view, cancel)?;
    if writer.damaged_chunks() > 0 && writer.can_heal_from(other) {
        let progress = |now| view.verifying(VerifyPart::Chunks, now);
        healed += writer.heal_from(other, cancel, &progress)?;
    } else {
        for point in &inventory.points {
            let sizes = point.disks.iter().map(|disk| (disk.name.as_str(), 0..disk.size_bytes));
            for (disk, whole) in sizes {
                healed += from_disk(writer, other, point, disk, &[whole], view, cancel)?;
            }
        }
    }
    Ok(healed)
}

/// Searches the same places first: the content is most likely there.
fn same_places(
    writer: &RepositoryWriter,
    other: &Arc<Repository>,
    inventory: &Inventory,
    affected: &[Affected],
    view: &ProgressView,
    cancel: &AtomicBool,
) -> Result<u64> {
    let mut places: BTreeMap<(&str, &str), Vec<Range<u64>>> = BTreeMap::new();
    for part in affected {
        let mut names = part.disk.split('/');
        if let (Some(machine), Some(_), Some(disk)) = (names.next(), names.next(), names.next()) {
            places.entry((machine, disk)).or_default().extend(part.ranges.iter().cloned());
        }
    }
    let mut healed = 0;
    for ((machine, disk), mut ranges) in places {
        ranges.sort_by_key(|range| range.start);
        ranges.dedup();
        for point in inventory.points.iter().filter(|point| point.machine.as_str() == machine) {
            healed += from_disk(writer, other, point, disk, &ranges, view, cancel)?;
        }
    }
    Ok(healed)
}

fn from_disk(
    writer: &RepositoryWriter,
    other: &Arc<Repository>,
    point: &PointDocument,
    disk: &str,
    ranges: &[Range<u64>],
    view: &ProgressView,
    cancel: &AtomicBool,
) -> Result<u64> {
    let Some(found) = point.disks.iter().find(|there| there.name.as_str() == disk) else {
        return Ok(0);
    };
    if writer.damaged_chunks() == 0 {
        return Ok(0);
    }
    let opened = match open_point_disk(other, point, &found.name) {
        // Damaged there as well, or removed since.
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
            return Ok(0);
        }
        opened => opened?,
    };
    let name = format!("{}/{}/{disk}", point.machine, point.point);
    let progress = |done_bytes| {
        view.update(&ProgressState {
            phase: Phase::Storing,
            disk: &name,
            done_bytes,
            total_bytes: found.size_bytes,
            read_bytes: 0,
            stored_bytes: 0,
        });
    };
    Ok(heal_from_disk(writer, &*opened, ranges, &progress, cancel)?.healed_chunks)
}
