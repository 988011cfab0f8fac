//! Removal of the remains of ended sessions.

use crate::paths::{SessionPaths, layer_path, map_path};
use crate::session_folder::document::SessionDocument;
use crate::session_folder::rollback_guard::check_not_older;
use crate::session_folder::side_file::forget_old_maps;
use coldrise_block::{Result, remove_if_present};
use coldrise_store::Repository;
/// Removes the parts that an ended session no longer needs: top layers that are in no point, and
/// files that clients wrote beside the disks. Removes the folder once all points are in the
/// catalog. The caller holds the documents' lock.
pub(crate) fn remove_remains(
    repository: &Repository,
    place: &SessionPaths,
    document: &SessionDocument,
) -> Result<()> {
    if !document.is_ended {
        return Ok(());
    }
    // Points may own the layers of an older version of the session: a writer checks that.
    let is_older = check_not_older(repository, document).is_err();
    for disk in &document.disks {
        if !is_older && !disk.layers.iter().any(|layer| layer.id == disk.top) {
            remove_if_present(&layer_path(repository, &disk.top))?;
        }
        // A killed writer left this map.
        remove_if_present(&map_path(&disk.top))?;
    }
    forget_old_maps(place)?;
    if document.sealed.is_empty() {
        return place.remove();
    }
    place.remove_files()
}
