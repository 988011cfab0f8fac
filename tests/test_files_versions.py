"""coldrise files versions: one file over the points of a machine."""

import os
import signal
import subprocess

import pytest

from support import filesystems
from support.cli import Coldrise
from test_files import MIB, files, machines, runtime

__all__ = ["runtime"]


def tree(folder, content, moment):
    """A folder with one file of that content and time; `None` for no file."""
    (folder / "etc").mkdir(parents=True)
    (folder / "etc/fstab").write_text("")
    if content is not None:
        (folder / "etc/app.conf").write_text(content)
        os.utime(folder / "etc/app.conf", (moment, moment))
    return folder


@pytest.fixture(scope="module")
def history(runtime, tmp_path_factory):
    """Machine web01: its file changes, changes back and goes, on an LVM volume and on Btrfs with one identity."""
    folder = tmp_path_factory.mktemp("history")
    coldrise = Coldrise.encrypted(folder)
    coldrise.init()
    coldrise.points, coldrise.folder = [], folder
    states = [("a", 1000), ("a", 1000), ("bb", 2000), ("a", 1000), None]
    for number, state in enumerate(states):
        source = tree(folder / f"tree{number}", *(state or (None, 0)))
        inner = filesystems.ext4(folder / "inner", source, 16 * MIB)
        # Volume groups, arrays and file systems of the points have the same unique names.
        lvm = filesystems.lvm(folder / "vda.raw", inner, "vg0", "root")
        pool = filesystems.btrfs(folder / "vdb.raw", source, 128 * MIB, "-U", "01234567-89ab-cdef-0123-456789abcdef")
        mirror = filesystems.mirror(folder / "vdc.raw", inner)
        address = coldrise.backup("web01", vda=lvm, vdb=pool, vdc=mirror)
        coldrise.points.append(address.split("/")[1])
        inner.unlink()
    return coldrise


def spans(found):
    return [(version["state"], version["size_bytes"], version["first_point"], version["last_point"], version["points"])
            for version in found["versions"]]


def test_each_version_has_its_first_and_last_point(history, runtime):
    p = history.points
    found = files(history, "versions", "web01:vg0-root/etc/app.conf")
    assert spans(found) == [
        ("absent", None, p[4], p[4], 1), ("present", 1, p[3], p[3], 1), ("present", 2, p[2], p[2], 1),
        ("present", 1, p[0], p[1], 2)], found
    assert found["versions"][1]["modified"] == "1970-01-01T00:16:40Z" and found["points"] == 5
    assert history.json("sessions") == {"sessions": []} and not machines(runtime)


def test_other_file_systems_and_fewer_points(history, runtime):
    p = history.points
    text = history.run("files", "versions", "web01:md0/etc/app.conf", "--points", "3").stdout.splitlines()
    assert len(text) == 4 and "is not there" in text[1] and text[2].split() == ["1", "1970-01-01T00:16:40Z", p[3]]
    history.json("quarantine", f"web01/{p[2]}")
    found = files(history, "versions", "web01:vdb/etc/app.conf", "--since", p[1], status=1)
    history.json("release", f"web01/{p[2]}")
    assert [version["state"] for version in found["versions"]] == ["absent", "present", "unread", "present"]
    assert "quarantined" in found["versions"][2]["reason"]


def test_errors_contain_advice(history, runtime):
    error = files(history, "versions", "web01:/etc/app.conf", "--points", "1", status=2)["error"]
    assert error["kind"] == "invalid_input" and "say which file system" in error["message"]
    assert files(history, "versions", "web02:/etc/x", status=1)["error"]["kind"] == "not_found"
    assert history.json("sessions") == {"sessions": []} and not machines(runtime)


def test_a_concurrently_forgotten_point_does_not_hide_older_ones(coldrise, runtime, tmp_path):
    points = []
    # More than one machine gets.
    for number in range(14):
        source = tree(tmp_path / f"tree{number}", "x" * (number + 1), 1000 + number)
        disk = filesystems.ext4(tmp_path / "vda", source, MIB)
        points.append(coldrise.backup("db01", vda=disk).split("/")[1])
        disk.unlink()
    process = coldrise.start("files", "versions", "db01:/etc/app.conf", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # The first of two machines has printed the first ones; the second machine has not started.
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGSTOP)
    assert points[-1] in lines[1], lines
    coldrise.json("forget", f"db01/{points[1]}")
    process.send_signal(signal.SIGCONT)
    printed, message = process.communicate(timeout=120)
    listed = [line.split()[-1] for line in [*lines[1:], *printed.splitlines()]]
    assert process.returncode == 0 and listed == [points[at] for at in range(13, -1, -1) if at != 1], message
