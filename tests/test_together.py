"""Commands that may run during a write, those that may not, and a copied repository."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from support.cli import Coldrise
from support.image import Image
from support.nbdserver import wait_until

pytestmark = pytest.mark.encrypted

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
def test_a_second_writer_is_refused_immediately(coldrise, writer, point, arguments, tmp_path):
    image = str(tmp_path / "vda.raw")
    arguments = [a.replace("POINT", point).replace("IMAGE", image) for a in arguments]
    started = time.monotonic()
    refused = coldrise.run(*arguments)
    assert refused.returncode == 11, refused.stderr
    assert "another process is writing the repository" in refused.stderr
    assert f"(process {os.getpid()}, since 20" in refused.stderr
    assert time.monotonic() - started < 10, "it does not wait"


def test_all_other_commands_work_during_a_write(coldrise, writer, point, image, nbdkit, tmp_path):
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


def is_locked(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def stopped_verify(coldrise):
    """A verify that has listed its reads, and is stopped; None where it was
    too quick."""
    leases = coldrise.repository / "leases"
    before = set(leases.iterdir())
    verify = coldrise.start("--json", "verify", stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def has_begun():
        try:
            # Empty until it says what is read.
            sizes = [path.stat().st_size for path in set(leases.iterdir()) - before]
        except FileNotFoundError:
            return False
        return any(sizes) or verify.poll() is not None

    wait_until(has_begun, "its lease")
    verify.send_signal(signal.SIGSTOP)
    if verify.poll() is None:
        os.waitid(os.P_PID, verify.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    # Not while all others have to wait for it.
    if verify.poll() is None and not is_locked(leases / "lock"):
        return verify
    assert_clean(verify)
    return None


def assert_clean(verify):
    verify.send_signal(signal.SIGCONT)
    output, messages = verify.communicate(timeout=60)
    assert verify.returncode == 0, output + messages
    assert json.loads(output.splitlines()[-1])["is_clean"]


def test_verify_ignores_concurrent_changes(coldrise, live, image, nbdkit, tmp_path):
    """The data to verify is deleted, moved and extended before it is read."""
    with nbdkit() as server, server.connect(live) as handle:
        handle.pwrite(b"x" * MIB, 2 * MIB)
        handle.flush()
        image.write(2 * MIB, b"x" * MIB)
        sealed = coldrise.json("seal", "trial")["address"]
    coldrise.json("unpublish", "trial", "--discard")
    other = Image(32 * MIB)
    saved = {}
    for day in ("gone", "forgotten", "kept"):
        other.fill(0, 12 * MIB, day)
        saved[day] = coldrise.backup("db01", sda=other.save(tmp_path / "sda.raw"))
    content = bytes(other.content)
    coldrise.json("forget", saved["gone"])

    def gc():
        assert coldrise.json("gc")["chunks_deleted"] == 12 * MIB // (16 << 10)

    def forget_and_gc():
        coldrise.json("forget", saved["forgotten"])
        # The verify leases it; the next gc removes the data.
        assert coldrise.json("gc")["chunks_deleted"] == 0

    def fold():
        assert [point["address"] for point in coldrise.json("fold")["points"]] == [sealed]

    def backup():
        other.fill(0, 8 * MIB, "later")
        coldrise.backup("db01", sda=other.save(tmp_path / "sda.raw"))

    for change in (gc, forget_and_gc, fold, backup):
        verifies = (stopped_verify(coldrise) for _ in range(50))
        verify = next((verify for verify in verifies if verify), None)
        assert verify, "every verify was too quick"
        change()
        assert_clean(verify)
    assert coldrise.json("gc")["chunks_deleted"] == 12 * MIB // (16 << 10)
    for address, wanted in ((f"{sealed}/vda", bytes(image.content)), (f"{saved['kept']}/sda", content)):
        target = tmp_path / "restored.raw"
        target.unlink(missing_ok=True)
        coldrise.json("restore", address, target)
        assert target.read_bytes() == wanted
    assert coldrise.json("verify")["is_clean"]


def test_a_copied_repository_is_independent(coldrise, point, image, tmp_path):
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
