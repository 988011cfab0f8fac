"""NBD: every restore point's disk as an image file in every format."""

import subprocess
import time

import nbd
import pytest

from support.image import Image
from support.nbdserver import block_status, read_all, refused
from support.readers import Dissect, Libyal, Qemu, qemu
from support.served import FILES, PAIRS, SINGLE, copy, driver_of, image_node, node

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

# QEMU looks for the data of a flat VMDK next to the descriptor, which NBD does not have.
OVER_NBD = SINGLE + ["vda.external.qcow2"]
# Without ids: raw and qcow2.
WITH_IDS = [file for file in [*SINGLE, *PAIRS] if not file.endswith(("raw", "qcow2"))]


def names_of(server):
    handle = nbd.NBD()
    handle.set_opt_mode(True)
    handle.connect_unix(str(server.socket))
    names = []
    handle.opt_list(lambda name, _description: names.append(name))
    handle.opt_abort()
    return names


def content_of(server, export):
    with server.connect(export) as handle:
        return read_all(handle)


@pytest.mark.parametrize("file", OVER_NBD)
def test_qemu_reads_the_image_over_nbd(point, nbdkit, file):
    server = nbdkit()
    image = image_node(server, point, file)
    qemu("qemu-img", "compare", "--image-opts", node(server, f"{point}/vda"), image)
    if driver_of(file) in ("vhdx", "vmdk", "qcow2"):
        qemu("qemu-img", "check", "--image-opts", image)


@pytest.mark.parametrize("file", [*SINGLE, *PAIRS])
def test_a_copied_file_is_an_image_to_every_reader(
    point, image, nbdkit, tmp_path, monkeypatch, file
):
    copied = copy(nbdkit(), point, file, tmp_path / "copy")
    # Where QEMU looks for the data file of a qcow2.
    monkeypatch.chdir(tmp_path / "copy")
    opened = Qemu(copied)
    opened.check()
    opened.compare(tmp_path / "vda.raw")
    readers = [Dissect, Libyal]
    if file.endswith(".raw"):
        readers = []
    if file == "vda.external.qcow2":
        readers = [Dissect]  # libqcow knows no external data files
    for reader in readers:
        opened = reader(copied)
        assert opened.size_bytes == len(image)
        assert opened.read(0, len(image)) == image.content, reader


