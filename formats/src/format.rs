//! The formats by name, and the operations that each supports.

use std::fmt;
use std::str::FromStr;

use crate::{DiskShape, Error, MAX_DISK_SIZE_BYTES, Result, SectorSize};

/// How an image of a format can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Served as a file that clients can write; the file is as large as the
    /// disk.
    Writable,
    /// Served as a file that clients can read; it omits empty blocks.
    ReadOnly,
    /// Written sequentially and compressed; never served.
    Streamed,
}

/// A format in which a disk is presented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The disk's bytes.
    Raw,
    /// Fixed VHD.
    Vhd,
    /// Dynamic VHD.
    VhdDynamic,
    /// VHDX with every block present.
    Vhdx,
    /// VHDX with present and absent blocks.
    VhdxDynamic,
    /// Flat VMDK for ESXi: a `vmfs` descriptor and a raw file.
    Vmdk,
    /// Flat VMDK for all other products: a `monolithicFlat` descriptor and a raw
    /// file.
    VmdkHosted,
    /// Sparse VMDK in one file (`monolithicSparse`).
    VmdkSparse,
    /// Compressed VMDK as in an OVA (`streamOptimized`).
    VmdkStream,
    /// qcow2 with every cluster allocated.
    Qcow2,
    /// qcow2 with allocated and absent clusters.
    Qcow2Sparse,
    /// qcow2 metadata over an external raw file.
    Qcow2External,
}

impl Format {
    /// Length in bytes of the start of the disk that [`Format::check_start`] examines.
    pub const START_BYTES: usize = 8;

    /// Every format.
    pub const ALL: [Format; 12] = [
        Format::Raw,
        Format::Vhd,
        Format::VhdDynamic,
        Format::Vhdx,
        Format::VhdxDynamic,
        Format::Vmdk,
        Format::VmdkHosted,
        Format::VmdkSparse,
        Format::VmdkStream,
        Format::Qcow2,
        Format::Qcow2Sparse,
        Format::Qcow2External,
    ];

