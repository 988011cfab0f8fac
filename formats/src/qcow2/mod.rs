//! qcow2 with all clusters allocated, with only the stored clusters, or over an
//! external raw file.
//!
//! Source: QEMU, docs/interop/qcow2.rst. All numbers are big endian; every part
//! begins at a cluster boundary. Clusters have 2 MiB, the maximum, or 64 KiB, QEMU's
//! default, for sparse images, where small clusters omit smaller holes.
//!
//! ```text
//! allocated   header | refcount table | refcount blocks | L1 | L2 tables | disk
//! sparse      header | refcount table | refcount blocks | L1 | L2 tables | clusters
//! external    header | refcount table | refcount blocks | L1 | L2 tables
//! ```
//!
//! # What a writer does to the tables
//!
//! With every cluster allocated and its refcount 1, writes go to the existing data.
//! Two requests do not. For "write zeroes" over whole clusters QEMU sets a flag in
//! the L2 table and leaves the old bytes in place. For `discard` it frees clusters
//! and later stores other data in them. (In version 2 it frees them for both
//! requests.) Raw, VHDX and all other presentations would then show the old bytes,
//! or new bytes at the wrong place.
//!
//! Therefore the tables of an image that contains the disk refuse writes. Such a
//! client gets an error from its next flush; data that was flushed before is not
//! lost. Clusters have the maximum size, because QEMU writes smaller zero requests
//! as data.
//!
//! Over a raw file QEMU updates the file itself whatever the tables say
//! (`data_file_raw`), also for zeroes and discards. Its writes to the L2 tables are
//! discarded: the tables always say that every cluster is at its place, and no flag
//! hides later writes through another presentation. Use this qcow2 for machines that
//! discard.

mod header;

use std::ops::Range;
use std::sync::Arc;

use crate::layout::{Blocks, Builder, Present, Table, Width, Writes};
use crate::{DiskShape, Layout, Result};
use header::Header;

/// Bit 63 of an L1 or L2 entry: the refcount is exactly one, so a writer may
/// change the cluster in place.
const COPIED: u64 = 1 << 63;

/// The cluster size of an image.
#[derive(Clone, Copy)]
struct ClusterSize {
    bits: u32,
}

const LARGE: ClusterSize = ClusterSize { bits: 21 };
const USUAL: ClusterSize = ClusterSize { bits: 16 };

impl ClusterSize {
    const fn bytes(self) -> u64 {
        1 << self.bits
    }

    /// Refcounts have 16 bits, the width that every reader supports.
    const fn refcounts(self) -> u64 {
        self.bytes() / 2
    }

    /// Entries of the refcount table, of L1 and of an L2 table.
    const fn entries(self) -> u64 {
        self.bytes() / 8
    }
}

/// The number of clusters of each part; the places follow from it.
struct Shape {
    cluster: ClusterSize,
    refcount_table: u64,
    refcount_blocks: u64,
    l1: u64,
    l2_tables: u64,
    data: u64,
}

