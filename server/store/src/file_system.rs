//! File systems that a repository cannot be on: those that several hosts can mount.
//!
//! Coldrise relies on two properties that hold only on one host. A lock (flock) excludes all other
//! processes; on a network file system it may end at the host. A mapped page shows the writes of
//! other processes; a page that another host has written goes stale. Either one loses flushed
//! writes without an error, so such file systems are refused by type.
//!
//! Unknown types are allowed, because there are many local file systems and new ones appear. A FUSE
//! file system is judged by its type in /proc/self/mountinfo (`fuse.sshfs`): the kernel calls all
//! of them FUSE, and many are local.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use coldrise_block::{Error, ErrorKind, Result};

/// The type number of FUSE in statfs(2).
const FUSE: u32 = 0x6573_5546;

/// `f_type` of statfs(2), and the name for people.
const SHARED_TYPES: [(u32, &str); 19] = [
    (0x0000_6969, "NFS"),
    (0x0000_517B, "SMB"),
    (0xFE53_4D42, "SMB"),
    (0xFF53_4D42, "CIFS"),
    (0x00C3_6400, "CephFS"),
    (0x0116_1970, "GFS2"),
    (0x7461_636F, "OCFS2"),
    (0x0BD0_0BD0, "Lustre"),
    (0x0102_1997, "9p"),
    (0x5346_414F, "AFS"),
    (0x6B41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x1983_0326, "BeeGFS"),
    (0x4750_4653, "GPFS"),
    (0x2003_0528, "OrangeFS"),
    (0xAAD7_AAEA, "PanFS"),
    (0x786F_4256, "vboxsf"),
    (0xBACB_ACBC, "vmhgfs"),
    (0x7C7C_6673, "prl_fs"),
];

/// Types in mountinfo that statfs(2) reports as FUSE.
const SHARED_FUSE_TYPES: [&str; 26] = [
    "virtiofs",
    "fuse.beegfs",
    "fuse.blobfuse",
    "fuse.blobfuse2",
    "fuse.ceph",
    "fuse.ceph-fuse",
    "fuse.curlftpfs",
    "fuse.davfs",
    "fuse.gcsfuse",
    "fuse.gfs",
    "fuse.glusterfs",
    "fuse.goofys",
    "fuse.hdfs",
    "fuse.juicefs",
    "fuse.lizardfs",
    "fuse.mfs",
    "fuse.mount-s3",
    "fuse.mountpoint-s3",
    "fuse.rclone",
    "fuse.s3fs",
    "fuse.saunafs",
    "fuse.seaweedfs",
    "fuse.smbnetfs",
    "fuse.sshfs",
    "fuse.vmhgfs-fuse",
    "fuse.weed",
];

/// Refuses a directory of a repository on a file system that several hosts can mount.
///
/// # Errors
/// `Unsupported`, with the reason. If the operating system does not report the type, the directory
/// is allowed: opening it shows the fault.
pub(crate) fn refuse_shared(directory: &Path) -> Result<()> {
    let Ok(facts) = rustix::fs::statfs(directory) else { return Ok(()) };
    // Some architectures have a signed type of 32 bits, others one of 64.
    let number = facts.f_type as u32;
    let shared = match number {
        FUSE => fuse_type(directory).filter(|name| is_shared_fuse(name)),
        _ => shared_type(number).map(str::to_owned),
    };
    let Some(name) = shared else { return Ok(()) };
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "{} lies on {name}, a file system that several hosts can mount: locks may end at this \
             host and mapped pages go stale, so a repository there would lose flushed writes. Put \
             the repository on a local file system (a block device from the network is one, too)",
            directory.display()
        ),
    ))
}

fn shared_type(number: u32) -> Option<&'static str> {
    SHARED_TYPES.iter().find(|(shared, _)| *shared == number).map(|(_, name)| *name)
}

fn is_shared_fuse(name: &str) -> bool {
    SHARED_FUSE_TYPES.contains(&name)
}

/// The type of the mount that holds `directory`, from mountinfo.
fn fuse_type(directory: &Path) -> Option<String> {
    let device = std::fs::metadata(directory).ok()?.dev();
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    type_of_device(&std::fs::read_to_string("/proc/self/mountinfo").ok()?, &device)
}

/// In `36 35 0:31 / /mnt rw,noatime shared:1 - fuse.sshfs host:/ rw`, the third word is the device,
/// and the first word after ` - ` is the type.
fn type_of_device(mounts: &str, device: &str) -> Option<String> {
    let mut mounts = mounts.lines().filter(|line| line.split(' ').nth(2) == Some(device));
    let (_, after) = mounts.next()?.split_once(" - ")?;
    Some(after.split(' ').next()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_of_several_hosts_are_refused_and_local_ones_are_not() {
        for number in [0x6969, 0xFE53_4D42, 0xFF53_4D42, 0x00C3_6400, 0x0116_1970, 0x7461_636F] {
            assert!(shared_type(number).is_some(), "{number:#x}");
        }
        // ext4, XFS, Btrfs, tmpfs, ZFS, overlayfs, F2FS, bcachefs, and an unknown one.
        for number in [
            0xEF53,
            0x5846_5342,
            0x9123_683E,
            0x0102_1994,
            0x2FC1_2FC1,
            0x794C_7630,
            0xF2F5_2010,
            0xCA45_1A4E,
            0x1234_5678,
        ] {
            assert_eq!(shared_type(number), None, "{number:#x}");
        }
        for name in ["fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "virtiofs"] {
            assert!(is_shared_fuse(name), "{name}");
        }
        for name in ["fuse", "fuseblk", "fuse.bindfs", "fuse.mergerfs", "fuse.gocryptfs"] {
            assert!(!is_shared_fuse(name), "{name}");
        }
    }

    #[test]
    fn the_type_of_a_mount_is_found_by_its_device() {
        let mounts = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
                      36 22 0:31 / /mnt/a\\040-\\040b rw shared:2 master:1 - fuse.sshfs host:/ rw\n\
                      37 22 0:32 / /mnt/c rw - virtiofs share rw\n";
        for (device, name) in [
            ("8:1", Some("ext4")),
            ("0:31", Some("fuse.sshfs")),
            ("0:32", Some("virtiofs")),
            ("0:3", None),
        ] {
            assert_eq!(type_of_device(mounts, device).as_deref(), name, "{device}");
        }
    }
}
