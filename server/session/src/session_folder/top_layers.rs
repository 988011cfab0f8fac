//! The layers that take a session's writes.

use crate::layer::{Layer, LayerKeys};
use crate::locks::file_lock::FileLock;
use crate::paths::layer_path;
use crate::session_folder::document::{SessionDisk, SessionDocument};
use coldrise_block::{Context, ErrorKind, Result, sync_directory};
use coldrise_store::{LayerId, Repository};

/// How often a seal makes new layers if another process removes them before the commit.
pub(crate) const SEAL_ATTEMPTS: u32 = 10;

/// Creates new top layers and calls `seal` with them. No document names them until the commit: their
/// locks keep a fold or a gc from removing them. It may remove one that is not locked yet: then does both again. If `seal` fails the new layers stay, because
/// the document may already name them; the next writer removes unreferenced ones.
///
/// # Errors
/// Those of `seal`; `NoSpace`.
pub(crate) fn with_new_tops<T>(
    repository: &Repository,
    document: &SessionDocument,
    mut seal: impl FnMut(&[SessionDisk]) -> Result<T>,
) -> Result<T> {
    let mut attempts_left = SEAL_ATTEMPTS;
    loop {
        let tops = new_tops(document)?;
        let locks = create_tops(repository, tops.iter())?;
        let sealed = seal(&tops);
        drop(locks);
        attempts_left -= 1;
        let is_lost = |disk: &SessionDisk| !layer_path(repository, &disk.top).exists();
        match sealed {
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Busy)
                    && tops.iter().any(is_lost)
                    && attempts_left > 0 =>
            {
                tracing::debug!(error = %error.full_message(), "sealing again");
            }
            sealed => return sealed,
        }
    }
}

/// Copies of the disks with new ids for the top layers.
pub(crate) fn new_tops(document: &SessionDocument) -> Result<Vec<SessionDisk>> {
    let mut tops = document.disks.clone();
    for disk in &mut tops {
        disk.top = LayerId::random()?;
        disk.least_sequence = 0;
    }
    Ok(tops)
}

/// Creates the empty top layers of these disks, durably. Their locks keep them from being removed.
pub(crate) fn create_tops<'a>(
    repository: &Repository,
    disks: impl Iterator<Item = &'a SessionDisk>,
) -> Result<Vec<Option<FileLock>>> {
    let create = |disk: &SessionDisk| {
        let keys = LayerKeys::of(repository, &disk.top);
        Layer::create(&layer_path(repository, &disk.top), &disk.top_superblock(), &keys)
            .context(|| format!("disk {}", disk.name))
    };
    let locks = disks.map(create).collect::<Result<Vec<_>>>()?;
    sync_directory(&repository.layers_dir())?;
    Ok(locks)
}