impl Shape {
    /// For a disk of `disk_clusters`, of which `data` are in the file.
    fn of(cluster: ClusterSize, disk_clusters: u64, data: u64) -> Self {
        // Every L2 table has a place, but tables without clusters are not stored.
        let l2_tables = disk_clusters.div_ceil(cluster.entries());
        // L1 has a place even if it is empty: QEMU gives an empty disk one entry.
        let l1 = l2_tables.div_ceil(cluster.entries()).max(1);
        let mut shape =
            Shape { cluster, refcount_table: 1, refcount_blocks: 1, l1, l2_tables, data };
        // Refcounts count themselves. Each round only adds blocks and the loop soon
        // stops: a block counts 32,768 clusters or more.
        loop {
            let blocks = shape.all().div_ceil(cluster.refcounts());
            let table = blocks.div_ceil(cluster.entries());
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

    fn data_at_bytes(&self) -> u64 {
        self.data_at() * self.cluster.bytes()
    }
}

/// qcow2 with the disk inside.
pub(crate) fn allocated(disk: &DiskShape) -> Layout {
    let clusters = disk.shown_bytes().div_ceil(LARGE.bytes());
    let shape = Shape::of(LARGE, clusters, clusters);
    let places = Places { first: shape.data_at_bytes(), present: Arc::new(Present::All(clusters)) };
    tables(Builder::writable(), disk, &shape, None, places, Writes::Refused)
        .disk(disk.size_bytes)
        .zeroes_to(shape.all() * LARGE.bytes())
        .finish()
}

/// qcow2 with only the stored clusters of the disk.
pub(crate) fn sparse(
    disk: &DiskShape,
    stored: impl IntoIterator<Item = Range<u64>>,
) -> Result<Layout> {
    let present = Arc::new(Present::from_stored(disk.size_bytes, USUAL.bytes(), stored)?);
    let shape = Shape::of(USUAL, present.block_count(), present.present_count());
    let places = Places { first: shape.data_at_bytes(), present: present.clone() };
    let blocks = Blocks {
        present,
        block_bytes: USUAL.bytes(),
        lead: Vec::new(),
        disk_bytes: disk.size_bytes,
    };
    let tables = tables(Builder::read_only(), disk, &shape, None, places, Writes::Refused);
    Ok(tables.blocks(blocks).finish())
}

/// qcow2 over the raw file that its header names `data_file`.
pub(crate) fn over_raw_file(disk: &DiskShape, data_file: &str) -> Layout {
    let clusters = disk.shown_bytes().div_ceil(LARGE.bytes());
    let shape = Shape::of(LARGE, clusters, 0);
    let places = Places { first: 0, present: Arc::new(Present::All(clusters)) };
    let builder = Builder::writable();
    tables(builder, disk, &shape, Some(data_file), places, Writes::Dropped).finish()
}

/// The places of the disk's clusters: the first present one is at byte `first` of
/// the file that holds them, and the others follow it.
struct Places {
    first: u64,
    present: Arc<Present>,
}

/// Header and tables.
fn tables(
    builder: Builder,
    disk: &DiskShape,
    shape: &Shape,
    data_file: Option<&str>,
    places: Places,
    l2_writes: Writes,
) -> Builder {
    let cluster_bytes = shape.cluster.bytes();
    let header = header::header(&Header {
        cluster: shape.cluster,
        data_file,
        size_bytes: disk.shown_bytes(),
        // 64 TiB need 131,072 L2 tables and 4 clusters of refcount table.
        l1_entries: shape.l2_tables.max(1) as u32,
        l1_offset_bytes: shape.l1_at() * cluster_bytes,
        refcount_table_clusters: shape.refcount_table as u32,
    });
    // A table with one entry per table; the first of those is at `first` of the
    // file.
    let tables_at = |count, first| Table::full(Width::U64Be, count, first, cluster_bytes);
    let refcount_table =
        tables_at(shape.refcount_blocks, shape.refcount_blocks_at() * cluster_bytes);
    let l1 = tables_at(shape.l2_tables, (shape.l2_tables_at() * cluster_bytes) | COPIED);
    let l2 = Table {
        width: Width::U64Be,
        present: places.present,
        first: places.first | COPIED,
        step: cluster_bytes,
        absent: 0,
        spacer_after: None,
    };
    let ones = Table::full(Width::U16Be, shape.all(), 1, 0);
    builder
        .bytes(header)
        .zeroes_to(cluster_bytes)
        .table(shape.refcount_table * cluster_bytes, refcount_table, Writes::Refused)
        .table(shape.refcount_blocks * cluster_bytes, ones, Writes::Refused)
        .table(shape.l1 * cluster_bytes, l1, Writes::Refused)
        .table(shape.l2_tables * cluster_bytes, l2, l2_writes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_cover_the_whole_file_and_no_block_is_spare() {
        let around = |count: u64| count - 40..count + 2;
        for cluster in [LARGE, USUAL] {
            let block = cluster.refcounts();
            let counts = [0, 1, (64 << 40) / cluster.bytes()];
            for clusters in counts.into_iter().chain(around(block)).chain(around(8 * block)) {
                for data in [0, clusters / 2, clusters] {
                    let shape = Shape::of(cluster, clusters, data);
                    assert!(shape.refcount_blocks * block >= shape.all());
                    assert!(shape.refcount_table * cluster.entries() >= shape.refcount_blocks);
                    assert!((shape.refcount_blocks - 1) * block < shape.all());
                }
            }
        }
    }
}
