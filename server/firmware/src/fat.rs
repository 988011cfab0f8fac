//! Lists folders of a FAT file system. It is hostile: every size is bounded, and a folder whose clusters form a ring
//! ends after [`MAX_FOLDER_BYTES`].

use coldrise_block::{Disk, Result};

use super::partitions::{u16_at, u32_at};

/// Maximum length of a folder that is read, in bytes; the rest is ignored.
const MAX_FOLDER_BYTES: u64 = 256 << 10;
/// Maximum length of a long name, in UTF-16 units.
const MAX_NAME_UNITS: usize = 255;
const ENTRY_BYTES: usize = 32;
const IS_FOLDER: u8 = 0x10;
const IS_LABEL: u8 = 0x08;
const IS_LONG_NAME: u8 = 0x0f;

/// An opened file system.
pub(super) struct Fat<'d> {
    disk: &'d dyn Disk,
    /// Where the partition begins on the disk, in bytes.
    start: u64,
    kind: Kind,
    cluster_bytes: u64,
    /// The offset of the first table, from the partition's start, in bytes.
    table: u64,
    root: Folder,
    /// Of cluster 2, from the partition's start, in bytes.
    clusters: u64,
    count: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Fat12,
    Fat16,
    Fat32,
}

/// Where a folder lies.
#[derive(Clone, Copy)]
pub(super) enum Folder {
    /// The root of FAT12 and FAT16: offset from the partition's start and length, in bytes.
    Fixed(u64, u64),
    Cluster(u32),
}

pub(super) struct Entry {
    pub(super) name: String,
    /// `None` for a file.
    pub(super) folder: Option<Folder>,
}

