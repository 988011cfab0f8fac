//! The properties of a disk that a layout needs.

use crate::Identity;

/// Bytes in a logical sector, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SectorSize {
    /// 512-byte logical sectors. Formats that store a physical sector size
    /// (VHDX) store 4096 bytes: 512e.
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

/// The virtual adapter that a VMDK descriptor names. Most products use the
/// machine's configuration instead; some refuse a descriptor without an
/// adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Adapter {
    /// `ide`
    Ide,
    /// `buslogic`
    BusLogic,
    /// `lsilogic`: right for every SCSI, SAS, SATA and NVMe adapter.
    LsiLogic,
}

/// The properties of a disk that a layout depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskShape {
    /// Size of the disk in bytes; any number up to
    /// [`MAX_DISK_SIZE_BYTES`](crate::MAX_DISK_SIZE_BYTES). An image rounds it
    /// up to whole sectors, with zeroes after the disk's end.
    pub size_bytes: u64,
    /// Logical sector size.
    pub sector_size: SectorSize,
    /// The source of the image's ids.
    pub identity: Identity,
    /// The adapter that VMDK descriptors name.
    pub adapter: Adapter,
}

impl DiskShape {
    /// A disk with 512-byte sectors on an LSI Logic adapter.
    pub fn new(size_bytes: u64, identity: Identity) -> Self {
        let (sector_size, adapter) = (SectorSize::B512, Adapter::LsiLogic);
        DiskShape { size_bytes, sector_size, identity, adapter }
    }

    /// The size that an image shows: the disk's size, rounded up to whole
    /// sectors.
    pub fn shown_bytes(&self) -> u64 {
        self.size_bytes.next_multiple_of(self.sector_size.bytes())
    }
}
