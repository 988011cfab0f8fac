"""Every kind of image that qemu-img can write, and those that it can only read: imported
byte for byte, holes as nothing, from any location of the file."""

import itertools
import os
import struct
import subprocess
import sys

import pytest

from support.cli import PROGRAM, ROOT, Coldrise
from support.image import Image
from support.sources import is_same_disk, tool

sys.path.insert(0, str(ROOT / "images"))

from hostile import sesparse, vhd, vhdx  # noqa: E402

MIB = 1 << 20
GIB = 1 << 30
CHUNK = 16 << 10
PIECES = ((0, MIB), (9 * MIB + 4096, 2 * MIB), (20 * MIB, 512))
SIZE = 20 * MIB + 512
NOBODY = 65534

QCOW2 = [
    "compat=0.10", "compat=1.1", "cluster_size=512", "cluster_size=4k", "cluster_size=2M",
    "extended_l2=on,cluster_size=128k", "lazy_refcounts=on", "refcount_bits=1", "refcount_bits=64",
    "preallocation=metadata", "preallocation=falloc", "preallocation=full",
    "-c compression_type=zlib", "-c compression_type=zstd", "-c cluster_size=2M",
    "-c compat=0.10,cluster_size=4k",
]
VHD = [f"subformat={kind},force_size={size}"
       for kind in ("dynamic", "fixed") for size in ("on", "off")]
VHDX = [
    "subformat=dynamic", "subformat=fixed", "subformat=dynamic,block_size=1M",
    "subformat=dynamic,block_size=256M", "subformat=fixed,block_size=16M",
    "subformat=dynamic,block_state_zero=off", "subformat=dynamic,log_size=4M",
]
VMDK = [
    "subformat=monolithicSparse", "subformat=monolithicFlat", "subformat=twoGbMaxExtentSparse",
    "subformat=twoGbMaxExtentFlat", "subformat=streamOptimized",
    "subformat=monolithicSparse,zeroed_grain=on", "subformat=monolithicSparse,compat6=on",
    "subformat=streamOptimized,adapter_type=lsilogic",
]
KINDS = [(word, driver, options)
         for word, driver, all_options in (("qcow2", "qcow2", QCOW2), ("vhd", "vpc", VHD),
                                           ("vhdx", "vhdx", VHDX), ("vmdk", "vmdk", VMDK))
         for options in all_options]


@pytest.fixture(scope="module")
def coldrise(tmp_path_factory):
    program = Coldrise(tmp_path_factory.mktemp("formats") / "repository")
    program.init("--no-encryption")
    return program


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A disk and its raw file: 2 MiB of noise that no chunk's end meets, and holes."""
    image = Image(SIZE)
    for offset, length in PIECES:
        image.fill(offset, length, f"piece at {offset}")
    return image, image.save(tmp_path_factory.mktemp("disk") / "disk.raw")


