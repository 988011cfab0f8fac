"""Every format, as readers that others wrote see it: byte for byte the disk."""

import random

import pytest

from support.image import Image
from support.layouts import COMPACT, WRITABLE, Refused, lay_out
from support.readers import Dissect, Libyal, Qemu

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

FORMATS = WRITABLE + COMPACT
NO_EMPTY_DISK = [name for name in FORMATS if name.startswith(("vhd", "vmdk"))]

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
    """Every stored range with what lies around it, and both ends of the disk."""
    edges = [(0, 8 * KIB), (size - 8 * KIB, 8 * KIB)]
    for offset, length in stored:
        edges.append((offset - 4 * KIB, length + 8 * KIB))
    for offset, length in edges:
        start = max(0, offset // 512 * 512)
        end = min(size, offset + length)
        yield start, end - start


def readers_of(image, size, sector_bytes):
    """The readers that know the format."""
    if image.format == "raw":
        return [Qemu]
    # libqcow 20201213 knows no external data files.
    if image.format == "qcow2-external":
        return [Qemu, Dissect]
    # QEMU opens no VHDX of 4 KiB sectors.
    if image.driver == "vhdx" and sector_bytes == 4096:
        return [Libyal, Dissect]
    # libvhdi 20210425 reads zeroes from a large fixed VHDX; from QEMU's, too.
    if image.format == "vhdx" and size > TIB:
        return [Qemu, Dissect]
    return [Qemu, Libyal, Dissect]


def assert_same(image, raw, size, stored, sector_bytes=512):
    """All readers see the raw disk, with zeroes up to a whole sector."""
    # QEMU itself counts a raw file in sectors of 512 bytes.
    shown_sector = 512 if image.format == "raw" else sector_bytes
    shown = -(-size // shown_sector) * shown_sector
    with open(raw, "rb") as truth:
        for reader_type in readers_of(image, size, sector_bytes):
            reader = reader_type(image)
            assert reader.size_bytes == shown, reader_type
            for offset, length in ranges_to_compare(shown, stored):
                truth.seek(offset)
                content = truth.read(length).ljust(length, b"\0")
                assert reader.read(offset, length) == content, (reader_type, offset)


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize("disk", DISKS)
def test_every_reader_sees_the_disk(tmp_path, image_format, disk):
    size, stored = DISKS[disk]
    raw = save(tmp_path, size, stored)
    image = lay_out(image_format, raw, tmp_path / "image")
    assert_same(image, raw, size, stored)
    opened = Qemu(image)
    opened.check()
    opened.compare(raw)


@pytest.mark.parametrize("image_format", ["vhdx", "vhdx-dynamic", "raw", "qcow2"])
@pytest.mark.parametrize("size", [512, 4 * KIB, 5 * MIB + 512, 64 * MIB])
def test_disks_of_4k_sectors(tmp_path, image_format, size):
    stored = [(0, 512), (size - 512, 512)]
    raw = save(tmp_path, size, stored)
    image = lay_out(image_format, raw, tmp_path / "image", sector_bytes=4096)
    assert_same(image, raw, size, stored, sector_bytes=4096)


@pytest.mark.parametrize("image_format", ["vhd", "vhd-dynamic", "vmdk", "vmdk-stream"])
def test_4k_sectors_are_refused_where_a_format_counts_in_512(tmp_path, image_format):
    raw = save(tmp_path, MIB, [])
    with pytest.raises(Refused, match="sectors of 4096 bytes"):
        lay_out(image_format, raw, tmp_path / "image", sector_bytes=4096)


@pytest.mark.parametrize("image_format", FORMATS)
def test_an_empty_disk(tmp_path, image_format):
    raw = save(tmp_path, 0, [])
    if image_format in NO_EMPTY_DISK:
        with pytest.raises(Refused, match="0 bytes"):
            lay_out(image_format, raw, tmp_path / "image")
        return
    image = lay_out(image_format, raw, tmp_path / "image")
    assert Qemu(image).size_bytes == 0
    Qemu(image).check()


@pytest.mark.parametrize("image_format", FORMATS)
def test_two_tib_and_a_sector(tmp_path, image_format):
    size = 2 * TIB + 512
    stored = [(0, MIB), (TIB + 5 * 512, 70 * KIB), (2 * TIB - 4 * KIB, 4 * KIB + 512)]
    raw = save(tmp_path, size, stored)
    if image_format.startswith("vhd") and not image_format.startswith("vhdx"):
        with pytest.raises(Refused, match="2040 GiB"):
            lay_out(image_format, raw, tmp_path / "image")
        return
    image = lay_out(image_format, raw, tmp_path / "image")
    assert sum(part.path.stat().st_blocks for part in image.parts) * 512 < 64 * MIB
    assert_same(image, raw, size, stored)
    Qemu(image).check()


def test_the_largest_vhd(tmp_path):
    stored = [(0, 4 * KIB), (2040 * GIB - 4 * KIB, 4 * KIB)]
    raw = save(tmp_path, 2040 * GIB, stored)
    for image_format in ("vhd", "vhd-dynamic"):
        image = lay_out(image_format, raw, tmp_path / image_format)
        assert_same(image, raw, 2040 * GIB, stored)


@pytest.mark.parametrize("image_format", ["vhd", "vmdk", "vmdk-hosted", "qcow2", "qcow2-external"])
def test_a_writable_image_maps_the_disk_in_one_piece(tmp_path, image_format):
    size, stored = DISKS["many-blocks"]
    image = lay_out(image_format, save(tmp_path, size, stored), tmp_path / "image")
    places = {piece["offset"] - piece["start"] for piece in Qemu(image).map() if piece["data"]}
    disk = [segment for segment in image.data.segments if segment["source"] == "disk"]
    assert places == {disk[0]["offset_bytes"]}


@pytest.mark.parametrize(
    ("image_format", "block"),
    [("vhd-dynamic", 2 * MIB), ("vhdx-dynamic", 2 * MIB), ("vmdk-sparse", 64 * KIB)],
)
def test_a_compact_image_holds_the_touched_blocks_alone(tmp_path, image_format, block):
    size, stored = DISKS["many-blocks"]
    image = lay_out(image_format, save(tmp_path, size, stored), tmp_path / "image")
    touched = set()
    for offset, length in stored:
        touched.update(range(offset // block, (offset + length - 1) // block + 1))
    held = sum(min(block, size - number * block) for number in touched)
    disk = [segment for segment in image.data.segments if segment["source"] == "disk"]
    assert sum(segment["length_bytes"] for segment in disk) == held
    if image_format == "vmdk-sparse":
        mapped = [piece for piece in Qemu(image).map() if piece["data"]]
        assert sum(piece["length"] for piece in mapped) == held
    assert image.data.size_bytes < len(touched) * (block + 4 * KIB) + 8 * MIB


def test_an_image_says_what_it_is(tmp_path):
    image = Image(MIB)
    raw = image.save(tmp_path / "vda.raw")
    details = {
        name: Qemu(lay_out(name, raw, tmp_path / name)).details
        for name in ("vmdk", "vmdk-hosted", "vmdk-sparse", "vmdk-stream", "qcow2-external")
    }
    kinds = [details[name]["create-type"] for name in details if name.startswith("vmdk")]
    assert kinds == ["vmfs", "monolithicFlat", "monolithicSparse", "streamOptimized"]
    assert details["qcow2-external"]["data-file-raw"] is True
