//! The footer of every VHD ("Hard Disk Footer Format").

use super::geometry::geometry;
use super::{SECTOR_BYTES, checksum};
use crate::DiskShape;
use crate::fields::put;
use crate::identity::Purpose;

/// Bytes in a footer.
pub(super) const FOOTER_BYTES: usize = 512;

/// "Disk type".
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskType {
    Fixed = 2,
    Dynamic = 3,
}

/// Seconds from 1970 to 2000, where VHD's time begins.
const VHD_EPOCH_UNIX_SECONDS: u64 = 946_684_800;

/// `win `, not our own name: for an unknown creator QEMU computes the size from
/// the geometry, which is smaller than the disk.
const CREATOR_APPLICATION: &[u8; 4] = b"win ";
/// Windows 10.0, as Hyper-V writes it.
const CREATOR_VERSION: u32 = 0x000a_0000;
const CREATOR_HOST_OS: &[u8; 4] = b"Wi2k";
/// "Reserved": always set.
const FEATURES: u32 = 2;
const VERSION: u32 = 0x0001_0000;

pub(super) fn footer(disk: &DiskShape, disk_type: DiskType) -> [u8; FOOTER_BYTES] {
    let size_bytes = disk.shown_bytes().to_be_bytes();
    let geometry = geometry(disk.shown_bytes() / SECTOR_BYTES);
    let next_structure =
        if disk_type == DiskType::Dynamic { FOOTER_BYTES as u64 } else { u64::MAX };
    let created = disk.identity.created_unix_seconds.saturating_sub(VHD_EPOCH_UNIX_SECONDS);
    let created = u32::try_from(created).unwrap_or(u32::MAX);

    let mut footer = [0; FOOTER_BYTES];
    put(&mut footer, 0, b"conectix");
    put(&mut footer, 8, FEATURES.to_be_bytes());
    put(&mut footer, 12, VERSION.to_be_bytes());
    put(&mut footer, 16, next_structure.to_be_bytes());
    put(&mut footer, 24, created.to_be_bytes());
    put(&mut footer, 28, CREATOR_APPLICATION);
    put(&mut footer, 32, CREATOR_VERSION.to_be_bytes());
    put(&mut footer, 36, CREATOR_HOST_OS);
    put(&mut footer, 40, size_bytes);
    put(&mut footer, 48, size_bytes);
    put(&mut footer, 56, geometry.cylinders.to_be_bytes());
    put(&mut footer, 58, [geometry.heads, geometry.sectors_per_track]);
    put(&mut footer, 60, (disk_type as u32).to_be_bytes());
    put(&mut footer, 68, disk.identity.uuid(Purpose::VhdUnique));
    let sum = checksum(&footer);
    put(&mut footer, 64, sum);
    footer
}
