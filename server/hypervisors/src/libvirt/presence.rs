//! Missing prerequisites of this host for machines under libvirt.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

/// Sockets of libvirt for the whole system: of libvirtd, and of the separate daemon for QEMU.
const SYSTEM_SOCKETS: [&str; 2] = ["/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock"];

/// Says what is missing for `recover --to libvirt` with this URI, and what to do; `None` if nothing is known to
/// be. Asks no daemon: one that hangs is found out by the run.
pub fn missing(uri: &str) -> Option<String> {
    if !has_program("virsh") {
        return Some(
            "virsh is not installed on this host (Debian: apt install libvirt-clients)".into(),
        );
    }
    let sockets: Vec<PathBuf> = match uri.split_once("?socket=") {
        Some((_, path)) => vec![PathBuf::from(path.split('&').next().unwrap_or(path))],
        // The daemon of a session is started by virsh.
        None if uri.contains(":///session") => return None,
        None => SYSTEM_SOCKETS.map(PathBuf::from).to_vec(),
    };
    let there: Vec<&PathBuf> = sockets.iter().filter(|path| path.exists()).collect();
    if there.is_empty() {
        return Some(format!(
            "libvirtd does not run on this host: {} is missing (Debian: apt install libvirt-daemon-system)",
            sockets[0].display()
        ));
    }
    if there.iter().any(|path| access(path.as_path(), Access::WRITE_OK).is_ok()) {
        return None;
    }
    Some(format!(
        "this user may not connect to libvirt at {}: add it to the group libvirt (docs/recovery.md)",
        there[0].display()
    ))
}

fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .any(|folder| access(Path::new(&folder).join(name), Access::EXEC_OK).is_ok())
}

#[cfg(test)]
mod tests {
    use super::missing;

    #[test]
    fn a_daemon_that_is_away_is_named_with_its_socket() {
        if super::has_program("virsh") {
            let advice = missing("qemu:///system?socket=/nonexistent/libvirt-sock").unwrap();
            assert!(advice.contains("/nonexistent/libvirt-sock is missing"), "{advice}");
            assert_eq!(missing("qemu:///session"), None);
        }
    }
}