@pytest.mark.parametrize("file", FILES)
def test_the_content_of_synthetic_points_is_shown(coldrise, live, image, nbdkit, tmp_path, file):
    with nbdkit() as server, server.connect(live) as handle:
        for offset, data in [(3 * MIB - 7, b"written" * 999), (5 * MIB, bytes(64 * KIB))]:
            handle.pwrite(data, offset)
            image.write(offset, data)
        handle.trim(MIB // 2, 0)
        image.zero(0, MIB // 2)
        handle.flush()
    sealed = coldrise.json("seal", "trial")["address"]
    server = nbdkit()
    if file in OVER_NBD:
        raw = image.save(tmp_path / "expected.raw")
        qemu("qemu-img", "compare", "--image-opts", f"driver=raw,file.filename={raw}",
             image_node(server, sealed, file))  # fmt: skip
    elif file in PAIRS.values():
        assert content_of(server, f"{sealed}/{file}") == image.content
    else:
        copied = Qemu(copy(server, sealed, file, tmp_path / "copy"))
        copied.compare(image.save(tmp_path / "expected.raw"))


def test_data_files_are_the_disk(coldrise, nbdkit, tmp_path):
    odd = Image(3 * MIB + 1001)
    odd.fill(0, 5000, "first")
    odd.fill(3 * MIB, 1001, "last")
    point = coldrise.backup("web01", vda=odd.save(tmp_path / "odd.raw"))
    server = nbdkit()
    assert content_of(server, f"{point}/vda.raw") == odd.content
    # A VMDK counts in sectors of 512 bytes.
    whole_sectors = odd.content + bytes(-len(odd) % 512)
    assert content_of(server, f"{point}/vda-flat.vmdk") == whole_sectors


def test_ids_are_stable_across_servers(coldrise, point, image, nbdkit, tmp_path):
    # The same content on another disk, of another machine, and in another point.
    raw = image.save(tmp_path / "same.raw")
    other = coldrise.backup("web02", vda=raw, vdb=raw)
    coldrise.publish(point, "trial")
    sealed = coldrise.json("seal", "trial")["address"]

    first, second = nbdkit(), nbdkit()
    for file in WITH_IDS:
        content = content_of(first, f"{point}/{file}")
        assert content_of(second, f"web01/latest~1/{file}") == content
        of_vdb = f"{other}/{file.replace('vda', 'vdb')}"
        others = [f"{other}/{file}", f"{sealed}/{file}", of_vdb]
        assert len({content, *(content_of(second, name) for name in others)}) == 4, file


def test_a_vhd_has_the_time_of_its_point(coldrise, point, nbdkit):
    created_at_s = coldrise.json("show", point)["created_at_ms"] // 1000
    footer = content_of(nbdkit(), f"{point}/vda.vhd")[-512:]
    assert footer[:8] == b"conectix"
    year_2000 = 946684800
    assert int.from_bytes(footer[24:28], "big") + year_2000 == created_at_s


@pytest.mark.parametrize("file", FILES)
def test_holes_are_reported_and_read_as_zeroes(point, nbdkit, file):
    server = nbdkit()
    with server.connect(f"{point}/{file}") as handle:
        content = read_all(handle)
        extents = block_status(handle)
    assert sum(length for _, length, _ in extents) == len(content)
    for offset, length, flags in extents:
        if flags & nbd.STATE_ZERO:
            assert not any(content[offset : offset + length]), (offset, length)
    stored = sum(length for _, length, flags in extents if not flags & nbd.STATE_HOLE)
    # Some 2 MiB of the disk; a qcow2 has four tables of 2 MiB.
    assert stored < 11 * MIB


@pytest.mark.parametrize("file", ["vda.raw", "vda.vhd", "vda.vhdx", "vda.qcow2"])
def test_holes_match_the_disk(point, image, nbdkit, file):
    server = nbdkit()
    with server.connect(f"{point}/vda") as handle:
        of_disk = block_status(handle)
    with server.connect(f"{point}/{file}") as handle:
        start = read_all(handle).index(image.read(0, 4 * KIB))
        of_file = block_status(handle, start, len(image))
    assert [(offset - start, length, flags) for offset, length, flags in of_file] == of_disk


def test_images_are_listed_on_request(coldrise, point, live, nbdkit):
    disks = [live, f"{point}/vda"]
    assert names_of(nbdkit()) == disks
    assert names_of(nbdkit("list-formats=no")) == disks

    server = nbdkit("list-formats=yes")
    names = names_of(server)
    of_point = [name for name in names if name.startswith(point)]
    assert of_point == sorted([f"{point}/vda", *(f"{point}/{file}" for file in FILES)])
    for name in names:
        with server.connect(name) as handle:
            assert handle.get_size() > 0

    socket = server.socket.parent / "of-the-program"
    arguments = ["serve", "nbd", "--socket", socket, "--list-formats"]
    serving = coldrise.start("--json", *arguments, stdout=subprocess.PIPE)
    try:
        assert "ready" in serving.stdout.readline()
        server.socket = socket
        assert names_of(server) == names
    finally:
        serving.terminate()
        serving.communicate(timeout=30)


def test_no_name_still_means_the_only_disk(point, nbdkit):
    with nbdkit("list-formats=yes").connect("") as handle:
        assert handle.get_canonical_export_name() == f"{point}/vda"


def test_images_are_described_and_read_only(point, nbdkit):
    server = nbdkit()
    for file in FILES:
        with server.connect(f"web01/latest/{file}", strict=False) as handle:
            description = handle.get_export_description()
            assert file in description and point.partition("/")[2] in description
            assert handle.is_read_only() and handle.can_multi_conn()
            with pytest.raises(nbd.Error):
                handle.pwrite(b"x", 0)
            # From the first byte to the last, for any content.
            size = handle.get_size()
            handle.cache(size, 0)
            with pytest.raises(nbd.Error):
                handle.pread(2, size - 1)
            assert len(handle.pread(1, size - 1)) == 1


def test_a_disk_name_takes_precedence_over_an_image_name(coldrise, nbdkit, tmp_path):
    disks = {}
    for name in ["vda", "vda.vhdx", "vda-flat", "vda.dynamic"]:
        disks[name] = Image(MIB)
        disks[name].fill(0, 4 * KIB, name)
    paths = {name: disk.save(tmp_path / name) for name, disk in disks.items()}
    point = coldrise.backup("web01", **paths)
    server = nbdkit("list-formats=yes")

    assert content_of(server, f"{point}/vda.vhdx") == disks["vda.vhdx"].content
    for file, disk in [
        ("vda.vhdx.vhdx", "vda.vhdx"),
        ("vda.dynamic.vhdx", "vda.dynamic"),
        ("vda.dynamic.vhd", "vda.dynamic"),
        ("vda.vhd", "vda"),
        ("vda-flat.qcow2", "vda-flat"),
    ]:
        images = [node(server, f"{point}/{disk}"), image_node(server, point, file)]
        qemu("qemu-img", "compare", "--image-opts", *images)
    # Its data would be in vda-flat.vmdk, which is the descriptor of disk vda-flat.
    refused(server, f"{point}/vda.vmdk")
    assert "vda-flat.vmdk" in server.messages()
    listed = names_of(server)
    assert f"{point}/vda.vmdk" not in listed
    assert listed.count(f"{point}/vda.vhdx") == 1
    assert len(set(listed)) == len(listed)


def test_a_disk_of_the_longest_name_is_an_image_too(coldrise, image, nbdkit, tmp_path):
    disk = "v" * 63
    point = coldrise.backup("m" * 63, **{disk: image.save(tmp_path / "disk.raw")})
    server = nbdkit()
    name = f"{point}/{disk}.external.qcow2"
    with server.connect(name) as handle:
        assert handle.pread(4, 0) == b"QFI\xfb"


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("web01/latest/vda.iso", ["vda.iso", "vda.vhdx", "vda.sparse.vmdk"]),
        ("web01/latest/vdb.vhdx", ["no disk vdb.vhdx, only vda"]),
        ("web01/latest/vda.stream.vmdk", ["cannot be served as a file", "restore"]),
        ("web01/latest/vda.vhdx.vhdx", ["neither a disk nor an image"]),
        ("web01/latest/vda.VHDX", ["a-z 0-9"]),
        ("web01/latest/.vhdx", ["start with a letter or digit"]),
        ("web01/latest~9/vda.vhdx", ["web01"]),
        ("live/trial/vdb.vhdx", ["no disk vdb.vhdx, only vda"]),
        ("live/other/vda.vhdx", ["no session other"]),
    ],
)
def test_names_without_an_image_are_refused(live, nbdkit, name, messages):
    server = nbdkit()
    refused(server, name)
    for message in messages:
        assert message in server.messages()
    with server.connect(live) as handle:
        assert handle.get_size() > 0, "the server serves on"


