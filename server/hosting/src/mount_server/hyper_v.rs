//! The lines that start a session's machine on a Hyper-V host.

use super::smb_configuration::SHARE;

/// Commands of PowerShell. `host` is the server as the Hyper-V host reaches it; the machine has
/// these disks, its boot disk first.
pub fn lines(host: &str, user: &str, session: &str, disks: &[String]) -> Vec<String> {
    let folder = format!(r"\\{host}\{SHARE}\live\{session}");
    let mut disks = disks.iter().map(|disk| format!(r"{folder}\{disk}.vhdx"));
    let first = disks.next().unwrap_or_default();
    let mut lines = vec![
        format!("cmdkey /add:{host} /user:{user} /pass"),
        format!(
            "New-VM -Name {session} -Generation 1 -MemoryStartupBytes 4GB -VHDPath {first}  # \
             -Generation 2 if it boots by UEFI"
        ),
        format!("Set-VM -Name {session} -CheckpointType Disabled"),
    ];
    lines.extend(disks.map(|disk| format!("Add-VMHardDiskDrive -VMName {session} -Path {disk}")));
    lines.push(format!("Start-VM {session}"));
    lines.push(format!(
        r"Move-VMStorage -VMName {session} -DestinationStoragePath C:\VMs\{session}  # home, while it runs"
    ));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_disk_is_named() {
        let lines = lines("10.0.0.5", "coldrise", "rescue", &["vda".to_owned(), "vdb".to_owned()]);
        assert!(lines[1].contains(r"-VHDPath \\10.0.0.5\coldrise\live\rescue\vda.vhdx "));
        assert_eq!(
            lines[3],
            r"Add-VMHardDiskDrive -VMName rescue -Path \\10.0.0.5\coldrise\live\rescue\vdb.vhdx"
        );
        assert_eq!(lines.len(), 6);
    }
}
