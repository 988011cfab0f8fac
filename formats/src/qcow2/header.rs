//! The header of a qcow2 image and its extensions.

use super::ClusterSize;
use crate::fields::put;

const MAGIC: &[u8; 4] = b"QFI\xfb";
const VERSION: u32 = 3;
const HEADER_BYTES: usize = 104;
/// "incompatible_features" bit 2: the data is in another file.
const EXTERNAL_DATA_FILE: u64 = 1 << 2;
/// "autoclear_features" bit 1: that file is a raw image of the disk.
const RAW_EXTERNAL_DATA: u64 = 1 << 1;
/// The extension "external data file name string".
const DATA_FILE_NAME: u32 = 0x4441_5441;
/// The refcounts' width is 2 to this power in bits.
const REFCOUNT_ORDER: u32 = 4;

/// The header fields that differ from disk to disk.
pub(super) struct Header<'a> {
    pub(super) cluster: ClusterSize,
    /// The raw file with the disk, if it is a separate file.
    pub(super) data_file: Option<&'a str>,
    pub(super) size_bytes: u64,
    pub(super) l1_entries: u32,
    pub(super) l1_offset_bytes: u64,
    pub(super) refcount_table_clusters: u32,
}

/// The header with its extensions; shorter than a cluster.
pub(super) fn header(of: &Header) -> Vec<u8> {
    let mut header = vec![0; HEADER_BYTES];
    put(&mut header, 0, MAGIC);
    put(&mut header, 4, VERSION.to_be_bytes());
    put(&mut header, 20, of.cluster.bits.to_be_bytes());
    put(&mut header, 24, of.size_bytes.to_be_bytes());
    put(&mut header, 36, of.l1_entries.to_be_bytes());
    put(&mut header, 40, of.l1_offset_bytes.to_be_bytes());
    // The refcount table follows the header's cluster.
    put(&mut header, 48, of.cluster.bytes().to_be_bytes());
    put(&mut header, 56, of.refcount_table_clusters.to_be_bytes());
    put(&mut header, 96, REFCOUNT_ORDER.to_be_bytes());
    put(&mut header, 100, (HEADER_BYTES as u32).to_be_bytes());
    if let Some(name) = of.data_file {
        put(&mut header, 72, EXTERNAL_DATA_FILE.to_be_bytes());
        put(&mut header, 88, RAW_EXTERNAL_DATA.to_be_bytes());
        header.extend_from_slice(&DATA_FILE_NAME.to_be_bytes());
        // At most 1023 bytes: see `Names`.
        header.extend_from_slice(&(name.len() as u32).to_be_bytes());
        header.extend_from_slice(name.as_bytes());
        header.resize(header.len().next_multiple_of(8), 0);
    }
    // The end of the extensions: type 0, length 0.
    header.extend_from_slice(&[0; 8]);
    header
}
