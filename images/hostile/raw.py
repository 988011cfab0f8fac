"""Raw disks that look like other formats."""

import os
import struct

from . import qcow2
from .case import Case, Harmless, Place, refused

MIB = 1 << 20


def disguised(start):
    """A raw disk of 1 MiB that begins with these bytes."""
    return lambda place: place.write("disk.raw", (0, start), length=MIB)


def as_read(start):
    return Harmless(MIB, {0: start})


def pipe(place: Place):
    os.mkfifo(place.folder / "disk.raw")
    return place.folder / "disk.raw"


BACKING = b"/etc/passwd"
QCOW2 = qcow2.header(backing_offset=512, backing_length=len(BACKING)).ljust(512, b"\0") + BACKING
DESCRIPTOR = b'# Disk DescriptorFile\ncreateType="monolithicFlat"\nRW 2048 FLAT "/etc/passwd" 0\n'
SPARSE = struct.pack("<4sIIQ", b"KDMV", 1, 3, 0)

CASES = [
    Case("raw-qcow2", "raw", "a disk that begins as a qcow2 with a backing file",
         as_read(QCOW2), disguised(QCOW2)),
    Case("raw-vmdk-text", "raw", "a disk that begins as the description of a VMDK",
         as_read(DESCRIPTOR), disguised(DESCRIPTOR)),
    Case("raw-vmdk-sparse", "raw", "a disk that begins as a sparse VMDK",
         as_read(SPARSE), disguised(SPARSE)),
    Case("raw-vhdx", "raw", "a disk that begins as a VHDX",
         as_read(b"vhdxfile"), disguised(b"vhdxfile")),
    Case("raw-pipe", "raw", "a pipe that nobody writes to", refused("neither a file"), pipe),
]
