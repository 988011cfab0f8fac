"""A full disk under the repository: nothing is lost, and it works again with more space."""

import json
import os
import random
import subprocess

import nbd
import pytest

from support.cli import Coldrise
from support.crash.loopfs import LoopFileSystem
from support.image import Image
from support.nbdserver import Nbdkit

MIB = 1 << 20
SIZE = 160 * MIB


@pytest.fixture
def empty(request, tmp_path):
    """A repository alone on a small file system."""
    made = LoopFileSystem(tmp_path, SIZE)
    try:
        if request.node.get_closest_marker("encrypted"):
            coldrise = Coldrise.encrypted(tmp_path, made.mount_point)
            coldrise.init()
        else:
            coldrise = Coldrise(made.mount_point / "repository")
            coldrise.init("--no-encryption")
        yield coldrise
    finally:
        made.close()


@pytest.fixture
def others(empty):
    """Other files on that file system, which leave 24 MiB."""
    path = empty.repository.parent / "others"
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, available(path.parent) - 24 * MIB)
    return path


@pytest.fixture
def small(empty, others):
    """A repository with little free space."""
    return empty


def disk(tmp_path, name, megabytes):
    image = Image(megabytes * MIB)
    image.fill(0, megabytes * MIB, name)
    return image.save(tmp_path / f"{name}.raw")


def error_kind(done):
    return json.loads(done.stdout.strip().splitlines()[-1])["error"]["kind"]


def test_backup_onto_a_full_disk(small, others, tmp_path):
    first = disk(tmp_path, "first", 8)
    point = small.backup("web01", vda=first)
    large = disk(tmp_path, "large", 40)
    done = small.run("--json", "backup", "db01", f"vda=raw:{large}")
    assert done.returncode == 1 and error_kind(done) == "no_space", done.stderr

    # All readers continue.
    assert [m["machine"] for m in small.json("list")["machines"]] == ["web01"]
    target = tmp_path / "out.raw"
    small.json("restore", f"{point}/vda", target)
    assert target.read_bytes() == first.read_bytes()

    # The next backup removes the leftovers of the failed one.
    little = disk(tmp_path, "little", 4)
    kept = small.backup("db02", vda=little)
    others.unlink()
    made = small.backup("db01", vda=large)
    for address, content in ((point, first), (kept, little), (made, large)):
        small.json("restore", f"{address}/vda", target, "--force")
        assert target.read_bytes() == content.read_bytes()


def available(folder):
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


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
    assert available(folder) == 0
    return filler


def test_with_one_mib_a_gc_makes_room_on_a_full_disk(small, tmp_path):
    kept = disk(tmp_path, "kept", 4)
    point = small.backup("web01", vda=kept)
    small.backup("db01", vda=disk(tmp_path, "gone", 12))
    filler = fill(small.repository.parent)
    for command in (["forget", "--all", "db01"], ["gc"]):
        done = small.run("--json", *command)
        assert done.returncode == 1 and error_kind(done) == "no_space", done.stderr
        assert "make room" in done.stderr, done.stderr
    os.truncate(filler, filler.stat().st_size - MIB)
    small.json("forget", "--all", "db01")
    assert small.json("gc")["bytes_returned"] > 11 * MIB
    assert available(small.repository.parent) > 11 * MIB
    target = tmp_path / "out.raw"
    small.json("restore", f"{point}/vda", target)
    assert target.read_bytes() == kept.read_bytes()


def assert_room_can_be_made(coldrise, folder, expected_bytes):
    for machine in coldrise.json("list")["machines"]:
        coldrise.json("forget", "--all", machine["machine"])
    coldrise.json("gc")
    assert available(folder) > expected_bytes


@pytest.mark.parametrize("free_kib", (6200, 7200, 9000))
def test_a_small_backup_leaves_enough_space_for_a_gc(empty, tmp_path, free_kib):
    """Data that is only in the log needs its space once more, in a file."""
    folder = empty.repository.parent
    before = available(folder)
    empty.backup("web01", vda=disk(tmp_path, "first", 1))
    filler = folder / "filler"
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, available(folder) - (free_kib << 10))
    size = filler.stat().st_size
    done = empty.run("--json", "backup", "db01", f"vda=raw:{disk(tmp_path, 'second', 4)}")
    assert done.returncode == 0 or error_kind(done) == "no_space", done.stderr
    assert_room_can_be_made(empty, folder, before - size - MIB)


