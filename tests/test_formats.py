"""Every format, as readers that others wrote see it: byte for byte the disk."""

import pytest

from support.image import Image
from support.judge import DISKS, assert_same, save
from support.layouts import COMPACT, WRITABLE, Refused, lay_out
from support.readers import Qemu

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

FORMATS = WRITABLE + COMPACT
NO_EMPTY_DISK = [name for name in FORMATS if name.startswith(("vhd", "vmdk"))]


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize("disk", DISKS)
def test_every_reader_sees_the_disk(tmp_path, image_format, disk):
    size, stored = DISKS[disk]
    raw = save(tmp_path, size, stored)
    image = lay_out(image_format, raw, tmp_path / "image")
    assert_same(image, raw, size, stored)


@pytest.mark.parametrize("image_format", ["vhdx-fixed", "vhdx", "raw", "qcow2-full", "qcow2"])
@pytest.mark.parametrize("size", [512, 4 * KIB, 5 * MIB + 512, 64 * MIB])
def test_disks_of_4k_sectors(tmp_path, image_format, size):
    stored = [(0, 512), (size - 512, 512)]
    raw = save(tmp_path, size, stored)
    image = lay_out(image_format, raw, tmp_path / "image", sector_bytes=4096)
    assert_same(image, raw, size, stored, sector_bytes=4096)


@pytest.mark.parametrize("image_format", ["vhd-fixed", "vhd", "vmdk-esxi", "vmdk-stream"])
def test_4k_sectors_are_refused_by_formats_with_512_byte_sectors(tmp_path, image_format):
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


def test_the_largest_vhd(tmp_path):
    stored = [(0, 4 * KIB), (2040 * GIB - 4 * KIB, 4 * KIB)]
    raw = save(tmp_path, 2040 * GIB, stored)
    for image_format in ("vhd-fixed", "vhd"):
        image = lay_out(image_format, raw, tmp_path / image_format)
        assert_same(image, raw, 2040 * GIB, stored)


@pytest.mark.parametrize("image_format", ["vhd-fixed", "vmdk-esxi", "vmdk-hosted", "qcow2-full", "qcow2-external"])
def test_a_writable_image_maps_the_disk_in_one_piece(tmp_path, image_format):
    size, stored = DISKS["many-blocks"]
    image = lay_out(image_format, save(tmp_path, size, stored), tmp_path / "image")
    places = {piece["offset"] - piece["start"] for piece in Qemu(image).map() if piece["data"]}
    disk = [segment for segment in image.data.segments if segment["source"] == "disk"]
    assert places == {disk[0]["offset_bytes"]}


@pytest.mark.parametrize(
    ("image_format", "block"),
    [("vhd", 2 * MIB), ("vhdx", 2 * MIB), ("vmdk", 64 * KIB), ("qcow2", 64 * KIB)],
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
    if image_format in ("vmdk", "qcow2"):
        mapped = [piece for piece in Qemu(image).map() if piece["data"]]
        assert sum(piece["length"] for piece in mapped) == held
    assert image.data.size_bytes < len(touched) * (block + 4 * KIB) + 8 * MIB


def test_an_image_reports_its_type(tmp_path):
    image = Image(MIB)
    raw = image.save(tmp_path / "vda.raw")
    details = {
        name: Qemu(lay_out(name, raw, tmp_path / name)).details
        for name in ("vmdk-esxi", "vmdk-hosted", "vmdk", "vmdk-stream", "qcow2-external")
    }
    kinds = [details[name]["create-type"] for name in details if name.startswith("vmdk")]
    assert kinds == ["vmfs", "monolithicFlat", "monolithicSparse", "streamOptimized"]
    assert details["qcow2-external"]["data-file-raw"] is True
