"""Hostile VMDK images."""

import os
import struct
import zlib

from . import sesparse
from .case import Case, Harmless, cut, refused

KIB, MIB, TIB = 1 << 10, 1 << 20, 1 << 40
SECTOR = 512
GRAIN = 64 * KIB
DISK = 4 * MIB
PATTERN = bytes(range(256)) * 256
# The sectors of the parts of a sparse extent.
TEXT, DIRECTORY, TABLE, DATA = 1, 20, 24, 128
TEXT_OF_SPARSE = (
    b"# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=%s\n"
    b'createType="monolithicSparse"\nRW 8192 SPARSE "disk.vmdk"\n%s')


def header(capacity=DISK // SECTOR, grain=GRAIN // SECTOR, entries=512, directory_at=DIRECTORY,
           flags=1, version=1, compression=0, overhead=DATA, text=TEXT):
    return struct.pack("<4sIIQQQQIQQQB4sH", b"KDMV", version, flags, capacity, grain, text, 19,
                       entries, 0, directory_at, overhead, 0, b"\n \r\n",
                       compression).ljust(512, b"\0")


def sparse(directory=(TABLE,), table=(DATA,), parent=b"ffffffff", more=b"", data=PATTERN,
           **changed):
    """A disk of 4 MiB whose first grain holds the pattern."""

    def make(place):
        return place.write(
            "disk.vmdk", (0, header(**changed)), (TEXT * SECTOR, TEXT_OF_SPARSE % (parent, more)),
            (DIRECTORY * SECTOR, struct.pack(f"<{len(directory)}I", *directory)),
            (TABLE * SECTOR, struct.pack(f"<{len(table)}I", *table)), (DATA * SECTOR, data),
            length=DATA * SECTOR + GRAIN)

    return make


def compressed(stream, size=None, **changed):
    """A streamOptimized disk with one grain."""
    marker = struct.pack("<QI", 0, len(stream) if size is None else size)
    return sparse(data=marker + stream, version=3, flags=0x30001, compression=1, **changed)


def text(*lines, kind="monolithicFlat", also=None):
    """A description with these extent lines, in which SECRET and UP stand for paths."""

    def make(place):
        up = f"../../{place.secret.name}"
        said = "\n".join(lines).replace("SECRET", str(place.secret)).replace("UP", up)
        if also:
            also(place)
        content = ("# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n"
                   f'createType="{kind}"\n{said}\nddb.adapterType = "ide"\n')
        return place.write("disk.vmdk", (0, content.encode()))

    return make


def flat(place):
    place.write("flat.vmdk", (0, PATTERN), length=DISK)