def test_six_concurrent_backups_fill_it_and_it_is_emptied(empty, tmp_path):
    folder, numbers = empty.repository.parent, random.Random(3)
    before = available(folder)
    for _ in range(2):
        codes = set()
        while codes <= {0}:
            running = []
            for number in range(6):
                source = tmp_path / f"{number}.raw"
                source.write_bytes(numbers.randbytes(numbers.choice((3, 7, 9, 21, 30)) * MIB))
                running.append(empty.start("--json", "backup", f"db{number}", f"vda=raw:{source}",
                                           stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            for backup in running:
                backup.stdout, messages = backup.communicate(timeout=60)
                codes.add(backup.returncode)
                assert backup.returncode == 0 or error_kind(backup) == "no_space", messages
        # A host's failure ends its guests: all that was staged is gone now.
        assert available(folder) > 2 * MIB
        assert_room_can_be_made(empty, folder, before - 2 * MIB)


def test_a_gc_with_little_free_space_rewrites_small_files_first(empty, tmp_path):
    """The space freed by one rewritten file is enough for the next, larger one."""
    folder, numbers = empty.repository.parent, random.Random(4)
    points, kept = [], bytearray()
    for number, size in enumerate((40, 20, 10)):
        content = numbers.randbytes(size * MIB)
        source = tmp_path / "source.raw"
        source.write_bytes(content)
        points.append(empty.backup(f"db{number}", vda=source))
        kept += content[:size * MIB * 2 // 5]
    source.write_bytes(kept)
    point = empty.backup("web01", vda=source)
    with open(folder / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, available(folder) - 18 * MIB)
    empty.json("forget", *points)
    empty.json("gc")
    assert available(folder) > (18 + 40) * MIB
    target = tmp_path / "out.raw"
    empty.json("restore", f"{point}/vda", target)
    assert target.read_bytes() == kept


@pytest.mark.encrypted
def test_sessions_on_a_full_disk(small, tmp_path):
    content = disk(tmp_path, "first", 4)
    point = small.backup("web01", vda=content)
    small.publish(point, "trial")
    filler = fill(small.repository.parent)
    new = tmp_path / "new"
    new.write_text("another\n", encoding="utf-8")
    for command in (["publish", point], ["seal", "trial"], ["unpublish", "trial", "--discard"],
                    ["key", "add", "night", "--new-passphrase-file", new],
                    ["backup", "web01", f"vda={content}"]):
        done = small.run("--json", *command)
        assert done.returncode == 1, f"{command}: {done.stdout}{done.stderr}"
        assert error_kind(done) == "no_space", f"{command}: {done.stderr}"
        assert "coldrise gc" in done.stderr, f"{command}: {done.stderr}"
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


def write_until_full(small, directory, model, numbers, piece=256 << 10):
    """Writes to the session's disk until it is refused; `model` has what was flushed."""
    offset = 0
    with Nbdkit(small, directory) as server, server.connect("live/trial/vda") as handle:
        while True:
            pieces = []
            try:
                for _ in range(16):
                    content = numbers.randbytes(piece)
                    handle.pwrite(content, offset)
                    pieces.append((offset, content))
                    offset += piece
                handle.flush()
            except nbd.Error as error:
                assert error.errno == "ENOSPC", error
                # Writes accepted before can still be flushed.
                handle.flush()
                for offset, content in pieces:
                    model.write(offset, content)
                return offset
            for offset, content in pieces:
                model.write(offset, content)


def test_it_works_after_a_full_disk_is_freed(empty, tmp_path):
    """Backups and a session fill it; forget, prune and gc give the space back."""
    numbers, target = random.Random(8), tmp_path / "out.raw"
    model = Image(128 * MIB)
    model.fill(0, 4 * MIB, "base")
    base = empty.backup("web01", vda=model.save(tmp_path / "base.raw"))
    empty.json("protect", base)
    before = available(empty.repository.parent)
    for round_ in range(2):
        made = {}
        while True:
            name = f"{round_}-{len(made)}"
            image = disk(tmp_path, name, 18)
            done = empty.run("--json", "backup", f"db{len(made)}", f"vda=raw:{image}")
            if done.returncode:
                assert error_kind(done) == "no_space", done.stderr
                break
            made[json.loads(done.stdout.splitlines()[-1])["address"]] = image
        assert len(made) >= 5, made
        # The rest goes to a session, once a point has freed space for one.
        address, image = made.popitem()
        empty.json("forget", address)
        empty.json("gc")
        session = Image(128 * MIB)
        session.write(0, model.read(0, 4 * MIB))
        empty.publish(base, "trial")
        uncertain = write_until_full(empty, tmp_path / "server", session, numbers)

        assert empty.run("verify").returncode == 0
        for address, image in made.items():
            empty.json("restore", f"{address}/vda", target, "--force")
            assert target.read_bytes() == image.read_bytes()
        empty.json("restore", "live/trial/vda", target, "--force")
        restored = bytearray(target.read_bytes())
        restored[uncertain : uncertain + (256 << 10)] = session.read(uncertain, 256 << 10)
        assert restored == session.content

        empty.json("forget", next(iter(made)))
        empty.json("prune", "--keep-last", "1", "web01")
        empty.json("unpublish", "trial", "--discard")
        for machine in empty.json("list")["machines"]:
            if machine["machine"] != "web01":
                empty.json("forget", "--all", machine["machine"])
        for _ in range(2):
            empty.json("gc")
        assert available(empty.repository.parent) > before - 8 * MIB
    assert empty.run("verify").returncode == 0
    empty.json("restore", f"{base}/vda", target, "--force")
    assert target.read_bytes() == model.content

def test_seals_and_publishes_leave_space_for_a_gc(empty, tmp_path):
    point = empty.backup("web01", vda=disk(tmp_path, "web01", 4))
    with open(empty.repository.parent / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, available(empty.repository) - 3 * MIB)
    empty.publish(point, "trial")
    for number in range(300):
        done = empty.run("--json", "publish", point, "--name", f"more{number}")
        if done.returncode != 0:
            break
    assert done.returncode == 1 and error_kind(done) == "no_space"
    assert "coldrise gc" in done.stderr
    empty.json("unpublish", "trial", "--discard")
    sessions = [session["session"] for session in empty.json("sessions")["sessions"]]
    for name in sessions:
        empty.json("unpublish", name, "--discard")
    empty.json("forget", point)
    empty.json("gc")
