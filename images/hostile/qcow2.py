"""Hostile qcow2 images."""

import os
import struct
import zlib

from .case import Case, Harmless, cut, refused

KIB = 1 << 10
MIB = 1 << 20
TIB = 1 << 40
COPIED = 1 << 63
COMPRESSED = 1 << 62
PATTERN = bytes(range(256)) * 256
# The use of each cluster of 64 KiB.
TABLE, BLOCK, L1, L2, DATA = (n * 64 * KIB for n in range(1, 6))


def header(extensions=b"", **changed):
    fields = {
        "magic": b"QFI\xfb", "version": 3, "backing_offset": 0, "backing_length": 0,
        "cluster_bits": 16, "size": MIB, "encryption": 0, "l1_entries": 1, "l1_offset": L1,
        "table_offset": TABLE, "table_clusters": 1, "snapshots": 0, "snapshots_offset": 0,
        "incompatible": 0, "compatible": 0, "autoclear": 0, "refcount_order": 4, "length": 104,
    }
    assert fields.keys() >= changed.keys()
    fields |= changed
    return struct.pack(">4sIQIIQIIQQIIQQQQII", *fields.values()) + extensions


def extension(kind, content, length=None):
    padded = content + bytes(-len(content) % 8)
    return struct.pack(">II", kind, len(content) if length is None else length) + padded


def table(*entries):
    return struct.pack(f">{len(entries)}Q", *entries)


def image(extensions=b"", l1=(L2 | COPIED,), l2=(DATA | COPIED,), refcounts=(1,) * 6,
          table_entries=(BLOCK,), more=(), **changed):
    """The parts of a disk of 1 MiB whose first cluster holds the pattern."""
    return [
        (0, header(extensions, **changed)),
        (TABLE, table(*table_entries)),
        (BLOCK, struct.pack(f">{len(refcounts)}H", *refcounts)),
        (L1, table(*l1)),
        (L2, table(*l2)),
        (DATA, PATTERN),
        *more,
    ]


def plain(**keywords):
    return lambda place: place.write("disk.qcow2", *image(**keywords), length=6 * 64 * KIB)


def truncated(length):
    return lambda place: cut(plain()(place), length)


def backing(name, image_format=b"raw", fifo=False):
    """An overlay over `name`, in which SECRET and SELF stand for paths."""

    def make(place):
        said = name.replace("SECRET", str(place.secret))
        said = said.replace("SELF", str(place.folder / "disk.qcow2")).encode()
        if fifo:
            os.mkfifo(place.folder / "fifo")
        extensions = extension(0xE2792ACA, image_format) if image_format else b""
        extensions += extension(0, b"")
        parts = image(extensions, l2=(0,), backing_offset=4096, backing_length=len(said),
                      more=[(4096, said)])
        return place.write("disk.qcow2", *parts, length=6 * 64 * KIB)

    return make


def data_file(place):
    named = extension(0x44415441, str(place.secret).encode()) + extension(0, b"")
    return place.write("disk.qcow2", *image(named, incompatible=4), length=6 * 64 * KIB)


def data_file_unmarked(place):
    named = extension(0x44415441, str(place.secret).encode()) + extension(0, b"")
    return place.write("disk.qcow2", *image(named), length=6 * 64 * KIB)


