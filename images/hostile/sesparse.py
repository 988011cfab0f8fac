"""A small writer of ESXi's SESparse extents, which qemu-img can read but not write."""

import struct

SECTOR = 512
GRAIN = 8 * SECTOR
TABLE_ENTRIES = 64 * SECTOR // 8
MAGIC, VERSION, VOLATILE_MAGIC = 0xCAFEBABE, 0x200000001, 0xCAFECAFE
# Sectors at which the parts begin.
VOLATILE, DIRECTORY, TABLES = 1, 8, 16
UNMAPPED, ZERO, STORED = 1 << 60, 2 << 60, 3 << 60


def extent(size_bytes, grains, states=None, replay=False):
    """The bytes of an extent: `grains` are the stored grains by number, `states` the entries
    of other grains (UNMAPPED, ZERO)."""
    count = -(-size_bytes // GRAIN)
    tables = -(-count // TABLE_ENTRIES)
    directory_sectors = -(-tables * 8 // SECTOR)
    assert DIRECTORY + directory_sectors <= TABLES
    first_grain = TABLES + tables * 64
    entries = [0] * (tables * TABLE_ENTRIES)
    content = b""
    for number, (index, grain) in enumerate(sorted(grains.items())):
        assert len(grain) == GRAIN
        # The entry has the number's upper bits below its low 12 bits.
        entries[index] = STORED | (number & 0xFFF) << 48 | number >> 12
        content += grain
    for index, state in (states or {}).items():
        entries[index] = state
    header = struct.pack(
        "<26Q", MAGIC, VERSION, size_bytes // SECTOR, 8, 64, 0, 0, 0, 0, 0, VOLATILE, 1, 2, 1, 3, 1,
        DIRECTORY, directory_sectors, TABLES, tables * 64, TABLES, 0, TABLES, 0, first_grain,
        len(content) // SECTOR)
    volatile = struct.pack("<4Q", VOLATILE_MAGIC, 0, 0, int(replay))
    directory = struct.pack(f"<{tables}Q", *(1 << 60 | number for number in range(tables)))
    parts = ((0, header), (VOLATILE, volatile), (DIRECTORY, directory),
             (TABLES, struct.pack(f"<{len(entries)}Q", *entries)), (first_grain, content))
    whole = bytearray(first_grain * SECTOR + len(content))
    for sector, part in parts:
        whole[sector * SECTOR : sector * SECTOR + len(part)] = part
    return bytes(whole)


def descriptor(size_bytes, name, kind="seSparse", extent_type="SESPARSE"):
    return (
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n"
        f'createType="{kind}"\nRW {size_bytes // SECTOR} {extent_type} "{name}"\n'
        'ddb.adapterType = "lsilogic"\n').encode()
