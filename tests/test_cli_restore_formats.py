"""coldrise restore --format: every format, as readers that others wrote see it."""

import os
import signal
import subprocess

import pytest

from support.cli import Coldrise
from support.judge import DISKS, assert_same, save
from support.layouts import COMPACT, WRITABLE, Laid, Part
from support.nbdserver import wait_until
from support.readers import Qemu
from support.sources import tool

KIB, MIB = 1 << 10, 1 << 20

FORMATS = [name for name in WRITABLE + COMPACT if name != "raw"]
COMPANIONS = {"vmdk-esxi": "-flat.vmdk", "vmdk-hosted": "-flat.vmdk", "qcow2-external": ".raw"}
# The argument for an image on the command line of a backup: it names no second qcow2 file.
IMPORTED = [name for name in FORMATS if name != "qcow2-external"]


def restored(coldrise, address, folder, image_format, *options):
    """The image, restored to a new folder."""
    folder.mkdir()
    target = folder / "out.image"
    done = coldrise.json("restore", address, target, "--format", image_format, *options)
    assert done["format"] == image_format
    paths = [target]
    if image_format in COMPANIONS:
        paths.append(folder / f"out{COMPANIONS[image_format]}")
    assert sorted(os.listdir(folder)) == sorted(path.name for path in paths)
    return Laid(image_format, [Part(path, path.stat().st_size, []) for path in paths])


@pytest.fixture(scope="module")
def backed_up(template, tmp_path_factory):
    """A repository with all the disks, the address of their point, and their raw files."""
    folder = tmp_path_factory.mktemp("disks")
    program = Coldrise.copied(template, folder / "repository")
    raws = {}
    for name, (size, stored) in DISKS.items():
        (folder / name).mkdir()
        raws[name] = save(folder / name, size, stored)
    return program, program.backup("all", **raws), raws


@pytest.mark.parametrize("image_format", FORMATS)
def test_every_reader_sees_the_disk(backed_up, tmp_path, image_format):
    coldrise, address, raws = backed_up
    for name, (size, stored) in DISKS.items():
        image = restored(coldrise, f"{address}/{name}", tmp_path / f"{name}-out", image_format)
        assert_same(image, raws[name], size, stored)
        taken = sum(part.path.stat().st_blocks for part in image.parts) * 512
        # Runs of 64 KiB at most are written with their zeroes; tables are below 1 MiB.
        assert taken <= sum(length + 128 * KIB for _, length in stored) + 2 * MIB, name


@pytest.mark.parametrize("image_format", IMPORTED)
def test_backup_of_a_restored_image_has_the_same_content(coldrise, image, point, tmp_path, image_format):
    made = restored(coldrise, f"{point}/vda", tmp_path / "out", image_format)
    family = image_format.partition("-")[0]
    again = coldrise.json("backup", "copy", f"vda={family}:{made.path}")["address"]
    assert coldrise.json("diff", f"{point}/vda", f"{again}/vda")["is_equal"]
    raw = tmp_path / "again.raw"
    coldrise.json("restore", f"{again}/vda", raw)
    assert raw.read_bytes() == bytes(image.content)


def test_holes_are_unallocated_in_a_qcow2(coldrise, point, tmp_path):
    mapped = Qemu(restored(coldrise, f"{point}/vda", tmp_path / "out", "qcow2")).map()
    held = [(piece["start"], piece["length"]) for piece in mapped if piece["data"]]
    assert held == [(0, MIB), (5 * MIB, MIB), (8 * MIB, 512)]
    absent = [piece for piece in mapped if not piece["data"]]
    assert all(piece["zero"] and "offset" not in piece for piece in absent)


def test_a_guest_can_write_to_a_restored_qcow2(coldrise, point, tmp_path):
    image = restored(coldrise, f"{point}/vda", tmp_path / "out", "qcow2")
    tool("qemu-io", "-f", "qcow2", "-c", "write -P 7 2M 200k", "-c", "write -P 8 64k 64k",
         "-c", "write -z 5M 128k", "-c", "discard 5500k 128k", image.path)  # fmt: skip
    tool("qemu-io", "-f", "qcow2", "-c", "read -P 7 2M 200k", "-c", "read -P 8 64k 64k",
         "-c", "read -P 0 5M 128k", image.path)  # fmt: skip
    Qemu(image).check()


@pytest.mark.parametrize("image_format", FORMATS)
def test_a_full_target_is_left_clean(backed_up, tmp_path, image_format):
    coldrise, address, _ = backed_up
    small = tmp_path / "small"
    small.mkdir()
    tool("mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", small)
    try:
        done = coldrise.run("restore", f"{address}/dense", small / "out", "--format", image_format)
        assert done.returncode == 1 and "No space" in done.stderr
        assert os.listdir(small) == []
    finally:
        tool("umount", small)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A repository with a disk that takes a while to restore, and the disk's address."""
    folder = tmp_path_factory.mktemp("large")
    program = Coldrise(folder / "repository")
    program.init("--no-encryption", "--compression", "none")
    raw = save(folder, 256 * MIB, [(0, 128 * MIB), (128 * MIB, 128 * MIB)])
    return program, program.backup("large", vda=raw) + "/vda"


@pytest.mark.parametrize("image_format", FORMATS)
def test_ctrl_c_leaves_nothing(large, tmp_path, image_format):
    program, address = large

    def has_begun():
        try:
            return os.listdir(tmp_path / ".out.coldrise-part")
        except FileNotFoundError:
            # Not yet, or no longer.
            return False

    # On a busy machine one may occasionally complete before the signal arrives.
    for _ in range(5):
        running = program.start("restore", address, tmp_path / "out", "--format", image_format,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wait_until(lambda: has_begun() or running.poll() is not None, "the first file")
        running.send_signal(signal.SIGINT)
        _, messages = running.communicate(timeout=60)
        if running.returncode != 0:
            break
        for path in tmp_path.iterdir():
            path.unlink()
    assert running.returncode == 130, messages
    assert "no file was made" in messages
    assert os.listdir(tmp_path) == []


def test_disks_too_large_for_a_format_are_refused(coldrise, tmp_path):
    raw = save(tmp_path, 3 << 40, [(0, 512)])
    address = coldrise.backup("web01", vda=raw)
    done = coldrise.run("restore", f"{address}/vda", tmp_path / "out.vhd")
    assert done.returncode == 1
    assert "2040 GiB" in done.stderr and "use vhdx" in done.stderr
    done = coldrise.run("restore", f"{address}/vda", tmp_path / "out.vhd", "--format", "vdi")
    assert done.returncode == 2 and "vmdk-stream" in done.stderr
