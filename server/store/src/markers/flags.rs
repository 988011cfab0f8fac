//! What is said of a point beside its marker.
//!
//! A flag is an empty file. What either it or the point's document says counts, so that
//! neither is lost with the end of a log: the file comes before the document and goes
//! after it.

use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use coldrise_block::{Context, Result};

use super::{remove, DIRECTORY};
use crate::description::sync_directory;
use crate::{MachineName, PointName, Repository};

pub(super) const PROTECTED_EXTENSION: &str = "protected";
pub(super) const QUARANTINED_EXTENSION: &str = "quarantined";

/// What is said of a point beside its marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flag {
    Protected,
    Quarantined,
}

impl Flag {
    fn extension(self) -> &'static str {
        match self {
            Flag::Protected => PROTECTED_EXTENSION,
            Flag::Quarantined => QUARANTINED_EXTENSION,
        }
    }
}

impl Repository {
    /// Whether this is said of a point.
    pub(crate) fn has_flag(
        &self,
        machine: &MachineName,
        point: &PointName,
        flag: Flag,
    ) -> Result<bool> {
        let path = self.flag_path(machine, point, flag);
        path.try_exists().context(|| format!("looking for {}", path.display()))
    }

    /// Says this of a point, or takes it back, durably; whether that changed anything.
    pub(crate) fn set_flag(
        &self,
        (machine, point): (&MachineName, &PointName),
        flag: Flag,
        is_set: bool,
    ) -> Result<bool> {
        let path = self.flag_path(machine, point, flag);
        let changed = match is_set {
            false => remove(&path)?,
            true if self.has_flag(machine, point, flag)? => false,
            true => {
                let what = || format!("making {}", path.display());
                let mut options = std::fs::OpenOptions::new();
                options.write(true).create(true).truncate(false).mode(0o600);
                options.open(&path).context(what)?.sync_all().context(what)?;
                true
            }
        };
        if changed {
            sync_directory(&self.path().join(DIRECTORY))?;
        }
        Ok(changed)
    }

    fn flag_path(&self, machine: &MachineName, point: &PointName, flag: Flag) -> PathBuf {
        self.marker_path(&format!("{machine}/{point}")).with_extension(flag.extension())
    }
}
