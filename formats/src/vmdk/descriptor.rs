//! The text that describes a VMDK ("The Descriptor File").

use std::fmt::Write;

use super::sectors;
use crate::identity::Purpose;
use crate::{Adapter, DiskShape, Identity};

/// The type of the image and of its one extent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// A raw file on an ESXi datastore; ESXi boots no other type.
    Vmfs,
    /// A raw file, for all products but ESXi.
    MonolithicFlat,
    /// The file that contains the descriptor.
    MonolithicSparse,
    /// The same, compressed.
    StreamOptimized,
}

/// Hardware version 13, ESXi 6.5: every product that is still supported accepts
/// it.
const VIRTUAL_HARDWARE_VERSION: &str = "13";

/// The descriptor of a disk whose one extent is in the file `file_name`.
pub(super) fn text(extent: Extent, file_name: &str, disk: &DiskShape) -> String {
    let (create_type, kind, offset) = match extent {
        Extent::Vmfs => ("vmfs", "VMFS", ""),
        Extent::MonolithicFlat => ("monolithicFlat", "FLAT", " 0"),
        Extent::MonolithicSparse => ("monolithicSparse", "SPARSE", ""),
        Extent::StreamOptimized => ("streamOptimized", "SPARSE", ""),
    };
    let content = content_id(&disk.identity);
    let total = sectors(disk.shown_bytes());
    let geometry = geometry(disk.adapter, total);
    let mut text = format!(
        "# Disk DescriptorFile\n\
         version=1\n\
         encoding=\"UTF-8\"\n\
         CID={}\n\
         parentCID=ffffffff\n\
         isNativeSnapshot=\"no\"\n\
         createType=\"{create_type}\"\n\
         \n\
         # Extent description\n\
         RW {total} {kind} \"{file_name}\"{offset}\n\
         \n\
         # The Disk Data Base\n\
         #DDB\n\
         \n",
        &content[24..]
    );
    let mut entry = |key: &str, value: &str| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "ddb.{key} = \"{value}\"");
    };
    entry("adapterType", adapter_word(disk.adapter));
    entry("geometry.cylinders", &geometry.cylinders.to_string());
    entry("geometry.heads", &geometry.heads.to_string());
    entry("geometry.sectors", &geometry.sectors_per_track.to_string());
    entry("longContentID", &content);
    if extent == Extent::Vmfs {
        entry("thinProvisioned", "1");
    }
    entry("uuid", &uuid(&disk.identity));
    entry("virtualHWVersion", VIRTUAL_HARDWARE_VERSION);
    text
}

/// The long content id, 32 digits. Its last eight are the CID, which avoids the
/// two reserved values: "no parent" and the value next to it.
fn content_id(identity: &Identity) -> String {
    let mut bytes = identity.bytes(Purpose::VmdkContent);
    bytes[12] &= 0x7f;
    hex(&bytes, "", "")
}

/// 16 bytes as VMware writes them: `60 00 C2 9…-…`, VMware's own NAA identifier,
/// which becomes the disk's serial number.
fn uuid(identity: &Identity) -> String {
    let mut bytes = identity.bytes(Purpose::VmdkUuid);
    bytes[..3].copy_from_slice(&[0x60, 0x00, 0xc2]);
    bytes[3] = 0x90 | bytes[3] & 0x0f;
    format!("{}-{}", hex(&bytes[..8], " ", ""), hex(&bytes[8..], " ", ""))
}

fn hex(bytes: &[u8], between: &str, before: &str) -> String {
    let digits: Vec<_> = bytes.iter().map(|byte| format!("{before}{byte:02x}")).collect();
    digits.join(between)
}

const fn adapter_word(adapter: Adapter) -> &'static str {
    match adapter {
        Adapter::Ide => "ide",
        Adapter::BusLogic => "buslogic",
        Adapter::LsiLogic => "lsilogic",
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Geometry {
    cylinders: u64,
    heads: u64,
    sectors_per_track: u64,
}

/// IDE's geometry ends at 16383 cylinders. A SCSI adapter's depends on the size,
/// to keep the number of cylinders in range.
fn geometry(adapter: Adapter, total_sectors: u64) -> Geometry {
    const GIB_SECTORS: u64 = 1 << 21;
    let (heads, sectors_per_track) = match adapter {
        Adapter::Ide => (16, 63),
        _ if total_sectors < GIB_SECTORS => (64, 32),
        _ if total_sectors < 2 * GIB_SECTORS => (128, 32),
        _ => (255, 63),
    };
    let cylinders = (total_sectors / (heads * sectors_per_track)).max(1);
    let cylinders = if adapter == Adapter::Ide { cylinders.min(16383) } else { cylinders };
    Geometry { cylinders, heads, sectors_per_track }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> DiskShape {
        DiskShape::new(3 << 30, Identity { seed: [1; 32], created_unix_seconds: 0 })
    }

    fn value<'a>(text: &'a str, key: &str) -> &'a str {
        let line = text.lines().find(|line| line.starts_with(key)).unwrap();
        line[key.len()..].trim_start_matches([' ', '=']).trim_matches('"')
    }

    #[test]
    fn the_content_id_ends_with_the_cid() {
        let text = text(Extent::Vmfs, "vda-flat.vmdk", &disk());
        let content = value(&text, "ddb.longContentID");
        assert_eq!(content.len(), 32);
        assert!(content.ends_with(value(&text, "CID")));
        assert!(text.contains("\nRW 6291456 VMFS \"vda-flat.vmdk\"\n"));
    }

    #[test]
    fn the_uuid_has_the_form_of_vmware() {
        let text = text(Extent::MonolithicFlat, "vda-flat.vmdk", &disk());
        let uuid = value(&text, "ddb.uuid");
        assert!(uuid.starts_with("60 00 c2 9") && uuid.len() == 47 && &uuid[23..24] == "-");
        assert!(text.contains(" FLAT \"vda-flat.vmdk\" 0\n"));
    }

    #[test]
    fn geometries_follow_the_adapter() {
        let of = |adapter, total| {
            let found = geometry(adapter, total);
            (found.cylinders, found.heads, found.sectors_per_track)
        };
        assert_eq!(of(Adapter::Ide, 1 << 40), (16383, 16, 63));
        assert_eq!(of(Adapter::LsiLogic, 2048), (1, 64, 32));
        assert_eq!(of(Adapter::LsiLogic, 3 << 20), (768, 128, 32));
        assert_eq!(of(Adapter::BusLogic, 8 << 21), (1044, 255, 63));
    }
}
