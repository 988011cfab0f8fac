//! `coldrise restore --parts`: writes what a point holds beside its disks into a folder.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use coldrise_block::{
    Context, Error, ErrorKind, Result, sync_directory, temporary_path, write_synced,
};
use coldrise_ingest::RestoreTarget;
use coldrise_session::Catalog;
use coldrise_store::{Address, COLDRISE_JSON, LIBVIRT_XML, PointDocument, Repository, VMX};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use std::sync::Arc;

/// In an empty folder: where files are until they are complete.
const STAGED: &str = ".coldrise-parts";

#[derive(Serialize)]
struct RestoredParts {
    address: String,
    folder: PathBuf,
    files: Vec<String>,
    elapsed_ms: u64,
}

/// Writes the parts and the configuration of a point into a new or empty folder.
///
/// # Errors
/// `InvalidInput` for an address of anything but a point; `NotFound` if it has neither; `AlreadyExists` if the folder has files.
pub(super) fn run(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    address: &Address,
    target: &RestoreTarget,
) -> Result<Report> {
    let (Address::Point { machine, selector, disk: None }, RestoreTarget::Path(folder)) =
        (address, target)
    else {
        let text = format!("--parts takes MACHINE/POINT and a folder, not {address} and {target}");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    };
    let point = Catalog::new(repository).point(machine, selector)?;
    let files = files(&point)?;
    write(folder, &files)?;
    let restored = RestoredParts {
        address: format!("{machine}/{}", point.point),
        folder: folder.clone(),
        files: files.into_iter().map(|(name, _)| name).collect(),
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = format!(
        "restored from {} to {}: {}",
        restored.address,
        folder.display(),
        restored.files.join(", ")
    );
    Ok(Report::done(&restored, text))
}

/// Names and contents.
fn files(point: &PointDocument) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for part in &point.parts {
        files.push((format!("{}.{}", part.kind, part.format), part.content()?));
    }
    if let Some(stored) = &point.configuration {
        let extension = match stored.format.as_str() {
            LIBVIRT_XML => "xml",
            VMX => "vmx",
            COLDRISE_JSON => "json",
            _ => "txt",
        };
        files.push((format!("configuration.{extension}"), stored.text.clone().into_bytes()));
    }
    match files.is_empty() {
        true => {
            let text =
                format!("{}/{} has nothing in addition to its disks", point.machine, point.point);
            Err(Error::new(ErrorKind::NotFound, text))
        }
        false => Ok(files),
    }
}

/// A new folder gets its name when it is complete. An empty one, perhaps a mount point or behind a link, gets complete files.
fn write(folder: &Path, files: &[(String, Vec<u8>)]) -> Result<()> {
    let what = || format!("writing {}", folder.display());
    let is_there = match std::fs::symlink_metadata(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        found => found.map(|_| true).context(what)?,
    };
    let staged = match is_there {
        true => folder.join(STAGED),
        false => temporary_path(folder),
    };
    // A restore that was killed may have left it.
    let _ = std::fs::remove_dir_all(&staged);
    if is_there && !std::fs::read_dir(folder).is_ok_and(|mut names| names.next().is_none()) {
        let text = format!("{} is there already", folder.display());
        return Err(
            Error::new(ErrorKind::AlreadyExists, text).advise("name a new folder, or an empty one")
        );
    }
    DirBuilder::new().mode(0o700).create(&staged).context(what)?;
    let written = files
        .iter()
        .try_for_each(|(name, content)| write_synced(&staged.join(name), content))
        .context(what)
        .and_then(|()| sync_directory(&staged))
        .and_then(|()| match is_there {
            true => files
                .iter()
                .try_for_each(|(name, _)| std::fs::rename(staged.join(name), folder.join(name)))
                .and_then(|()| std::fs::remove_dir(&staged))
                .context(what),
            false => std::fs::rename(&staged, folder).context(what),
        });
    if written.is_err() {
        let _ = std::fs::remove_dir_all(&staged);
    }
    written?;
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
    match is_there {
        true => sync_directory(folder),
        false => sync_directory(parent.unwrap_or(Path::new("."))),
    }
}