def shared_table(place):
    """2 TiB of content: every directory entry refers to the same table, every table entry to
    the same grain."""
    tables = 2 * TIB // (512 * GRAIN)
    first = DIRECTORY + tables * 4 // SECTOR
    return place.write(
        "disk.vmdk", (0, header(capacity=2 * TIB // SECTOR, overhead=first)),
        (TEXT * SECTOR, TEXT_OF_SPARSE % (b"ffffffff", b"")),
        (DIRECTORY * SECTOR, struct.pack("<I", first) * tables),
        (first * SECTOR, struct.pack("<I", first + 8) * 512), ((first + 8) * SECTOR, PATTERN))


def cow(place):
    """A disk of 4 MiB in ESXi's older snapshot format, sectors as grains."""
    head = struct.pack("<4sIIIIIII", b"COWD", 1, 3, DISK // SECTOR, 1, 4, 2, 16)
    table = struct.pack("<I", 48) + bytes(4 * 4095)
    place.write("delta.vmdk", (0, head), (4 * SECTOR, struct.pack("<II", 8, 0)),
                (8 * SECTOR, table), (48 * SECTOR, PATTERN[:SECTOR]))
    return text(f'RW {DISK // SECTOR} VMFSSPARSE "delta.vmdk"', kind="vmfsSparse")(place)


def se_sparse(**changed):
    def make(place):
        grains = {0: PATTERN[:4096], 1023: PATTERN[4096:8192]}
        states = {1: sesparse.ZERO, 2: sesparse.UNMAPPED}
        place.write("x-sesparse.vmdk", (0, sesparse.extent(DISK, grains, states, **changed)))
        return place.write("disk.vmdk", (0, sesparse.descriptor(DISK, "x-sesparse.vmdk")))

    return make


def own_directory():
    """The first grain if the directory is also its own table."""
    start = struct.pack("<I", DIRECTORY).ljust((TABLE - DIRECTORY) * SECTOR, b"\0")
    start = (start + struct.pack("<I", DATA)).ljust((DATA - DIRECTORY) * SECTOR, b"\0")
    return (start + PATTERN)[:GRAIN]


def deflated(content):
    return zlib.compress(content, 9)


PATTERN_DISK = Harmless(DISK, {0: PATTERN})
OUTSIDE = refused("folder of the image")
BROKEN = refused("damaged", "could not", "invalid", "reading from file")

CASES = [
    Case("vmdk-sparse", "vmdk", "nothing: the image that the others are made of",
         PATTERN_DISK, sparse()),
    Case("vmdk-stream", "vmdk", "nothing: a compressed disk",
         PATTERN_DISK, compressed(deflated(PATTERN))),
    Case("vmdk-flat", "vmdk", "nothing: a flat disk",
         PATTERN_DISK, text('RW 8192 FLAT "flat.vmdk" 0', also=flat)),
    Case("vmdk-sesparse", "vmdk", "nothing: a disk of ESXi's snapshot format",
         Harmless(DISK, {0: PATTERN[:4096], 1023 * 4096: PATTERN[4096:8192]}), se_sparse()),
    Case("vmdk-sesparse-journal", "vmdk", "a journal to be replayed",
         refused("journal"), se_sparse(replay=True)),
    Case("vmdk-cow", "vmdk", "nothing: a disk of ESXi's older snapshot format",
         Harmless(DISK, {0: PATTERN[:512]}), cow),
    Case("vmdk-absolute", "vmdk", "an extent with a whole path",
         OUTSIDE, text('RW 2048 FLAT "SECRET" 0')),
    Case("vmdk-up", "vmdk", "an extent in the folder above", OUTSIDE, text('RW 2048 FLAT "UP" 0')),
    Case("vmdk-device", "vmdk", "a device as an extent",
         OUTSIDE, text('RW 2048 FLAT "/dev/zero" 0')),
    Case("vmdk-protocol", "vmdk", "a server as an extent",
         OUTSIDE, text('RW 2048 FLAT "nbd:127.0.0.1:10809" 0')),
    Case("vmdk-json", "vmdk", "JSON as an extent", OUTSIDE, text('RW 2048 FLAT "json:{}" 0')),
    Case("vmdk-folder", "vmdk", "a folder as an extent", OUTSIDE, text('RW 2048 FLAT ".." 0')),
    Case("vmdk-broken-line", "vmdk", "a line break that QEMU takes for a blank", OUTSIDE,
         text('RW 1 FLAT "x"', "RW", "2048", "FLAT", '"SECRET" 0')),
    Case("vmdk-fifo", "vmdk", "a pipe as an extent", OUTSIDE,
         text('RW 2048 FLAT "pipe" 0', also=lambda place: os.mkfifo(place.folder / "pipe"))),
    Case("vmdk-symlink", "vmdk", "a link out of the folder", OUTSIDE,
         text('RW 2048 FLAT "link" 0',
              also=lambda place: os.symlink(place.secret, place.folder / "link"))),
    Case("vmdk-itself-flat", "vmdk", "its own text as a flat extent",
         refused("truncated"), text('RW 2048 FLAT "disk.vmdk" 0')),
    Case("vmdk-itself-sparse", "vmdk", "its own text as a sparse extent",
         refused("not in vmdk format"),
         text('RW 8192 SPARSE "disk.vmdk"', kind="twoGbMaxExtentSparse")),
    Case("vmdk-second-text", "vmdk", "a sparse extent that is a text again",
         refused("second description"), sparse(capacity=0)),
    Case("vmdk-huge-flat", "vmdk", "2^63-1 sectors",
         refused("truncated"), text(f'RW {(1 << 63) - 1} FLAT "flat.vmdk" 0', also=flat)),
    Case("vmdk-flat-far-away", "vmdk", "an extent that begins behind its file's end",
         refused("truncated"),
         text('RW 8192 FLAT "flat.vmdk" 8192', also=flat)),
    Case("vmdk-many-extents", "vmdk", "5,000 extents",
         refused("too many open files", "could not open"),
         text(*['RW 8192 FLAT "flat.vmdk" 0'] * 5000, also=flat)),
    Case("vmdk-left-out", "vmdk", "an extent that QEMU skips, so that the next moves",
         refused("leaves out"),
         text('RDONLY 8192 FLAT "flat.vmdk" 0', 'RW 8192 FLAT "flat.vmdk" 0', also=flat)),
    Case("vmdk-zero-extent", "vmdk", "the same with an extent of zeroes", refused("leaves out"),
         text("RW 8192 ZERO", 'RW 8192 FLAT "flat.vmdk" 0', also=flat)),
    Case("vmdk-parent", "vmdk", "/etc/passwd below", refused("--follow-backing"),
         sparse(parent=b"12345677", more=b'parentFileNameHint="/etc/passwd"\n')),
    Case("vmdk-parent-nbd", "vmdk", "a server below", refused("not a local file"),
         sparse(parent=b"12345677", more=b'parentFileNameHint="nbd:127.0.0.1:10809"\n'),
         ("--follow-backing",)),
    Case("vmdk-parent-unnamed", "vmdk", "a parent without a name",
         refused("does not name"), sparse(parent=b"12345677")),
    Case("vmdk-directory-in-itself", "vmdk", "the grain directory is its own table",
         Harmless(DISK, {0: own_directory()}), sparse(directory=(DIRECTORY,))),
    Case("vmdk-directory-beyond-the-end", "vmdk", "the grain directory lies 8 EiB away",
         BROKEN, sparse(directory_at=1 << 53)),
    Case("vmdk-grain-beyond-the-end", "vmdk", "a grain behind the file's end",
         BROKEN, sparse(table=(0xFFFFFFF0,))),
    Case("vmdk-huge", "vmdk", "8 EiB in grains of 64 KiB",
         refused("too big", "too large"), sparse(capacity=(1 << 54) - 1)),
    Case("vmdk-grain-size-0", "vmdk", "grains of no byte", refused("invalid"), sparse(grain=0)),
    Case("vmdk-grain-size-2-gib", "vmdk", "grains of 2 GiB",
         refused("granularity"), sparse(grain=1 << 22)),
    Case("vmdk-huge-tables", "vmdk", "tables of 2^32-1 entries",
         refused("too big"), sparse(entries=0xFFFFFFFF)),
    Case("vmdk-version", "vmdk", "version 9", refused("version"), sparse(version=9)),
    Case("vmdk-compression", "vmdk", "an unknown compression",
         refused("compressed"), sparse(flags=0x30001, compression=7, version=3)),
    Case("vmdk-compressed-by-nothing", "vmdk", "compressed grains, but no method",
         refused("compressed"), sparse(flags=0x10001, version=3)),
    Case("vmdk-no-footer", "vmdk", "the directory is said to be in a footer",
         refused("footer"), compressed(b"", directory_at=(1 << 64) - 1)),
    Case("vmdk-stream-too-long", "vmdk", "a compressed grain of 4 GiB",
         BROKEN, compressed(deflated(PATTERN), size=0xFFFFFFFF)),
    Case("vmdk-stream-of-noise", "vmdk", "a grain that is not compressed",
         BROKEN, compressed(b"noise" * 100)),
    Case("vmdk-stream-bomb", "vmdk", "a grain that expands to 256 MiB",
         BROKEN, compressed(deflated(PATTERN + bytes(256 * MIB))[: 50 * KIB])),
    Case("vmdk-large-grain-bomb", "vmdk", "one grain of 128 MiB, compressed", BROKEN,
         compressed(deflated(bytes(4 * MIB)), capacity=1 << 18, grain=1 << 18)),
    Case("vmdk-shared-table", "vmdk", "2 TiB of content in one grain",
         refused("same place"), shared_table),
    Case("vmdk-empty", "vmdk", "no byte",
         refused("too small", "empty"), lambda place: place.write("disk.vmdk")),
    Case("vmdk-noise", "vmdk", "no VMDK at all",
         refused("not a vmdk", "descriptor"),
         lambda place: place.write("disk.vmdk", (0, bytes(range(1, 256)) * 40))),
    Case("vmdk-cut-in-the-header", "vmdk", "100 bytes",
         BROKEN, lambda place: place.write("disk.vmdk", (0, header()[:40]))),
    Case("vmdk-cut-in-the-data", "vmdk", "a part of the last grain",
         Harmless(DISK, {0: PATTERN[:512]}),
         lambda place: cut(sparse()(place), DATA * SECTOR + 512)),
]
