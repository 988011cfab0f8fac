"""coldrise restore: every format, targets that exist, sessions, NBD servers."""

import os
import signal
import subprocess

import pytest

from support.image import Image
from support.sources import is_same_disk, tool

MIB = 1 << 20


@pytest.mark.parametrize("word, driver", [
    ("raw", "raw"), ("qcow2", "qcow2"), ("vmdk", "vmdk"), ("vhd", "vpc"), ("vhdx", "vhdx"),
])
def test_formats(coldrise, image, point, tmp_path, word, driver):
    source = tmp_path / "vda.raw"
    by_extension = tmp_path / f"out.{word}"
    done = coldrise.json("restore", f"{point}/vda", by_extension)
    assert (done["format"], done["size_bytes"]) == (word, len(image))
    assert done["address"] == f"{point}/vda" and done["target"] == str(by_extension)
    assert is_same_disk(by_extension, driver, source, "raw")
    by_option = tmp_path / "out.image"
    coldrise.json("restore", f"{point}/vda", by_option, "--format", word)
    assert is_same_disk(by_option, driver, source, "raw")
    leftovers = [name for name in os.listdir(tmp_path) if "part" in name]
    assert leftovers == []


def test_holes_stay_holes(coldrise, point, tmp_path):
    target = tmp_path / "out.raw"
    coldrise.json("restore", f"{point}/vda", target)
    assert target.stat().st_blocks * 512 < 3 * MIB


def test_an_existing_file_is_replaced_only_by_force(coldrise, image, point, tmp_path):
    target = tmp_path / "out.raw"
    target.write_bytes(b"precious")
    done = coldrise.run("restore", f"{point}/vda", target)
    assert done.returncode == 1 and "--force" in done.stderr
    assert target.read_bytes() == b"precious"
    coldrise.json("restore", f"{point}/vda", target, "--force")
    assert target.read_bytes() == bytes(image.content)


def test_a_file_of_the_repository_is_never_a_target(coldrise, point, tmp_path):
    folder = coldrise.repository / "db"
    precious = sorted(folder.glob("*.sst"))[0]
    before = precious.read_bytes()
    (tmp_path / "link").symlink_to(folder)
    for target in (precious, tmp_path / "link" / precious.name, coldrise.repository / "new.raw"):
        done = coldrise.run("restore", f"{point}/vda", target, "--force")
        assert done.returncode == 2 and "the folder of the repository" in done.stderr
    assert precious.read_bytes() == before and not (coldrise.repository / "new.raw").exists()


def test_latest_and_the_only_disk(coldrise, image, point, tmp_path):
    target = tmp_path / "out.raw"
    done = coldrise.json("restore", "web01/latest", target)
    assert done["address"] == f"{point}/vda"
    assert target.read_bytes() == bytes(image.content)


def test_a_served_session_is_mounted(coldrise, image, live, nbdkit, tmp_path):
    server = nbdkit()
    with server.connect(live) as client:
        image.fill(2 * MIB, 8192, "captured")
        client.pwrite(image.read(2 * MIB, 8192), 2 * MIB)
        client.flush()
        target = tmp_path / "out.raw"
        done = coldrise.json("restore", live, target)
        assert done["address"] == live
        assert target.read_bytes() == bytes(image.content)


def test_to_an_nbd_server(coldrise, image, point, tmp_path):
    target = tmp_path / "target.raw"
    with open(target, "wb") as file:
        file.write(b"\xff" * (9 * MIB))
    socket = tmp_path / "target.socket"
    ready = tmp_path / "target.ready"
    server = subprocess.Popen(
        ["nbdkit", "--foreground", "--exit-with-parent", "--unix", socket, "--pidfile", ready,
         "file", target], stdin=subprocess.DEVNULL)
    try:
        from support.nbdserver import wait_until
        wait_until(ready.exists, "the target server")
        coldrise.json("restore", f"{point}/vda", f"nbd+unix:///?socket={socket}")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)
    assert target.read_bytes()[: len(image)] == bytes(image.content)


def test_a_full_target(coldrise, tmp_path):
    image = Image(16 * MIB)
    image.fill(0, 16 * MIB, "large")
    address = coldrise.backup("web01", vda=image.save(tmp_path / "large.raw"))
    small = tmp_path / "small"
    small.mkdir()
    tool("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small)
    try:
        done = coldrise.run("restore", f"{address}/vda", small / "out.raw")
        assert done.returncode == 1 and "No space" in done.stderr
        assert os.listdir(small) == []
    finally:
        tool("umount", small)


def test_a_missing_target_directory_is_reported(coldrise, point, tmp_path):
    done = coldrise.run("restore", f"{point}/vda", tmp_path / "absent" / "out.raw")
    assert done.returncode == 1 and "absent" in done.stderr