    /// The name that a user types. The plain word means the compact form: one
    /// file without empty blocks, as other tools write under that word.
    pub const fn word(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Vhd => "vhd-fixed",
            Format::VhdDynamic => "vhd",
            Format::Vhdx => "vhdx-fixed",
            Format::VhdxDynamic => "vhdx",
            Format::Vmdk => "vmdk-esxi",
            Format::VmdkHosted => "vmdk-hosted",
            Format::VmdkSparse => "vmdk",
            Format::VmdkStream => "vmdk-stream",
            Format::Qcow2 => "qcow2-full",
            Format::Qcow2Sparse => "qcow2",
            Format::Qcow2External => "qcow2-external",
        }
    }

    /// A short description for help texts.
    pub const fn summary(self) -> &'static str {
        match self {
            Format::Raw => "the disk's bytes",
            Format::Vhd => "fixed VHD",
            Format::VhdDynamic => "dynamic VHD",
            Format::Vhdx => "VHDX with every block present",
            Format::VhdxDynamic => "dynamic VHDX",
            Format::Vmdk => "flat VMDK for ESXi: a descriptor and NAME-flat.vmdk",
            Format::VmdkHosted => {
                "flat VMDK for all but ESXi: a descriptor and NAME-flat.vmdk (monolithicFlat)"
            }
            Format::VmdkSparse => "sparse VMDK in one file (monolithicSparse)",
            Format::VmdkStream => "compressed VMDK, as in an OVA (streamOptimized)",
            Format::Qcow2 => "qcow2 with every cluster allocated",
            Format::Qcow2Sparse => "qcow2",
            Format::Qcow2External => "qcow2 metadata over NAME.raw (data_file_raw)",
        }
    }

    /// The suffix of an image's name in the served tree, with the leading dot.
    /// Each format has its own.
    pub const fn suffix(self) -> &'static str {
        match self {
            Format::Raw => ".raw",
            Format::Vhd => ".vhd",
            Format::VhdDynamic => ".dynamic.vhd",
            Format::Vhdx => ".vhdx",
            Format::VhdxDynamic => ".dynamic.vhdx",
            Format::Vmdk => ".vmdk",
            Format::VmdkHosted => ".hosted.vmdk",
            Format::VmdkSparse => ".sparse.vmdk",
            Format::VmdkStream => ".stream.vmdk",
            Format::Qcow2 => ".qcow2",
            Format::Qcow2Sparse => ".sparse.qcow2",
            Format::Qcow2External => ".external.qcow2",
        }
    }

    /// The format for a file name: the one with the longest matching suffix.
    pub fn of_file_name(name: &str) -> Option<Format> {
        let fits = Format::ALL.into_iter().filter(|format| name.ends_with(format.suffix()));
        fits.max_by_key(|format| format.suffix().len())
    }

    /// Whether readers also examine the disk's first [`Format::START_BYTES`] bytes.
    pub fn depends_on_start(self) -> bool {
        self == Format::Vhd
    }

    /// Checks the first bytes of the disk. QEMU looks for the header of a dynamic VHD
    /// there, whatever the footer says.
    ///
    /// # Errors
    /// `MistakenStart`.
    pub fn check_start(self, start: &[u8]) -> Result<()> {
        if self.depends_on_start() && start.starts_with(b"conectix") {
            Err(Error::MistakenStart { format: self })
        } else {
            Ok(())
        }
    }

    /// How an image of this format can be used.
    pub const fn access(self) -> Access {
        match self {
            Format::Raw
            | Format::Vhd
            | Format::Vhdx
            | Format::Vmdk
            | Format::VmdkHosted
            | Format::Qcow2
            | Format::Qcow2External => Access::Writable,
            Format::VhdDynamic | Format::VhdxDynamic | Format::VmdkSparse | Format::Qcow2Sparse => {
                Access::ReadOnly
            }
            Format::VmdkStream => Access::Streamed,
        }
    }

    /// True when empty blocks take no space in the image.
    pub fn is_compact(self) -> bool {
        self.access() != Access::Writable
    }

    /// The largest disk that the format holds, in bytes. Compact VMDKs also end
    /// where the stored part of the disk reaches 2 TiB.
    pub const fn largest_disk_bytes(self) -> u64 {
        match self {
            // Microsoft VHD specification, "Current size": 2040 GiB.
            Format::Vhd | Format::VhdDynamic => 2040 << 30,
            // The largest that ESXi 5.5 and later open (VMware KB 2058287).
            Format::Vmdk => 62 << 40,
            Format::Raw
            | Format::Vhdx
            | Format::VhdxDynamic
            | Format::VmdkHosted
            | Format::VmdkSparse
            | Format::VmdkStream
            | Format::Qcow2
            | Format::Qcow2Sparse
            | Format::Qcow2External => MAX_DISK_SIZE_BYTES,
        }
    }

    /// Whether an image of this format supports this sector size. VHD and VMDK
    /// count in sectors of 512 bytes; raw and qcow2 leave the sector size to the
    /// machine's configuration.
    pub const fn holds(self, sector_size: SectorSize) -> bool {
        match sector_size {
            SectorSize::B512 => true,
            SectorSize::B4096 => matches!(
                self,
                Format::Raw
                    | Format::Vhdx
                    | Format::VhdxDynamic
                    | Format::Qcow2
                    | Format::Qcow2Sparse
                    | Format::Qcow2External
            ),
        }
    }

    /// Whether the format can hold a disk of 0 bytes.
    pub(crate) const fn holds_nothing(self) -> bool {
        matches!(self, Format::Raw | Format::Qcow2 | Format::Qcow2Sparse | Format::Qcow2External)
    }

    /// Checks the size and the sector size as [`Presentation::new`] does,
    /// without building an image.
    ///
    /// [`Presentation::new`]: crate::Presentation::new
    pub fn check(self, disk: &DiskShape) -> Result<()> {
        let (size_bytes, limit_bytes) = (disk.size_bytes, self.largest_disk_bytes());
        if !self.holds(disk.sector_size) {
            return Err(Error::SectorSize { format: self, sector_size: disk.sector_size });
        }
        if size_bytes > limit_bytes {
            return Err(Error::DiskTooLarge { format: self, size_bytes, limit_bytes });
        }
        if size_bytes == 0 && !self.holds_nothing() {
            return Err(Error::DiskEmpty { format: self });
        }
        Ok(())
    }

    /// Formats that hold larger disks.
    pub(crate) const fn larger_alternative(self) -> &'static str {
        match self {
            Format::Vhd => Format::Vhdx.word(),
            Format::VhdDynamic => Format::VhdxDynamic.word(),
            Format::Vmdk | Format::VmdkSparse | Format::VmdkStream => "vmdk-hosted or vhdx",
            _ => "several disks",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Format {
    type Err = Error;
    fn from_str(word: &str) -> Result<Self> {
        let found = Format::ALL.into_iter().find(|format| format.word() == word);
        found.ok_or_else(|| Error::UnknownFormat { word: word.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Identity;

    fn disk(size_bytes: u64) -> DiskShape {
        DiskShape::new(size_bytes, Identity { seed: [0; 32], created_unix_seconds: 0 })
    }

    #[test]
    fn words_and_file_names_are_parsed_to_their_format() {
        for format in Format::ALL {
            assert_eq!(format.word().parse(), Ok(format));
            assert_eq!(Format::of_file_name(&format!("vda{}", format.suffix())), Some(format));
        }
        assert_eq!(Format::of_file_name("vda.iso"), None);
        assert!("VHDX".parse::<Format>().is_err());
    }

    #[test]
    fn a_vhd_ends_at_2040_gib() {
        let limit = 2040 << 30;
        assert_eq!(Format::Vhd.check(&disk(limit)), Ok(()));
        let refused = Format::Vhd.check(&disk(limit + 1)).unwrap_err();
        assert!(refused.to_string().contains("2040 GiB"), "{refused}");
        assert!(refused.to_string().contains("use vhdx"), "{refused}");
    }

    #[test]
    fn some_formats_refuse_4k_sectors_and_empty_disks() {
        let big_sectors = DiskShape { sector_size: SectorSize::B4096, ..disk(4096) };
        for format in [Format::Vhd, Format::Vmdk, Format::VmdkStream] {
            assert!(matches!(format.check(&big_sectors), Err(Error::SectorSize { .. })));
            assert_eq!(format.check(&disk(0)), Err(Error::DiskEmpty { format }));
        }
        assert_eq!(Format::Vhdx.check(&big_sectors), Ok(()));
        assert_eq!(Format::Raw.check(&disk(0)), Ok(()));
    }
}
