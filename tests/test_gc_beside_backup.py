"""coldrise gc during a backup: the backup's process runs it, no chunk that the backup
refers to is removed, and the gc completes whether or not the backup does."""

import json
import pathlib
import signal
import subprocess

import pytest

from support.image import Image
from support.nbdserver import wait_until
from support.sources import RunningBackup, gated_server, slow_server
from support.stopped import stopped

MIB = 1 << 20


@pytest.fixture
def save(coldrise, tmp_path):
    """Backs a disk up; returns the point's address."""
    return lambda machine, disk: coldrise.backup(machine, vda=disk.save(tmp_path / "saved.raw"))


@pytest.fixture
def forgotten(coldrise, save):
    """A remaining machine, and the chunks of a forgotten one: the content of a disk of
    14 MiB, and 8 MiB more."""
    kept = Image(4 * MIB)
    kept.fill(0, 4 * MIB, "kept")
    address = save("web01", kept)
    disk, more = Image(14 * MIB), Image(8 * MIB)
    disk.fill(0, 14 * MIB, "forgotten")
    more.fill(0, 8 * MIB, "more")
    gone = [save("web02", disk), save("web03", more)]
    coldrise.json("forget", *gone)
    return address, kept, disk


def assert_restores(coldrise, contents, tmp_path):
    target = tmp_path / "restored.raw"
    for address, disk in contents.items():
        coldrise.json("restore", f"{address}/vda", target, "--force")
        assert target.read_bytes() == bytes(disk.content), address


def chunks(coldrise):
    return coldrise.json("stats")["chunks"]


def test_a_gc_during_a_backup_keeps_the_chunks_it_reuses(coldrise, forgotten, save, tmp_path):
    address, kept, disk = forgotten
    # The first half is unreferenced: the backup finds it and needs it.
    disk.fill(7 * MIB, 7 * MIB, "new")
    # The source gives the second half only when the gc has ended, however long that takes.
    with gated_server(disk.save(tmp_path / "source.raw"), 7 * MIB) as (uri, server, gate):
        running = RunningBackup(coldrise, "web04", f"vda={uri}")
        done = coldrise.json("gc")
        assert running.process.poll() is None, "the gc ran beside it"
        # Those that the backup had not reached: at least of the other machine.
        assert done["chunks_deleted"] >= 8 * MIB // (16 << 10)
        gate.touch()
        code, made, messages = running.end()
        assert code == 0, messages
    assert_restores(coldrise, {address: kept, made["address"]: disk}, tmp_path)
    assert coldrise.json("verify")["is_clean"]
    assert not list(coldrise.repository.glob("writer.*ing"))

    # The next gc removes chunks that neither needs, and the counters are exact.
    coldrise.json("gc")
    nothing = coldrise.json("gc", "--dry-run")
    assert nothing["chunks_to_delete"] == 0
    expected = (4 + 14) * MIB // (16 << 10) + nothing["chunks_kept_unreferenced"]
    assert chunks(coldrise) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_gc_survives_the_backup_that_ran_it(coldrise, forgotten, save, tmp_path, number):
    address, kept, disk = forgotten
    with slow_server(disk.save(tmp_path / "source.raw")) as (uri, server):
        running = RunningBackup(coldrise, "web04", f"vda={uri}")
        # The stopped backup cannot answer: the gc has sent its request, and waits.
        with stopped(running.process.pid):
            gc = coldrise.start("--json", "gc", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            socket = str(coldrise.repository / "writer.control")
            wait_until(lambda: is_connected(gc.pid), f"a connection to {socket}")
            running.process.send_signal(number)
        running.process.communicate(timeout=60)
        output, messages = gc.communicate(timeout=60)
    assert gc.returncode == 0, messages
    assert_restores(coldrise, {address: kept}, tmp_path)
    coldrise.json("gc")
    assert coldrise.json("gc", "--dry-run")["chunks_to_delete"] == 0
    assert chunks(coldrise) == 4 * MIB // (16 << 10)
    assert_restores(coldrise, {address: kept, save("web02", disk): disk}, tmp_path)
    assert coldrise.json("verify")["is_clean"]


def is_connected(pid):
    """Whether the process has a connection with a listener: a Unix socket
    that it has open is in the kernel's list in the connected state."""
    inodes = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = link.readlink().name
        except FileNotFoundError:
            continue
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    with open("/proc/net/unix") as listing:
        lines = [line.split() for line in listing][1:]
    return any(line[6] in inodes and line[5] == "03" for line in lines)


def is_locked(path):
    """By the kernel's list: a try would take the lock for a moment, and a program that wants it then would find it
    taken."""
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return False
    with open("/proc/locks", encoding="ascii") as listing:
        return any("FLOCK" in line and f":{inode} " in line for line in listing)


def test_a_backup_starts_during_a_gc(coldrise, forgotten, tmp_path):
    address, kept, disk = forgotten
    gc = coldrise.start("--json", "gc", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: is_locked(coldrise.repository / "writer.lock") or gc.poll() is not None, "the gc")
    gc.send_signal(signal.SIGSTOP)
    path = disk.save(tmp_path / "source.raw")
    backup = coldrise.start("--json", "backup", "web02", f"vda=raw:{path}",
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # If the gc ended before it was stopped, there is nothing to wait for.
    wait_until(lambda: is_locked(coldrise.repository / "background.wanted") or backup.poll() is not None,
               "the backup that waits")
    gc.send_signal(signal.SIGCONT)
    made, messages = backup.communicate(timeout=60)
    assert backup.returncode == 0, messages
    made = json.loads(made.splitlines()[-1])["address"]
    _, messages = gc.communicate(timeout=60)
    assert gc.returncode == 0, messages
    assert_restores(coldrise, {address: kept, made: disk}, tmp_path)
    assert coldrise.json("verify")["is_clean"]


def test_gcs_take_turns(coldrise, forgotten, tmp_path):
    address, kept, _ = forgotten
    gcs = [coldrise.start("--json", "gc", stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    deleted = 0
    for gc in gcs:
        done, messages = gc.communicate(timeout=120)
        assert gc.returncode == 0, messages
        deleted += json.loads(done.splitlines()[-1])["chunks_deleted"]
    assert deleted == (14 + 8) * MIB // (16 << 10)
    assert_restores(coldrise, {address: kept}, tmp_path)