def empty_of(size, **changed):
    """An empty disk of that size."""
    entries = -(-size // (512 * MIB))
    clusters = -(-entries * 8 // (64 * KIB))

    def make(place):
        counts = struct.pack(f">{3 + clusters}H", *(1,) * (3 + clusters))
        return place.write(
            "disk.qcow2", (0, header(size=size, l1_entries=entries, **changed)),
            (TABLE, table(BLOCK)), (BLOCK, counts), length=L1 + clusters * 64 * KIB)

    return make


def shared_table(place):
    """63 TiB of content: every L1 entry refers to the same L2 table, every L2 entry to the
    same cluster, and the 64-bit reference counts are correct."""
    entries = 63 * TIB // (512 * MIB)
    clusters = -(-entries * 8 // (64 * KIB))
    l2, data = L1 + clusters * 64 * KIB, L1 + (clusters + 1) * 64 * KIB
    counts = [1] * (3 + clusters) + [entries, entries * 8192]
    return place.write(
        "disk.qcow2", (0, header(size=63 * TIB, l1_entries=entries, refcount_order=6)),
        (TABLE, table(BLOCK)), (BLOCK, table(*counts)), (L1, table(l2) * entries),
        (l2, table(data) * 8192), (data, PATTERN))


def compressed_bomb(place):
    """1 GiB of content from one compressed cluster, with correct reference counts."""
    size, cluster = 1 << 30, 4 * KIB
    at = {name: n * cluster
          for n, name in enumerate(("head", "table", "block", "l1", "l2", "data"))}
    packed = zlib.compressobj(9, zlib.DEFLATED, -12)
    stream = packed.compress(b"Z" * cluster) + packed.flush()
    # With clusters of 2^12 the descriptor has 62 - 4 bits of offset; 0 further sectors.
    entry = COMPRESSED | at["data"]
    counts = table(1, 1, 1, 1, 512, 512 * 512)
    return place.write(
        "disk.qcow2",
        (0, header(size=size, cluster_bits=12, l1_entries=512, l1_offset=at["l1"],
                   table_offset=at["table"], refcount_order=6)),
        (at["table"], table(at["block"])), (at["block"], counts),
        (at["l1"], table(at["l2"]) * 512), (at["l2"], table(entry) * 512),
        (at["data"], stream), length=6 * cluster)


def oversized_stream(place):
    """A compressed cluster that would expand to 256 MiB."""
    packed = zlib.compressobj(9, zlib.DEFLATED, -12)
    stream = packed.compress(PATTERN + bytes(256 * MIB)) + packed.flush()
    sectors = (len(stream) - 1) // 512
    # The offset of a cluster of 2^16 has 54 bits, so 8 remain for sectors.
    parts = image(l2=(COMPRESSED | min(sectors, 255) << 54 | DATA,), refcounts=(1,) * 8)
    parts[-1] = (DATA, stream[: 192 * KIB])
    return place.write("disk.qcow2", *parts, length=8 * 64 * KIB)


FEATURE_NAMES = extension(0x6803F857, b"\0\x14" + b"\x1b[31mred\x07".ljust(46, b"\0"))
BITMAPS = extension(0x23852875, struct.pack(">IIQQ", 0xFFFFFFFF, 0, 0xFFFFFFFFFFFF, DATA))
DAMAGED = refused("damaged", "corrupt", "invalid")
PATTERN_DISK = Harmless(MIB, {0: PATTERN})
FOLLOW = ("--follow-backing",)

CASES = [
    Case("qcow2-plain", "qcow2", "nothing: the image that the others are made of",
         PATTERN_DISK, plain()),
    Case("qcow2-l1-in-itself", "qcow2", "the L1 table is its own L2 table",
         DAMAGED, plain(l1=(L1 | COPIED,))),
    Case("qcow2-l2-in-itself", "qcow2", "the L2 table is its own data",
         DAMAGED, plain(l2=(L2 | COPIED,))),
    Case("qcow2-l2-in-the-tables", "qcow2", "data inside the reference counts",
         DAMAGED, plain(l2=(BLOCK | COPIED,))),
    Case("qcow2-metadata-as-data", "qcow2", "the L1 table as data, counted rightly",
         Harmless(MIB, {0: table(L2 | COPIED)}), plain(l2=(L1,), refcounts=(1, 1, 1, 2, 1, 0))),
    Case("qcow2-refcounts-in-themselves", "qcow2", "the reference counts count themselves",
         DAMAGED, plain(table_entries=(TABLE,))),
    Case("qcow2-unaligned-l2", "qcow2", "an L2 table off the clusters",
         DAMAGED, plain(l1=((L2 + 512) | COPIED,))),
    Case("qcow2-data-beyond-the-end", "qcow2", "a cluster behind the file's end",
         DAMAGED, plain(l2=(1 << 50 | COPIED,))),
    Case("qcow2-huge-l1", "qcow2", "2^32-1 entries in L1",
         refused("l1 table"), plain(l1_entries=0xFFFFFFFF)),
    Case("qcow2-huge-refcount-table", "qcow2", "2^32-1 clusters of reference counts",
         refused("too large"), plain(table_clusters=0xFFFFFFFF)),
    Case("qcow2-huge-snapshot-count", "qcow2", "2^32-1 snapshots",
         refused("snapshot"), plain(snapshots=0xFFFFFFFF, snapshots_offset=DATA)),
    Case("qcow2-snapshots-of-noise", "qcow2", "65535 snapshots, of which nothing is there",
         refused("snapshot"), plain(snapshots=65535, snapshots_offset=DATA)),
    Case("qcow2-8-eib", "qcow2", "a size of 8 EiB",
         refused("too big", "too large", "too small"), plain(size=(1 << 63) - 512)),
    Case("qcow2-65-tib", "qcow2", "a size of 65 TiB", refused("largest disk"), empty_of(65 * TIB)),
    Case("qcow2-63-tib", "qcow2", "63 TiB of nothing", Harmless(63 * TIB), empty_of(63 * TIB)),
    Case("qcow2-cluster-bits-0", "qcow2", "clusters of one byte",
         refused("cluster size"), plain(cluster_bits=0)),
    Case("qcow2-cluster-bits-63", "qcow2", "clusters of 8 EiB",
         refused("cluster size"), plain(cluster_bits=63)),
    Case("qcow2-refcount-order", "qcow2", "reference counts of 2^63 bits",
         refused("reference count", "refcount"), plain(refcount_order=63)),
    Case("qcow2-short-header", "qcow2", "a header of 8 bytes", refused("header"), plain(length=8)),
    Case("qcow2-long-header", "qcow2", "a header of 4 GiB",
         refused("header"), plain(length=0xFFFFFFFF)),
    Case("qcow2-huge-extension", "qcow2", "a header extension of 4 GiB", refused("extension"),
         plain(extensions=extension(0x1234, b"x" * 8, length=0xFFFFFFF0))),
    Case("qcow2-unknown-feature", "qcow2", "an unknown feature, whose name turns the terminal red",
         refused("feature"),
         plain(extensions=FEATURE_NAMES, incompatible=1 << 20)),
    Case("qcow2-huge-bitmaps", "qcow2", "2^32-1 dirty bitmaps",
         refused("bitmap"), plain(extensions=BITMAPS, autoclear=1)),
    Case("qcow2-encrypted-aes", "qcow2", "encrypted the old way",
         refused("encrypted"), plain(encryption=1)),
    Case("qcow2-encrypted-luks", "qcow2", "encrypted with LUKS",
         refused("encrypted"), plain(encryption=2)),
    Case("qcow2-data-file", "qcow2", "the content is another file",
         refused("data file"), data_file),
    Case("qcow2-data-file-unmarked", "qcow2", "another file is named, but not marked as used",
         PATTERN_DISK, data_file_unmarked),
    Case("qcow2-backing-secret", "qcow2", "an absolute backing file",
         refused("--follow-backing"), backing("SECRET")),
    Case("qcow2-backing-passwd", "qcow2", "/etc/passwd below",
         refused("--follow-backing"), backing("/etc/passwd")),
    Case("qcow2-backing-json", "qcow2", "a backing file in JSON", refused("not a local file"),
         backing('json:{"driver":"raw","file":{"driver":"file","filename":"SECRET"}}'), FOLLOW),
    Case("qcow2-backing-nbd", "qcow2", "a backing file in the network",
         refused("not a local file"), backing("nbd://127.0.0.1:10809/x"), FOLLOW),
    Case("qcow2-backing-ssh", "qcow2", "a backing file on another machine",
         refused("not a local file"), backing("ssh://127.0.0.1/etc/passwd"), FOLLOW),
    Case("qcow2-backing-fat", "qcow2", "a folder as a FAT disk",
         refused("not a local file"), backing("fat:/etc"), FOLLOW),
    Case("qcow2-backing-unstated", "qcow2", "a backing file of unstated format",
         refused("never guessed"), backing("SECRET", None), FOLLOW),
    Case("qcow2-backing-fifo", "qcow2", "a pipe below",
         refused("neither a file"), backing("fifo", fifo=True), FOLLOW),
    Case("qcow2-backing-itself", "qcow2", "its own backing file",
         refused("circle"), backing("SELF", b"qcow2"), FOLLOW),
    Case("qcow2-backing-device", "qcow2", "a device below",
         refused("neither a file"), backing("/dev/zero"), FOLLOW),
    Case("qcow2-shared-tables", "qcow2", "63 TiB of content in 2 MiB of file",
         refused("processor time", "same place"), shared_table),
    Case("qcow2-compressed-bomb", "qcow2", "1 GiB from one compressed cluster",
         refused("same place"), compressed_bomb),
    Case("qcow2-oversized-stream", "qcow2", "a cluster that expands to 256 MiB",
         PATTERN_DISK, oversized_stream),
    Case("qcow2-empty", "qcow2", "no byte", refused("qcow2", "empty"), truncated(0)),
    Case("qcow2-cut-in-the-header", "qcow2", "100 bytes", refused("qcow2"), truncated(100)),
    Case("qcow2-cut-in-the-tables", "qcow2", "no L1 table", refused("l1 table"), truncated(L1 - 1)),
    Case("qcow2-cut-before-the-data", "qcow2", "no data", DAMAGED, truncated(DATA)),
    Case("qcow2-cut-in-the-data", "qcow2", "a part of the last cluster, as QEMU leaves it too",
         Harmless(MIB, {0: PATTERN[:512]}), truncated(DATA + 512)),
]
