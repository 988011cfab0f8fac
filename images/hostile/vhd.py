"""Hostile VHD images."""

import struct

from .case import Case, Harmless, cut, refused

MIB = 1 << 20
FIXED, DYNAMIC, DIFFERENCING = 2, 3, 4
ABSENT = 0xFFFFFFFF
PATTERN = bytes(range(256)) * 16
DISK = 4 * MIB
BLOCK = 2 * MIB
BAT = 1536
FIRST_BLOCK = 2048


def summed(part, at):
    """The part with its checksum."""
    part = part[:at] + bytes(4) + part[at + 4:]
    return part[:at] + struct.pack(">I", ~sum(part) & 0xFFFFFFFF) + part[at + 4:]


def footer(kind, size=DISK, header_at=512, good=True):
    part = struct.pack(">8sIIQI4sI4sQQHBBII", b"conectix", 2, 0x10000,
                       (1 << 64) - 1 if kind == FIXED else header_at, 0, b"win ", 0x10000, b"Wi2k",
                       size, size, 120, 4, 17, kind, 0)
    part = summed(part.ljust(512, b"\0"), 64)
    return part if good else part[:64] + b"\1\2\3\4" + part[68:]


def sparse_header(entries=2, block=BLOCK, table_at=BAT, parent=""):
    part = struct.pack(">8sQQIIII", b"cxsparse", (1 << 64) - 1, table_at, 0x10000, entries, block,
                       0)
    part = part.ljust(64, b"\0") + parent.encode("utf-16-be")
    return summed(part.ljust(1024, b"\0"), 36)


def dynamic(bat=(FIRST_BLOCK // 512, ABSENT), kind=DYNAMIC, last=None, size=DISK, good=True,
            header_at=512, length=FIRST_BLOCK + 512 + BLOCK, **changed):
    """A disk of 4 MiB whose first block begins with the pattern."""

    def make(place):
        copy = footer(kind, size, header_at, good)
        return place.write(
            "disk.vhd", (0, copy), (512, sparse_header(**changed)),
            (BAT, struct.pack(f">{len(bat)}I", *bat)), (FIRST_BLOCK, b"\xff" * 512 + PATTERN),
            (length, copy if last is None else last))

    return make


def fixed(size=DISK, length=DISK, name="disk.vhd"):
    return lambda place: place.write(name, (0, PATTERN), (length, footer(FIXED, size)))


def shared_block(place):
    """1 TiB of content in one block."""
    entries = (1 << 40) // BLOCK
    first = BAT + 4 * entries
    copy = footer(DYNAMIC, 1 << 40)
    return place.write(
        "disk.vhd", (0, copy), (512, sparse_header(entries=entries)),
        (BAT, struct.pack(">I", first // 512) * entries),
        (first, b"\xff" * 512 + PATTERN * (BLOCK // len(PATTERN))), (first + 512 + BLOCK, copy))


def without_copy(place):
    path = dynamic()(place)
    path.write_bytes(bytes(512) + path.read_bytes()[512:])
    return path


PATTERN_DISK = Harmless(DISK, {0: PATTERN})
WITHOUT_END = bytes(512)

CASES = [
    Case("vhd-dynamic", "vhd", "nothing: the image that the others are made of",
         PATTERN_DISK, dynamic()),
    Case("vhd-fixed", "vhd", "nothing: a fixed disk", PATTERN_DISK, fixed()),
    Case("vhd-fixed-as-raw", "raw", "a fixed VHD that is called raw",
         refused("vhd:"), fixed(name="disk.raw")),
    Case("vhd-dynamic-as-raw-is-a-disk", "raw", "a raw disk that begins and ends as a dynamic VHD",
         Harmless(FIRST_BLOCK + 1024 + BLOCK, {
             0: footer(DYNAMIC) + sparse_header() + struct.pack(">2I", FIRST_BLOCK // 512, ABSENT),
             FIRST_BLOCK: b"\xff" * 512 + PATTERN, FIRST_BLOCK + 512 + BLOCK: footer(DYNAMIC)}),
         dynamic()),
    Case("vhd-wrong-checksum", "vhd", "checksums that do not fit",
         refused("checksum"), dynamic(good=False)),
    Case("vhd-differencing", "vhd", "the rest is in a parent",
         refused("differencing"), dynamic(kind=DIFFERENCING, parent="secret")),
    Case("vhd-differencing-without-footer", "vhd", "the same, told by the copy of the footer only",
         refused("differencing"),
         dynamic(kind=DIFFERENCING, last=WITHOUT_END)),
    Case("vhd-differencing-footer-only", "vhd", "the same, told by the footer only",
         refused("differencing"),
         dynamic(last=footer(DIFFERENCING))),
    Case("vhd-no-copy", "vhd", "the copy of a dynamic disk's footer is gone",
         refused("begins with a copy"), without_copy),
    Case("vhd-no-footer", "vhd", "the footer is gone",
         refused("does not end"), dynamic(last=WITHOUT_END)),
    Case("vhd-block-beyond-the-end", "vhd", "a block behind the file's end",
         refused("truncated"), dynamic(bat=(0x7FFFFFFF, ABSENT))),
    Case("vhd-block-size-0", "vhd", "blocks of no byte", refused("block size"), dynamic(block=0)),
    Case("vhd-block-size-2-gib", "vhd", "blocks of 2 GiB",
         refused("truncated", "not", "invalid"), dynamic(block=1 << 31)),
    Case("vhd-block-size-odd", "vhd", "blocks of 3 bytes", refused("block size"), dynamic(block=3)),
    Case("vhd-huge-table", "vhd", "2^32-1 blocks",
         refused("too many", "invalid", "not"), dynamic(entries=0xFFFFFFFF)),
    Case("vhd-short-table", "vhd", "a table of no blocks",
         refused("too small", "invalid", "not"), dynamic(entries=0)),
    Case("vhd-table-in-the-header", "vhd", "the table is the footer's copy",
         refused("truncated"), dynamic(table_at=0)),
    Case("vhd-table-beyond-the-end", "vhd", "the table lies 8 EiB away",
         refused("not", "invalid", "read"), dynamic(header_at=1 << 62)),
    Case("vhd-header-in-itself", "vhd", "the dynamic header is the footer's copy",
         refused("not", "invalid"), dynamic(header_at=0)),
    Case("vhd-8-eib", "vhd", "a size of 8 EiB",
         refused("too large", "large"), dynamic(size=(1 << 63) - 512)),
    Case("vhd-fixed-8-eib", "vhd", "a fixed disk of 8 EiB in 4 MiB",
         refused("truncated"), fixed(size=(1 << 63) - 512)),
    Case("vhd-shared-block", "vhd", "1 TiB of content in one block",
         refused("same place"), shared_block),
    Case("vhd-truncated", "vhd", "the second half is gone",
         refused("does not end"), lambda place: cut(dynamic()(place), BLOCK // 2)),
    Case("vhd-fixed-truncated", "vhd", "the middle is gone",
         refused("truncated"), fixed(length=DISK // 2)),
    Case("vhd-tiny", "vhd", "100 bytes",
         refused("does not end"), lambda place: cut(dynamic()(place), 100)),
]
