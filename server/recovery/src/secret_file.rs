//! Files with the passwords of servers and hypervisors.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Reading, for all users of the host.
const READABLE_BY_ALL: u32 = 0o004;

/// Warns if every user of the host can read the file. Works on: the file may be in a private folder.
pub fn warn_if_public(path: &Path) {
    let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file);
    if found.is_some_and(|found| found.permissions().mode() & READABLE_BY_ALL != 0) {
        let path = path.display();
        tracing::warn!("{path}: every user of this host can read this password: chmod 600 {path}");
    }
}
