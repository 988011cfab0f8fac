"""A full disk under the repository: nothing is lost, and it works again with more room."""

import json
import os

import pytest

from support.cli import Coldrise
from support.image import Image
from support.sources import tool

MIB = 1 << 20


@pytest.fixture
def small(tmp_path):
    """A repository on a file system of 24 MiB."""
    passphrase = tmp_path / "passphrase"
    passphrase.write_text("correct horse\n", encoding="utf-8")
    folder = tmp_path / "small"
    folder.mkdir()
    tool("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder)
    try:
        coldrise = Coldrise(folder / "repository", passphrase)
        coldrise.init()
        yield coldrise
    finally:
        tool("umount", "--lazy", folder)


def disk(tmp_path, name, megabytes):
    image = Image(megabytes * MIB)
    image.fill(0, megabytes * MIB, name)
    return image.save(tmp_path / f"{name}.raw")


def error_kind(done):
    return json.loads(done.stdout.strip().splitlines()[-1])["error"]["kind"]


def test_backup_onto_a_full_disk(small, tmp_path):
    first = disk(tmp_path, "first", 8)
    point = small.backup("web01", vda=first)
    large = disk(tmp_path, "large", 40)
    done = small.run("--json", "backup", "db01", f"vda=raw:{large}")
    assert done.returncode == 1 and error_kind(done) == "no_space", done.stderr

    # Everything that only reads goes on.
    assert [m["machine"] for m in small.json("list")["machines"]] == ["web01"]
    target = tmp_path / "out.raw"
    small.json("restore", f"{point}/vda", target)
    assert target.read_bytes() == first.read_bytes()

    # What the failed backup left is cleared by the next one.
    little = disk(tmp_path, "little", 4)
    kept = small.backup("db02", vda=little)
    tool("mount", "-o", "remount,size=128m", small.repository.parent)
    made = small.backup("db01", vda=large)
    for address, content in ((point, first), (kept, little), (made, large)):
        small.json("restore", f"{address}/vda", target, "--force")
        assert target.read_bytes() == content.read_bytes()


def fill(folder):
    """Takes all that is left."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        try:
            while True:
                file.write(b"x")
        except OSError:
            pass
    assert os.statvfs(folder).f_bavail == 0
    return filler


def test_sessions_on_a_full_disk(small, tmp_path):
    content = disk(tmp_path, "first", 4)
    point = small.backup("web01", vda=content)
    small.publish(point, "trial")
    filler = fill(small.repository.parent)
    for command in (["publish", point], ["seal", "trial"], ["backup", "web01", f"vda={content}"]):
        done = small.run("--json", *command)
        assert done.returncode == 1, f"{command}: {done.stdout}{done.stderr}"
        assert error_kind(done) == "no_space", f"{command}: {done.stderr}"
    checked = small.run("doctor")
    assert checked.returncode == 1 and "make room" in checked.stdout
    filler.unlink()
    assert [s["session"] for s in small.json("sessions")["sessions"]] == ["trial"]
    assert small.json("seal", "trial")["address"] == f"{point}+1"
    small.json("unpublish", "trial")
    again = small.backup("web01", vda=content)
    target = tmp_path / "out.raw"
    small.json("restore", f"{again}/vda", target)
    assert target.read_bytes() == content.read_bytes()
