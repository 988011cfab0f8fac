//! What a layout has to know of a disk.

use crate::Identity;

/// Bytes in a logical sector, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SectorSize {
    /// 512-byte logical sectors. Where a format can tell (VHDX), the physical
    /// sector is said to be 4096 bytes: 512e.
    B512,
    /// 4096-byte logical and physical sectors: 4Kn.
    B4096,
}

impl SectorSize {
    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            SectorSize::B512 => 512,
            SectorSize::B4096 => 4096,
        }
    }
}

/// The virtual adapter that a VMDK descriptor names. Most products go by the
/// machine's configuration instead; some refuse a descriptor without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Adapter {
    /// `ide`
    Ide,
    /// `buslogic`
    BusLogic,
    /// `lsilogic`: right for every SCSI, SAS, SATA and NVMe adapter.
    LsiLogic,
}

/// A disk, as far as a layout depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskShape {
    /// Size of the disk in bytes; any number up to
    /// [`MAX_DISK_SIZE_BYTES`](crate::MAX_DISK_SIZE_BYTES). An image shows it
    /// rounded up to whole sectors, with zeroes behind the disk's end.
    pub size_bytes: u64,
    /// Logical sector size.
    pub sector_size: SectorSize,
    /// What the image's ids are derived from.
    pub identity: Identity,
    /// The adapter that VMDK descriptors name.
    pub adapter: Adapter,
}

impl DiskShape {
    /// A disk of 512-byte sectors on an adapter of the LSI Logic kind.
    pub fn new(size_bytes: u64, identity: Identity) -> Self {
        let (sector_size, adapter) = (SectorSize::B512, Adapter::LsiLogic);
        DiskShape { size_bytes, sector_size, identity, adapter }
    }

    /// The size that an image shows: the disk's, rounded up to whole sectors.
    pub fn shown_bytes(&self) -> u64 {
        self.size_bytes.next_multiple_of(self.sector_size.bytes())
    }
}
