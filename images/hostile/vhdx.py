"""Hostile VHDX images."""

import struct
import uuid

from .case import Case, Harmless, cut, refused

KIB, MIB, TIB = 1 << 10, 1 << 20, 1 << 40
HEADERS = (64 * KIB, 128 * KIB)
REGIONS = 192 * KIB
METADATA, BAT, FIRST_BLOCK = 2 * MIB, 3 * MIB, 4 * MIB
PATTERN = bytes(range(256)) * 16
DISK = 4 * MIB
FULLY_PRESENT, PARTLY_PRESENT = 6, 7

BAT_REGION = "2DC27766-F623-4200-9D64-115E9BFD4A08"
METADATA_REGION = "8B7CA206-4790-4B9A-B8FE-575F050F886E"
FILE_PARAMETERS = "CAA16737-FA36-4D43-B3B6-33F0AA44E76B"
DISK_SIZE = "2FA54224-CD1B-4876-B211-5DBED83BF4B8"
PAGE_83 = "BECA12AB-B2E6-4523-93EF-C309E000C746"
LOGICAL_SECTOR = "8141BF1D-A96F-4709-BA47-F233A8FAAB5F"
PHYSICAL_SECTOR = "CDA348C7-445D-4471-9CC9-E9885251C556"
PARENT_LOCATOR = "A8D35F2D-B30B-454D-ABF7-D3D84834AB0C"
UNKNOWN = "00000000-1111-2222-3333-444444444444"


def crc32c(content):
    crc = 0xFFFFFFFF
    for byte in content:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def crc_table():
    entries = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        entries.append(value)
    return entries


CRC_TABLE = crc_table()


def summed(part, length, good=True):
    """The part, padded, with its checksum in bytes 4 to 8."""
    part = part.ljust(length, b"\0")
    return part[:4] + struct.pack("<I", crc32c(part) ^ (not good)) + part[8:]


def guid(text):
    return uuid.UUID(text).bytes_le


def head(sequence, log=False, good=True):
    log_id = b"L" * 16 if log else bytes(16)
    return summed(struct.pack("<4sIQ16s16s16sHHIQ", b"head", 0, sequence, b"F" * 16, b"D" * 16,
                              log_id, 0, 1, MIB, MIB), 4 * KIB, good)


def region_table(entries, count=None):
    part = struct.pack("<4sIII", b"regi", 0, len(entries) if count is None else count, 0)
    for name, offset, length, flags in entries:
        part += guid(name) + struct.pack("<QII", offset, length, flags)
    return summed(part, 64 * KIB)


def metadata(items, count=None):
    part = struct.pack("<8sHH20x", b"metadata", 0, len(items) if count is None else count)
    values, at = b"", 64 * KIB
    for name, flags, value in items:
        part += guid(name) + struct.pack("<IIII", at + len(values), len(value), flags, 0)
        values += value
    return part.ljust(64 * KIB, b"\0") + values


def disk(size=DISK, block=MIB, bat=((FIRST_BLOCK, FULLY_PRESENT),), bat_length=MIB, sector=512,
         parameters=0, first=None, second=None, items=(), regions=(), region_count=None,
         item_count=None, metadata_at=METADATA, bat_at=BAT, length=FIRST_BLOCK + MIB):
    """A disk of 4 MiB whose first block begins with the pattern."""

    def make(place):
        all_items = [
            (FILE_PARAMETERS, 4, struct.pack("<II", block, parameters)),
            (DISK_SIZE, 6, struct.pack("<Q", size)), (PAGE_83, 6, b"P" * 16),
            (LOGICAL_SECTOR, 6, struct.pack("<I", sector)),
            (PHYSICAL_SECTOR, 6, struct.pack("<I", 4096)), *items,
        ]
        all_regions = [(BAT_REGION, bat_at, bat_length, 1),
                       (METADATA_REGION, metadata_at, MIB, 1), *regions]
        table = region_table(all_regions, region_count)
        entries = struct.pack(f"<{len(bat)}Q", *(offset | state for offset, state in bat))
        return place.write(
            "disk.vhdx", (0, b"vhdxfile"), (HEADERS[0], first or head(1)),
            (HEADERS[1], second or head(2)), (REGIONS, table), (REGIONS + 64 * KIB, table),
            (METADATA, metadata(all_items, item_count)), (BAT, entries),
            (FIRST_BLOCK, PATTERN), length=length)

    return make


def shared_block(place):
    """16 GiB of content in one block."""
    blocks = 16 * 1024
    ratio = (1 << 23) * 512 // MIB
    entries = blocks + (blocks - 1) // ratio
    return disk(size=blocks * MIB, bat=[(FIRST_BLOCK, FULLY_PRESENT)] * entries)(place)


PATTERN_DISK = Harmless(DISK, {0: PATTERN})
MERGE = refused("differencing")
BROKEN = refused("damaged", "could not open", "invalid")