impl<'d> Fat<'d> {
    /// `None` if no FAT file system begins there.
    ///
    /// # Errors
    /// Those of reading the disk.
    pub(super) fn open(disk: &'d dyn Disk, start: u64) -> Result<Option<Fat<'d>>> {
        let mut boot = [0_u8; 512];
        if start.checked_add(512).is_none_or(|end| end > disk.size_bytes()) {
            return Ok(None);
        }
        disk.read_at(&mut boot, start)?;
        let byte = |at: usize| u64::from(boot.get(at).copied().unwrap_or(0));
        let sector = u64::from(u16_at(&boot, 11));
        let (per_cluster, tables) = (byte(13), byte(16));
        let is_fat = boot.get(510..) == Some(&[0x55, 0xaa])
            && [512, 1024, 2048, 4096].contains(&sector)
            && per_cluster.is_power_of_two()
            && (1..=2).contains(&tables);
        if !is_fat {
            return Ok(None);
        }
        let either = |short: usize, long: usize| match u16_at(&boot, short) {
            0 => u64::from(u32_at(&boot, long)),
            short => u64::from(short),
        };
        let (reserved, roots) = (u64::from(u16_at(&boot, 14)), u64::from(u16_at(&boot, 17)));
        let (sectors, table_sectors) = (either(19, 32), either(22, 36));
        let root_at = reserved + tables * table_sectors;
        let root_bytes = roots * ENTRY_BYTES as u64;
        let data = root_at + root_bytes.div_ceil(sector);
        let Some(of_data) = sectors.checked_sub(data) else { return Ok(None) };
        let count = u32::try_from(of_data / per_cluster).unwrap_or(u32::MAX);
        let kind = match count {
            0..4085 => Kind::Fat12,
            4085..65525 => Kind::Fat16,
            _ => Kind::Fat32,
        };
        Ok(Some(Fat {
            disk,
            start,
            kind,
            cluster_bytes: per_cluster * sector,
            table: reserved * sector,
            root: match kind {
                Kind::Fat32 => Folder::Cluster(u32_at(&boot, 44)),
                _ => Folder::Fixed(root_at * sector, root_bytes),
            },
            clusters: data * sector,
            count,
        }))
    }

    /// The root folder.
    pub(super) fn root(&self) -> Folder {
        self.root
    }

    /// The entries of a folder.
    ///
    /// # Errors
    /// Those of reading the disk.
    pub(super) fn list(&self, folder: Folder) -> Result<Vec<Entry>> {
        let mut stored = Vec::new();
        match folder {
            Folder::Fixed(at, length) => {
                self.append(&mut stored, at, length.min(MAX_FOLDER_BYTES))?
            }
            Folder::Cluster(mut cluster) => {
                while (2..self.count.saturating_add(2)).contains(&cluster)
                    && (stored.len() as u64) < MAX_FOLDER_BYTES
                {
                    let at = self.clusters + u64::from(cluster - 2) * self.cluster_bytes;
                    self.append(&mut stored, at, self.cluster_bytes)?;
                    cluster = self.next(cluster)?;
                }
            }
        }
        Ok(entries(&stored))
    }

    /// Appends bytes of the partition. A file system that is larger than the disk ends there.
    fn append(&self, stored: &mut Vec<u8>, at: u64, length: u64) -> Result<()> {
        let start = self.start.saturating_add(at);
        let length = length.min(self.disk.size_bytes().saturating_sub(start));
        let from = stored.len();
        stored.resize(from + usize::try_from(length).unwrap_or(0), 0);
        self.disk.read_at(stored.get_mut(from..).unwrap_or_default(), start)
    }

    /// The cluster after one; any number beyond the last cluster ends a folder.
    fn next(&self, cluster: u32) -> Result<u32> {
        let cluster_at = u64::from(cluster);
        let (at, width) = match self.kind {
            Kind::Fat12 => (cluster_at + cluster_at / 2, 2),
            Kind::Fat16 => (cluster_at * 2, 2),
            Kind::Fat32 => (cluster_at * 4, 4),
        };
        let mut stored = Vec::new();
        self.append(&mut stored, self.table + at, width)?;
        let short = u32::from(u16_at(&stored, 0));
        Ok(match self.kind {
            Kind::Fat12 if cluster % 2 == 1 => short >> 4,
            Kind::Fat12 => short & 0xfff,
            Kind::Fat16 => short,
            Kind::Fat32 => u32_at(&stored, 0) & 0x0fff_ffff,
        })
    }
}

/// The entries in the bytes of a folder. A long name stands before its entry, its last part first.
fn entries(stored: &[u8]) -> Vec<Entry> {
    let mut found = Vec::new();
    let mut long: Vec<u16> = Vec::new();
    for entry in stored.chunks_exact(ENTRY_BYTES) {
        let (first, kind) =
            (entry.first().copied().unwrap_or(0), entry.get(11).copied().unwrap_or(0));
        match (first, kind) {
            (0, _) => break,
            (0xe5, _) => long.clear(),
            (_, IS_LONG_NAME) => {
                if first & 0x40 != 0 || long.len() > MAX_NAME_UNITS {
                    long.clear();
                }
                let parts = [1..11, 14..26, 28..32];
                let part = parts
                    .into_iter()
                    .flat_map(|part| entry.get(part).unwrap_or_default().chunks_exact(2));
                long.splice(0..0, part.map(|unit| u16_at(unit, 0)));
            }
            (_, kind) if kind & IS_LABEL != 0 => long.clear(),
            _ => {
                let units = long.iter().copied().take_while(|unit| *unit != 0);
                let name: String =
                    char::decode_utf16(units).map(|c| c.unwrap_or('\u{fffd}')).collect();
                long.clear();
                let name = if name.is_empty() { short_name(entry) } else { name };
                let cluster = u32::from(u16_at(entry, 20)) << 16 | u32::from(u16_at(entry, 26));
                if name != "." && name != ".." {
                    let folder = (kind & IS_FOLDER != 0).then_some(Folder::Cluster(cluster));
                    found.push(Entry { name, folder });
                }
            }
        }
    }
    found
}

/// `GRUBX64 EFI` is GRUBX64.EFI, unless Windows' flags say that the name or the extension is in small letters.
fn short_name(entry: &[u8]) -> String {
    let flags = entry.get(12).copied().unwrap_or(0);
    let text = |part: std::ops::Range<usize>, small: u8| {
        let bytes = entry.get(part).unwrap_or_default();
        let text = String::from_utf8_lossy(bytes).trim_end().to_owned();
        if flags & small != 0 { text.to_ascii_lowercase() } else { text }
    };
    match (text(0..8, 0x08), text(8..11, 0x10)) {
        (name, extension) if extension.is_empty() => name,
        (name, extension) => format!("{name}.{extension}"),
    }
}
