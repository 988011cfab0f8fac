"""What may run beside a writer, what may not, and a repository that was copied."""

import fcntl
import shutil
import time

import pytest

from support.cli import Coldrise
from support.image import Image

MIB = 1 << 20


@pytest.fixture
def writer(coldrise, live):
    """Stands for a backup that takes hours: holds the lock of the one writer."""
    with open(coldrise.repository / "writer.lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@pytest.mark.parametrize("arguments", [
    ["backup", "web01", "vda=raw:IMAGE"],
    ["forget", "POINT"],
    ["prune", "--keep-last", "1"],
    ["protect", "POINT"],
    ["unprotect", "POINT"],
    ["gc"],
    ["fold"],
    ["repair"],
])
def test_a_second_writer_is_refused_at_once(coldrise, writer, point, arguments, tmp_path):
    image = str(tmp_path / "vda.raw")
    arguments = [a.replace("POINT", point).replace("IMAGE", image) for a in arguments]
    started = time.monotonic()
    refused = coldrise.run(*arguments)
    assert refused.returncode == 11, refused.stderr
    assert "another process is writing the repository" in refused.stderr
    assert time.monotonic() - started < 10, "it does not wait"


def test_everything_else_goes_on_beside_a_writer(coldrise, writer, point, image, nbdkit, tmp_path):
    with nbdkit() as server, server.connect("live/trial/vda") as handle:
        handle.pwrite(b"x" * 4096, 0)
        handle.flush()
        sealed = coldrise.json("seal", "trial")["address"]
    image.write(0, b"x" * 4096)
    for command in ("list", "sessions", "stats", "verify"):
        coldrise.json(command)
    coldrise.json("show", sealed)
    coldrise.json("diff", point, sealed)
    coldrise.json("gc", "--dry-run")
    coldrise.json("prune", "--keep-last", "1", "--dry-run")
    coldrise.json("restore", f"{sealed}/vda", tmp_path / "restored.raw")
    assert (tmp_path / "restored.raw").read_bytes() == bytes(image.content)
    coldrise.publish(sealed, "second")
    coldrise.json("unpublish", "second", "--discard")
    coldrise.json("unpublish", "trial")


def test_a_copied_repository_goes_on_by_itself(coldrise, point, image, tmp_path):
    copy = Coldrise(tmp_path / "copy", coldrise.passphrase_file)
    shutil.copytree(coldrise.repository, copy.repository)
    expected = {}
    for program, seed in ((coldrise, "here"), (copy, "there")):
        disk = Image(8 * MIB)
        disk.fill(0, 4 * MIB, seed)
        path = disk.save(tmp_path / f"{seed}.raw")
        expected[seed] = (program, program.backup("web01", vda=path), disk)
    # Both have handed out the same numbers, for other contents.
    for program, address, disk in expected.values():
        for source, wanted in ((address, disk), (point, image)):
            target = tmp_path / "restored.raw"
            target.unlink(missing_ok=True)
            program.json("restore", f"{source}/vda", target)
            assert target.read_bytes() == bytes(wanted.content)
        assert program.json("verify")["is_clean"]