def test_a_large_disk_opens_quickly_in_formats_that_can_hold_it(coldrise, nbdkit, tmp_path):
    raw, page = tmp_path / "large.raw", b"page" * KIB
    places = [0, GIB, TIB + 4 * KIB, 2 * TIB - 4 * KIB]
    with open(raw, "wb") as file:
        file.truncate(2 * TIB + 512)
        for place in places:
            file.seek(place)
            file.write(page)
    point = coldrise.backup("web01", vda=raw)
    server = nbdkit("list-formats=yes")
    vhds = {"vda.vhd", "vda.dynamic.vhd"}
    expected = {f"{point}/{file}" for file in FILES if file not in vhds}
    assert set(names_of(server)) == {f"{point}/vda", *expected}
    for file in sorted(vhds):
        refused(server, f"{point}/{file}")
    assert "2040 GiB" in server.messages()
    assert "vda.vhdx can hold it" in server.messages()

    for file in sorted({*FILES} - vhds):
        start = time.monotonic()
        with server.connect(f"{point}/{file}") as handle:
            # A few milliseconds, as only what is stored is walked.
            assert time.monotonic() - start < 5, file
            if file == "vda.dynamic.vhdx":
                assert handle.get_size() < 300 * MIB
        if file in OVER_NBD:
            image = image_node(server, point, file)
            for place in places:
                assert part_of(image, place - place % MIB, MIB, tmp_path).count(page) == 1


def part_of(image, offset, length, folder):
    """QEMU's view of an image; whole MiB. (It counts skipped data, too.)"""
    part = folder / "part"
    qemu("qemu-img", "dd", "--image-opts", "-O", "raw", f"bs={MIB}", f"skip={offset // MIB}",
         f"count={(offset + length) // MIB}", f"if={image}", f"of={part}")  # fmt: skip
    return part.read_bytes()
