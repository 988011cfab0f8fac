//! Flags of a point, stored beside its marker.
//!
//! A flag is an empty file. It counts if either the file or the point's document has it, so a
//! truncated log loses no flag: the file is made before the document changes and removed after it.

use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use coldrise_block::{Context, Result, remove_if_present, sync_directory};

use super::DIRECTORY;
use crate::documents::Flag;
use crate::{MachineName, PointName, Repository};

pub(super) const PROTECTED_EXTENSION: &str = "protected";
pub(super) const QUARANTINED_EXTENSION: &str = "quarantined";

fn extension(flag: Flag) -> &'static str {
    match flag {
        Flag::Protected => PROTECTED_EXTENSION,
        Flag::Quarantined => QUARANTINED_EXTENSION,
    }
}

impl Repository {
    /// Whether a point has this flag.
    pub(crate) fn has_flag(
        &self,
        machine: &MachineName,
        point: &PointName,
        flag: Flag,
    ) -> Result<bool> {
        let path = self.flag_path(machine, point, flag);
        path.try_exists().context(|| format!("looking for {}", path.display()))
    }

    /// Sets or removes a flag of a point, durably. Returns whether anything changed.
    pub(crate) fn set_flag(
        &self,
        (machine, point): (&MachineName, &PointName),
        flag: Flag,
        is_set: bool,
    ) -> Result<bool> {
        let path = self.flag_path(machine, point, flag);
        let changed = if !is_set {
            remove_if_present(&path)?
        } else if self.has_flag(machine, point, flag)? {
            false
        } else {
            let what = || format!("making {}", path.display());
            let mut options = std::fs::OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600);
            options.open(&path).context(what)?.sync_all().context(what)?;
            true
        };
        if changed {
            sync_directory(&self.path().join(DIRECTORY))?;
        }
        Ok(changed)
    }

    fn flag_path(&self, machine: &MachineName, point: &PointName, flag: Flag) -> PathBuf {
        self.marker_path(&format!("{machine}/{point}")).with_extension(extension(flag))
    }
}
