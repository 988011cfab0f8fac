//! Files with the passwords of servers and hypervisors.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Reading, for all users of the host.
const READABLE_BY_ALL: u32 = 0o004;

/// The warning if every user of the host can read the file. The file may be in a private folder.
pub fn public_password_warning(path: &Path) -> Option<String> {
    let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    let is_public = found.permissions().mode() & READABLE_BY_ALL != 0;
    let path = path.display();
    is_public.then(|| {
        format!("{path}: every user of this host can read this password: chmod 600 {path}")
    })
}
