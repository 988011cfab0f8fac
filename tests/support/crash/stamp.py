"""Cells of a disk that identify themselves.

A cell is the unit in which the oracle thinks: a 4 KiB block, or 128 bytes where
sub-block writes are tried. Its first 28 bytes, little endian:

    0   4  magic "CRSH"
    4   2  number of the disk
    6   2  length of the cell, bytes
    8   8  offset on the disk, bytes
    16  8  sequence number of the write
    24  4  CRC-32 of everything else in the cell

The rest is random and different for every write and place. A torn, misplaced
or foreign cell is distinguished from a good one without knowing the written data.
"""

import random
import struct
import zlib

BLOCK = 4096
FINE = 128

_HEADER = struct.Struct("<4sHHQQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"CRSH"
_BODY_START = _HEADER.size + _CHECKSUM.size
_POOL = random.Random("the bodies of cells").randbytes(1 << 20)
_ZEROES = bytes(BLOCK)

# The number of a cell of zeroes; sequence numbers start above it.
ZERO = 0


def stamp(disk, offset, length, sequence):
    """The bytes of one cell."""
    header = _HEADER.pack(_MAGIC, disk, length, offset, sequence)
    start = (sequence * 7919 + offset) % (len(_POOL) - BLOCK)
    body = _POOL[start : start + length - _BODY_START]
    checksum = zlib.crc32(body, zlib.crc32(header))
    return header + _CHECKSUM.pack(checksum) + body


def read_stamp(disk, offset, cell):
    """The sequence number a cell carries, `ZERO`, or a `Garbage` that says
    what is wrong with it."""
    if cell == _ZEROES[: len(cell)]:
        return ZERO
    magic, its_disk, length, its_offset, sequence = _HEADER.unpack_from(cell)
    if magic != _MAGIC:
        return Garbage(f"no stamp: {bytes(cell[:32]).hex()}")
    said = f"disk {its_disk} offset {its_offset:#x} length {length} sequence {sequence}"
    (checksum,) = _CHECKSUM.unpack_from(cell, _HEADER.size)
    if zlib.crc32(cell[_BODY_START:], zlib.crc32(cell[: _HEADER.size])) != checksum:
        return Garbage(f"torn, wrong checksum; its stamp says {said}")
    if (its_disk, its_offset, length) != (disk, offset, len(cell)):
        return Garbage(f"a cell of another place: {said}")
    return sequence


class Garbage:
    """A cell that was never written there."""

    def __init__(self, what):
        self.what = what

    def __repr__(self):
        return f"garbage ({self.what})"
