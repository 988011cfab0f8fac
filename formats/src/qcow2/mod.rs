//! qcow2, with every cluster allocated or over an external raw file.
//!
//! Source: QEMU, docs/interop/qcow2.rst. All numbers are big endian; everything
//! begins at a cluster of 2 MiB, the largest that there is.
//!
//! ```text
//! allocated   header | refcount table | refcount blocks | L1 | L2 tables | disk
//! external    header | refcount table | refcount blocks | L1 | L2 tables
//! ```
//!
//! # What a writer does to the tables
//!
//! With every cluster allocated and its refcount 1, writes go to where the data
//! is. Two requests do not. For "write zeroes" over whole clusters QEMU sets a
//! flag in the L2 table and leaves the old bytes where they are, for `discard`
//! it frees clusters and later puts other data into them (in version 2 it does
//! so for both). Raw, VHDX and all other presentations would go on showing the
//! old bytes, or show new ones at the wrong place.
//!
//! So the tables of an image with the disk inside refuse to be written: such a
//! client gets an error from its next flush, at which nothing that was flushed
//! before is lost. Clusters are as large as can be, because smaller requests
//! are written as data.
//!
//! Over a raw file QEMU keeps the file itself right whatever the tables say
//! (`data_file_raw`), zeroes and discards included. What it writes to the L2
//! tables is dropped: they keep saying that every cluster is at its place, and
//! no flag hides what another presentation writes there later. This is the
//! qcow2 for machines that discard.

mod header;

use crate::layout::{Builder, Table, Width, Writes};
use crate::{DiskShape, Layout};
use header::Header;

const CLUSTER_BITS: u32 = 21;
const CLUSTER_BYTES: u64 = 1 << CLUSTER_BITS;
/// 16 bits, the width that every reader knows.
const REFCOUNTS_PER_BLOCK: u64 = CLUSTER_BYTES / 2;
/// Entries of the refcount table, of L1 and of an L2 table.
const ENTRIES_PER_CLUSTER: u64 = CLUSTER_BYTES / 8;
/// Bit 63 of an L1 or L2 entry: the refcount is exactly one, so a writer may
/// change the cluster in place.
const COPIED: u64 = 1 << 63;

/// The numbers of clusters of everything, and by that its place.
struct Shape {
    refcount_table: u64,
    refcount_blocks: u64,
    l1: u64,
    l2_tables: u64,
    data: u64,
}

impl Shape {
    /// For a disk of so many clusters, of which `data` are in the file.
    fn of(disk_clusters: u64, data: u64) -> Self {
        let l2_tables = disk_clusters.div_ceil(ENTRIES_PER_CLUSTER);
        // Even without entries L1 has a place: QEMU gives an empty disk one entry.
        let l1 = l2_tables.div_ceil(ENTRIES_PER_CLUSTER).max(1);
        let mut shape = Shape { refcount_table: 1, refcount_blocks: 1, l1, l2_tables, data };
        // Refcounts count themselves; each round only grows them, and soon
        // stops: a block counts a million clusters.
        loop {
            let blocks = shape.all().div_ceil(REFCOUNTS_PER_BLOCK);
            let table = blocks.div_ceil(ENTRIES_PER_CLUSTER);
            if (blocks, table) == (shape.refcount_blocks, shape.refcount_table) {
                return shape;
            }
            (shape.refcount_blocks, shape.refcount_table) = (blocks, table);
        }
    }

    fn refcount_blocks_at(&self) -> u64 {
        1 + self.refcount_table
    }

    fn l1_at(&self) -> u64 {
        self.refcount_blocks_at() + self.refcount_blocks
    }

    fn l2_tables_at(&self) -> u64 {
        self.l1_at() + self.l1
    }

    fn data_at(&self) -> u64 {
        self.l2_tables_at() + self.l2_tables
    }

    fn all(&self) -> u64 {
        self.data_at() + self.data
    }
}

/// qcow2 with the disk inside.
pub(crate) fn allocated(disk: &DiskShape) -> Layout {
    let clusters = disk.shown_bytes().div_ceil(CLUSTER_BYTES);
    let shape = Shape::of(clusters, clusters);
    let first = shape.data_at() * CLUSTER_BYTES;
    tables(disk, &shape, None, clusters, first, Writes::Refused)
        .disk(disk.size_bytes)
        .zeroes_to(shape.all() * CLUSTER_BYTES)
        .finish()
}

/// qcow2 over the raw file that its header calls `data_file`.
pub(crate) fn over_raw_file(disk: &DiskShape, data_file: &str) -> Layout {
    let clusters = disk.shown_bytes().div_ceil(CLUSTER_BYTES);
    let shape = Shape::of(clusters, 0);
    tables(disk, &shape, Some(data_file), clusters, 0, Writes::Dropped).finish()
}

/// Header and tables, with cluster 0 of the disk at byte `first` of its file.
fn tables(
    disk: &DiskShape,
    shape: &Shape,
    data_file: Option<&str>,
    clusters: u64,
    first: u64,
    l2_writes: Writes,
) -> Builder {
    let header = header::header(&Header {
        data_file,
        size_bytes: disk.shown_bytes(),
        // 64 TiB have 128 L2 tables and one cluster of refcount table.
        l1_entries: shape.l2_tables.max(1) as u32,
        l1_offset_bytes: shape.l1_at() * CLUSTER_BYTES,
        refcount_table_clusters: shape.refcount_table as u32,
    });
    // A table of one entry per cluster or table, from `first` of the file on.
    let places = |count, first| Table::full(Width::U64Be, count, first, CLUSTER_BYTES);
    let refcount_table = places(shape.refcount_blocks, shape.refcount_blocks_at() * CLUSTER_BYTES);
    let l1 = places(shape.l2_tables, (shape.l2_tables_at() * CLUSTER_BYTES) | COPIED);
    let ones = Table::full(Width::U16Be, shape.all(), 1, 0);
    Builder::writable()
        .bytes(header)
        .zeroes_to(CLUSTER_BYTES)
        .table(shape.refcount_table * CLUSTER_BYTES, refcount_table, Writes::Refused)
        .table(shape.refcount_blocks * CLUSTER_BYTES, ones, Writes::Refused)
        .table(shape.l1 * CLUSTER_BYTES, l1, Writes::Refused)
        .table(shape.l2_tables * CLUSTER_BYTES, places(clusters, first | COPIED), l2_writes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_cover_the_whole_file_and_no_block_is_spare() {
        for clusters in [0, 1, 1048570, 1048571, 1048572, 1048573, 1 << 25] {
            for data in [0, clusters] {
                let shape = Shape::of(clusters, data);
                assert!(shape.refcount_blocks * REFCOUNTS_PER_BLOCK >= shape.all());
                assert!(shape.refcount_table * ENTRIES_PER_CLUSTER >= shape.refcount_blocks);
                assert!((shape.refcount_blocks - 1) * REFCOUNTS_PER_BLOCK < shape.all());
            }
        }
    }
}