CASES = [
    Case("vhdx-plain", "vhdx", "nothing: the image that the others are made of",
         PATTERN_DISK, disk()),
    Case("vhdx-log", "vhdx", "a log to be replayed",
         refused("log"), disk(first=head(1, log=True), second=head(2, log=True))),
    Case("vhdx-log-in-the-newer-header", "vhdx", "the older header has no log",
         refused("log"), disk(second=head(2, log=True))),
    Case("vhdx-log-in-the-older-header", "vhdx", "a log that is over",
         PATTERN_DISK, disk(first=head(1, log=True))),
    Case("vhdx-log-and-damage", "vhdx", "the header without log has a wrong checksum",
         refused("log"),
         disk(first=head(1, log=True), second=head(2, good=False))),
    Case("vhdx-no-header", "vhdx", "both headers have wrong checksums", refused("headers"),
         disk(first=head(1, good=False), second=head(2, good=False))),
    Case("vhdx-parent", "vhdx", "the rest is in a parent", MERGE,
         disk(parameters=2, items=[(PARENT_LOCATOR, 4, b"/etc/passwd".ljust(64, b"\0"))])),
    Case("vhdx-parent-flag-only", "vhdx", "a parent, but no name", MERGE, disk(parameters=2)),
    Case("vhdx-parent-name-only", "vhdx", "a parent's name, but no flag", MERGE,
         disk(items=[(PARENT_LOCATOR, 4, b"/etc/passwd".ljust(64, b"\0"))])),
    Case("vhdx-unknown-region", "vhdx", "a required region that nobody knows", refused("region"),
         disk(regions=[(UNKNOWN, 3 * MIB, MIB, 1)])),
    Case("vhdx-unknown-metadata", "vhdx", "required metadata that nobody knows",
         refused("metadata"),
         disk(items=[(UNKNOWN, 4, b"x" * 16)])),
    Case("vhdx-region-twice", "vhdx", "two block tables",
         refused("twice"), disk(regions=[(BAT_REGION, 8 * MIB, MIB, 1)])),
    Case("vhdx-huge-region-count", "vhdx", "2^32-1 regions",
         refused("entries"), disk(region_count=0xFFFFFFFF)),
    Case("vhdx-huge-metadata-count", "vhdx", "65535 items",
         refused("entries"), disk(item_count=65535)),
    Case("vhdx-item-twice", "vhdx", "two sizes",
         refused("twice"), disk(items=[(DISK_SIZE, 6, struct.pack("<Q", MIB))])),
    Case("vhdx-metadata-in-the-regions", "vhdx", "the metadata is the region table",
         refused("metadata"), disk(metadata_at=REGIONS)),
    Case("vhdx-metadata-beyond-the-end", "vhdx", "the metadata lies 16 EiB away",
         refused("ends before", "damaged"), disk(metadata_at=(1 << 64) - MIB)),
    Case("vhdx-table-in-the-headers", "vhdx", "the block table is the headers",
         BROKEN, disk(bat_at=0)),
    Case("vhdx-block-in-the-headers", "vhdx", "a block over the headers",
         BROKEN, disk(bat=((0, FULLY_PRESENT),))),
    Case("vhdx-block-in-the-table", "vhdx", "a block over the block table",
         BROKEN, disk(bat=((BAT, FULLY_PRESENT),))),
    Case("vhdx-block-beyond-the-end", "vhdx", "a block 8 EiB away",
         BROKEN, disk(bat=((1 << 62, FULLY_PRESENT),))),
    Case("vhdx-block-partly-present", "vhdx", "a block whose rest is in a parent",
         refused("reading from file"), disk(bat=((FIRST_BLOCK, PARTLY_PRESENT),))),
    Case("vhdx-8-eib", "vhdx", "a size of 8 EiB",
         refused("the maximum is"), disk(size=(1 << 63) - 512)),
    Case("vhdx-half-a-sector", "vhdx", "a size that ends within a sector",
         refused("multiple"), disk(size=DISK - 1)),
    Case("vhdx-65-tib", "vhdx", "a size of 65 TiB",
         refused("the maximum is"), disk(size=65 * TIB, block=32 * MIB)),
    Case("vhdx-64-tib", "vhdx", "64 TiB of nothing", Harmless(64 * TIB),
         disk(size=64 * TIB, block=32 * MIB, bat=(), bat_at=8 * MIB, bat_length=17 * MIB,
              length=25 * MIB)),
    Case("vhdx-short-table", "vhdx", "a block table of 512 MiB in 1 MiB",
         refused("too short"), disk(size=64 * TIB)),
    Case("vhdx-huge-table", "vhdx", "a block table of 1.5 GiB",
         refused("memory"), disk(bat_at=8 * MIB, bat_length=1536 * MIB)),
    Case("vhdx-block-size-0", "vhdx", "blocks of no byte",
         refused("block or sector size"), disk(block=0)),
    Case("vhdx-block-size-512-mib", "vhdx", "blocks of 512 MiB",
         refused("block or sector size"), disk(block=512 * MIB)),
    Case("vhdx-block-size-odd", "vhdx", "blocks of 3 MiB",
         refused("block or sector size"), disk(block=3 * MIB)),
    Case("vhdx-sector-size-0", "vhdx", "sectors of no byte",
         refused("block or sector size"), disk(sector=0)),
    Case("vhdx-sector-size-4096", "vhdx", "sectors that QEMU reads wrongly or not at all",
         refused("4096"), disk(sector=4096)),
    Case("vhdx-shared-block", "vhdx", "16 GiB of content in one block",
         refused("same place"), shared_block),
    Case("vhdx-no-vhdx", "vhdx", "another signature", refused("not a vhdx"),
         lambda place: place.write("disk.vhdx", (0, b"vhdxpipe"), length=MIB)),
    Case("vhdx-empty", "vhdx", "no byte", refused("not a vhdx"), lambda place: cut(disk()(place), 0)),
    Case("vhdx-cut-in-the-headers", "vhdx", "one header",
         refused("ends before"), lambda place: cut(disk()(place), HEADERS[1])),
    Case("vhdx-cut-in-the-metadata", "vhdx", "no metadata",
         refused("ends before"), lambda place: cut(disk()(place), METADATA)),
    Case("vhdx-cut-in-the-data", "vhdx", "half a block",
         BROKEN, lambda place: cut(disk()(place), FIRST_BLOCK + MIB // 2)),
]
