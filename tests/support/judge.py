"""Checks with all its readers that an image holds a disk."""

import random

from support.readers import Dissect, Libyal, Qemu

KIB, MIB, TIB = 1 << 10, 1 << 20, 1 << 40

# Name: size in bytes, stored ranges.
DISKS = {
    "one-sector": (512, [(0, 512)]),
    "whole-mib": (MIB, [(0, 4 * KIB), (MIB - 512, 512)]),
    "not-whole-sectors": (3 * MIB + 1001, [(0, 5000), (3 * MIB, 1001)]),
    "odd-geometry": (40 * MIB + 7 * 512, [(17 * MIB, 100 * KIB), (40 * MIB, 7 * 512)]),
    "many-blocks": (
        300 * MIB + 512,
        [(n * 9 * MIB + n * 512, 70 * KIB) for n in range(33)] + [(300 * MIB, 512)],
    ),
    "all-hole": (64 * MIB, []),
    "dense": (36 * MIB, [(0, 36 * MIB)]),
}


def save(tmp_path, size, stored):
    """A sparse raw file."""
    path = tmp_path / "vda.raw"
    with open(path, "wb") as file:
        file.truncate(size)
        for offset, length in stored:
            file.seek(offset)
            file.write(random.Random(offset + 1).randbytes(length))
    return path


def ranges_to_compare(size, stored):
    """Every stored range with its surroundings, and both ends of the disk."""
    edges = [(0, 8 * KIB), (size - 8 * KIB, 8 * KIB)]
    for offset, length in stored:
        edges.append((offset - 4 * KIB, length + 8 * KIB))
    for offset, length in edges:
        start = max(0, offset // 512 * 512)
        end = min(size, offset + length)
        yield start, end - start


def readers_of(image, size, sector_bytes):
    """The readers for the format."""
    if image.format == "raw":
        return [Qemu]
    # libqcow 20201213 knows no external data files.
    if image.format == "qcow2-external":
        return [Qemu, Dissect]
    # QEMU opens no VHDX of 4 KiB sectors.
    if image.driver == "vhdx" and sector_bytes == 4096:
        return [Libyal, Dissect]
    # libvhdi 20210425 reads zeroes from a large fixed VHDX; from QEMU's, too.
    if image.format == "vhdx-fixed" and size > TIB:
        return [Qemu, Dissect]
    return [Qemu, Libyal, Dissect]


def assert_same(image, raw, size, stored, sector_bytes=512):
    """All readers see the raw disk, with zeroes up to a whole sector; QEMU finds no error."""
    # QEMU itself counts a raw file in sectors of 512 bytes.
    shown_sector = 512 if image.format == "raw" else sector_bytes
    shown = -(-size // shown_sector) * shown_sector
    with open(raw, "rb") as truth:
        for reader_type in readers_of(image, size, sector_bytes):
            reader = reader_type(image)
            assert reader.size_bytes == shown, reader_type
            if reader_type is Qemu:
                reader.check()
                # In a larger one it might read only holes.
                if size < 1 << 30:
                    reader.compare(raw)
                    continue
            for offset, length in ranges_to_compare(shown, stored):
                truth.seek(offset)
                content = truth.read(length).ljust(length, b"\0")
                assert reader.read(offset, length) == content, (reader_type, offset)