def stored_chunks():
    return len({chunk for offset, length in PIECES
                for chunk in range(offset // CHUNK, -(-(offset + length) // CHUNK))})


# A machine gets one point a second: each import has its own.
machines = (f"machine{number}" for number in itertools.count())


def backed_up(coldrise, source):
    """The address of the point's disk, and the backup's report of it."""
    made = coldrise.json("backup", next(machines), f"vda={source}")
    return f"{made['address']}/vda", made["disks"][0]


def restored(coldrise, address, tmp_path):
    target = tmp_path / "restored.raw"
    coldrise.json("restore", address, target, "--force")
    return target


def convert(raw, target, driver, options):
    compress = ["-c"] if options.startswith("-c ") else []
    tool("qemu-img", "convert", *compress, "-f", "raw", "-O", driver, "-o",
         options.removeprefix("-c "), raw, target)
    return target


@pytest.mark.parametrize("word, driver, options", KINDS)
def test_every_kind_that_qemu_writes(coldrise, disk, tmp_path, word, driver, options):
    image, raw = disk
    path = convert(raw, tmp_path / f"disk.{word}", driver, options)
    address, report = backed_up(coldrise, path)
    content = restored(coldrise, address, tmp_path).read_bytes()
    assert content[: len(image)] == bytes(image.content)
    # Formats that count in larger units are larger, by zeroes.
    assert len(content) - len(image) < 8 * MIB and not any(content[len(image):])
    assert report["new_chunks"] + report["known_chunks"] == stored_chunks()


@pytest.mark.parametrize("word, driver, options", [
    ("qcow2", "qcow2", "cluster_size=64k"), ("vhd", "vpc", "subformat=dynamic"),
    ("vhdx", "vhdx", "subformat=dynamic,block_size=1M"),
    ("vmdk", "vmdk", "subformat=twoGbMaxExtentSparse"),
    ("vmdk", "vmdk", "subformat=twoGbMaxExtentFlat"),
])
def test_holes_cost_nothing(coldrise, tmp_path, word, driver, options):
    """A large disk with little in it, in several extents where the format splits."""
    raw = tmp_path / "large.raw"
    with open(raw, "wb") as file:
        file.truncate(5 * GIB)
        for offset in (0, 3 * GIB - 65536, 5 * GIB - 4096):
            file.seek(offset)
            file.write(os.urandom(4096))
    path = convert(raw, tmp_path / f"large.{word}", driver, options)
    address, report = backed_up(coldrise, path)
    assert report["read_bytes"] <= 16 * MIB
    assert is_same_disk(restored(coldrise, address, tmp_path), "raw", raw, "raw")


def test_the_current_state_of_an_image_with_snapshots(coldrise, disk, tmp_path):
    image, raw = disk
    path = convert(raw, tmp_path / "disk.qcow2", "qcow2", "cluster_size=64k")
    tool("qemu-img", "snapshot", "-c", "before", path)
    tool("qemu-io", "-f", "qcow2", "-c", "write -P 9 1M 192k", path)
    tool("qemu-img", "snapshot", "-c", "after", path)
    tool("qemu-io", "-f", "qcow2", "-c", "write -P 7 1M 64k", "-c", "write -z 0 64k", path)
    expected = bytearray(image.content)
    expected[MIB : MIB + (192 << 10)] = b"\x07" * (64 << 10) + b"\x09" * (128 << 10)
    expected[: 64 << 10] = bytes(64 << 10)
    address, _ = backed_up(coldrise, path)
    assert restored(coldrise, address, tmp_path).read_bytes() == expected


@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
@pytest.mark.parametrize("creator", [b"vbox", b"vpc ", b"qemu", b"win "])
def test_the_footer_of_a_vhd_is_kept_for_every_creator(coldrise, tmp_path, creator, kind):
    """Most programs' disks are larger than their geometry tells, which some readers go by."""
    raw = tmp_path / "disk.raw"
    raw.write_bytes(os.urandom(24 * MIB))
    path = convert(raw, tmp_path / "disk.vhd", "vpc", f"subformat={kind},force_size=on")
    content = bytearray(path.read_bytes())
    for at in (0, len(content) - 512):
        if content[at : at + 8] == b"conectix":
            content[at + 28 : at + 32] = creator
            # 722 cylinders, 4 heads, 17 sectors: 56 sectors fewer than there are.
            content[at + 56 : at + 60] = struct.pack(">HBB", 722, 4, 17)
            content[at : at + 512] = vhd.summed(bytes(content[at : at + 512]), 64)
    path.write_bytes(content)
    address, report = backed_up(coldrise, path)
    assert report["size_bytes"] == 24 * MIB
    assert restored(coldrise, address, tmp_path).read_bytes() == raw.read_bytes()


def test_se_sparse(coldrise, disk, tmp_path):
    """ESXi's snapshots of large disks, in more than one grain table."""
    image, _ = disk
    grains, states = {}, {2: sesparse.ZERO, 3000: sesparse.UNMAPPED}
    for index in range(-(-SIZE // sesparse.GRAIN)):
        offset = index * sesparse.GRAIN
        grain = image.read(offset, min(sesparse.GRAIN, SIZE - offset))
        if any(grain) and index not in states:
            grains[index] = grain.ljust(sesparse.GRAIN, b"\0")
    expected = bytearray(image.content)
    for index in states:
        expected[index * sesparse.GRAIN : (index + 1) * sesparse.GRAIN] = bytes(sesparse.GRAIN)
    assert len(grains) > 700 and max(grains) >= sesparse.TABLE_ENTRIES
    (tmp_path / "disk-sesparse.vmdk").write_bytes(sesparse.extent(SIZE, grains, states))
    path = tmp_path / "disk.vmdk"
    path.write_bytes(sesparse.descriptor(SIZE, "disk-sesparse.vmdk"))
    address, report = backed_up(coldrise, path)
    assert restored(coldrise, address, tmp_path).read_bytes() == expected
    assert report["read_bytes"] < 4 * MIB


def test_every_state_of_a_vhdx_block(coldrise, tmp_path):
    """Which blocks are read is ours to find out: QEMU's reader must agree."""
    class Place:
        folder = tmp_path

        @staticmethod
        def write(name, *parts, length=0):
            with open(tmp_path / name, "wb") as file:
                for offset, part in parts:
                    file.seek(offset)
                    file.write(part)
                file.truncate(max(length, file.tell()))
            return tmp_path / name

    # One block of each state, and blocks on both sides of a sector bitmap's entry.
    ratio = (1 << 23) * 512 // MIB
    bat = [(0, 0)] * (ratio + 3)
    for block, state in enumerate((0, 1, 2, 3, 5)):
        bat[block] = (0, state)
    bat[7] = bat[ratio - 1] = bat[ratio + 2] = (vhdx.FIRST_BLOCK, vhdx.FULLY_PRESENT)
    size = (ratio + 2) * MIB
    path = vhdx.disk(size=size, bat=bat)(Place)
    address, report = backed_up(coldrise, path)
    target = restored(coldrise, address, tmp_path)
    with open(target, "rb") as file:
        for block in (0, 1, 6, 8, ratio - 2):
            file.seek(block * MIB)
            assert not any(file.read(MIB)), block
        for block in (7, ratio - 1, ratio + 1):
            file.seek(block * MIB)
            assert file.read(len(vhdx.PATTERN)) == vhdx.PATTERN, block
    assert report["size_bytes"] == size and report["read_bytes"] == 3 * MIB
    assert is_same_disk(target, "raw", path, "vhdx")


@pytest.mark.parametrize("name", [
    "plain.qcow2", "a b,c=d:e.qcow2", 'quoted "{x}" \\n.qcow2', "ümlaut-\u2603.qcow2", "-o.qcow2"])
def test_odd_names_links_and_relative_paths(coldrise, disk, tmp_path, name):
    image, raw = disk
    folder, links = tmp_path / "a folder", tmp_path / "links"
    folder.mkdir()
    links.mkdir()
    convert(raw, folder / name, "qcow2", "cluster_size=64k")
    (links / "way").symlink_to(folder)
    (links / "disk.qcow2").symlink_to(f"way/{name}")
    for source, where in ((folder / name, tmp_path), (f"./{name}", folder), ("disk.qcow2", links),
                          (f"way/../{folder.name}/{name}", links)):
        machine = next(machines)
        done = subprocess.run([PROGRAM, "backup", machine, f"vda={source}"], cwd=where,
                              env=coldrise.environment(), capture_output=True, text=True,
                              check=False)
        assert done.returncode == 0, done.stderr
        content = restored(coldrise, f"{machine}/latest/vda", tmp_path).read_bytes()
        assert content == bytes(image.content)


def test_extents_beside_a_description_that_is_a_link_away(coldrise, disk, tmp_path):
    """The folder that counts is the one that was named; a link into another is refused."""
    _, raw = disk
    folder = tmp_path / "folder"
    folder.mkdir()
    path = convert(raw, folder / "disk.vmdk", "vmdk", "subformat=monolithicFlat")
    (tmp_path / "way").symlink_to(folder)
    address, _ = backed_up(coldrise, tmp_path / "way" / "disk.vmdk")
    assert is_same_disk(restored(coldrise, address, tmp_path), "raw", raw, "raw")
    (tmp_path / "disk.vmdk").symlink_to(path)
    done = coldrise.run("backup", "web01", f"vda={tmp_path / 'disk.vmdk'}")
    assert done.returncode == 1 and "disk-flat.vmdk" in done.stderr


def test_users_with_read_permission_may_import_a_file(disk, tmp_path):
    """Root reads files that only their owner may read; users read their own."""
    image, raw = disk
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o077 == 0:
            parent.chmod(0o755)
    folder = tmp_path / "theirs"
    folder.mkdir()
    path = convert(raw, folder / "disk.qcow2", "qcow2", "cluster_size=64k")
    path.chmod(0o400)
    users = [os.getuid()]
    if os.getuid() == 0:
        users.append(NOBODY)
        for entry in (folder, path):
            os.chown(entry, NOBODY, NOBODY)
    for user in users:
        coldrise = Coldrise(folder / f"repository-{user}")
        become = [] if user == os.getuid() else [
            "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
        for words in (["init", "--no-encryption"], ["backup", "web01", f"vda={path}"],
                      ["restore", "web01/latest/vda", folder / f"{user}.raw"]):
            done = subprocess.run([*become, PROGRAM, *words], env=coldrise.environment(),
                                  capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            # Fully confined: otherwise there would be a warning.
            assert "confined" not in done.stderr
        assert (folder / f"{user}.raw").read_bytes() == bytes(image.content)
