//! The requirements of `coldrise serve nfs` and `coldrise boot --over nfs`.

use coldrise_block::Result;

use super::{Findings, Status};
use coldrise_hosting::{ganesha, netns, qemu};

/// Only NFS needs these programs, so a missing one is not a failure.
pub(super) fn check(found: &mut Findings) {
    const SERVER: &str = "needed for coldrise serve nfs";
    const BOOT: &str = "needed for coldrise boot --over nfs";
    let fits = "the one that the FSAL is built for".to_owned();
    add(found, "nfs-ganesha", ganesha::check_version().map(|()| fits), SERVER);
    let fsal = ganesha::fsal().map(|file| file.display().to_string());
    add(found, "nfs-ganesha FSAL", fsal, SERVER);
    let rpcbind = ganesha::check_rpcbind().map(|runs| {
        if runs { "runs".to_owned() } else { "is started with the NFS server".to_owned() }
    });
    add(found, "rpcbind", rpcbind, "needed for NFSv3");
    let driver = qemu::check_nfs_driver().map(|()| "is installed".to_owned());
    add(found, "QEMU's NFS driver", driver, BOOT);
    let ip = netns::check_installed().map(|()| "is installed".to_owned());
    add(found, "ip", ip, BOOT);
}

/// The errors say what to install.
fn add(found: &mut Findings, check: &'static str, result: Result<String>, needed: &str) {
    match result {
        Ok(message) => found.ok(check, message),
        Err(error) => {
            let message = format!("{}; {needed}", error.full_message());
            found.add(check, Status::Warn, message, "");
        }
    }
}
