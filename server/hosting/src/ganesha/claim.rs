//! The claim to be this host's NFSv3 server of a repository.
//!
//! A host has one NFSv3 server, because rpcbind knows one. The command that serves a repository with it,
//! writable, claims `leases/nfs-BOOT-NETWORK` from before nfs-ganesha starts until it is asked to end. BOOT is
//! the id of the host's boot, NETWORK the number of the network namespace.
//!
//! - A server that listens while another process has the claim serves this repository, and keeps running.
//! - nfs-ganesha still listens while it closes its sessions: after its command is killed (the kernel frees the
//!   claim) and after it is asked to end. The next command takes the claim, and waits until the port is free.
//! - A recovery writes its note first, then looks for a server. A server that ends because no note needs it
//!   gives its claim back first, then reads the notes, and serves on if it finds one and the claim is still
//!   free. So whichever is first, one of the two serves.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_store::{Claim, lock_holder};

const PREFIX: &str = "nfs-";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const NETWORK: &str = "/proc/self/ns/net";

/// Takes the claim; `None` while another process has it.
///
/// # Errors
/// `ReadOnly` on a read-only file system, and other errors of the operating system.
pub(super) fn take(repository: &Path) -> Result<Option<Claim>> {
    Claim::take(repository, &name()?)
}

/// The error while another process has the claim.
pub(super) fn taken(repository: &Path) -> Error {
    let path = name().map(|name| repository.join("leases").join(name));
    let process = path.ok().and_then(|path| lock_holder(&path));
    let process = process.map_or(String::new(), |process| format!(" (process {process})"));
    let text = format!("another command{process} serves this repository over NFSv3 on this host");
    Error::new(ErrorKind::Busy, text)
}

/// Whether a command of this host serves the repository over NFSv3, in any network namespace. Takes no lock, which
/// would be in the way of a server that starts.
pub fn is_serving(repository: &Path) -> bool {
    let claims = std::fs::read_dir(repository.join("leases")).into_iter().flatten().flatten();
    let mut claims = claims.filter(|claim| claim.file_name().to_string_lossy().starts_with(PREFIX));
    claims.any(|claim| lock_holder(&claim.path()).is_some())
}

fn name() -> Result<String> {
    let boot = std::fs::read_to_string(BOOT_ID).context(|| format!("reading {BOOT_ID}"))?;
    let network = std::fs::metadata(NETWORK).context(|| format!("reading {NETWORK}"))?;
    Ok(format!("{PREFIX}{}-{}", boot.trim(), network.ino()))
}
