"""coldrise gc: frees the space of unreferenced data, and nothing else."""

import contextlib
import fcntl
import json
import pathlib
import random
import shutil
import signal
import subprocess
import threading
import time

import pytest

from support.image import Image
from support.nbdserver import read_all, wait_until

KIB, MIB = 1 << 10, 1 << 20
FAILED, BUSY, INTERRUPTED = 1, 11, 130
NOTHING = {"chunks_deleted": 0, "pages_deleted": 0, "layers_deleted": 0}


@pytest.fixture
def disk():
    """Large enough for files of chunks of their own: a quarter is a hole."""
    disk = Image(32 * MIB)
    disk.fill(0, 24 * MIB, "first")
    return disk


@pytest.fixture
def save(coldrise, tmp_path):
    """Backs a disk up; returns the point's address."""

    def save(machine, disk):
        return coldrise.backup(machine, vda=disk.save(tmp_path / "vda.raw"))

    return save


def database_bytes(coldrise):
    return sum(path.stat().st_size for path in (coldrise.repository / "db").glob("*.sst"))


def without_time(result):
    return {name: value for name, value in result.items() if name in NOTHING}


def assert_restores(coldrise, contents, tmp_path):
    target = tmp_path / "restored.raw"
    for address, content in contents.items():
        coldrise.json("restore", f"{address}/vda", target, "--force")
        assert target.read_bytes() == content, address


def test_the_space_of_a_forgotten_machine_is_returned(coldrise, disk, save, tmp_path):
    kept = save("web01", disk)
    content = bytes(disk.content)
    disk.fill(4 * MIB, 16 * MIB, "second")
    gone = save("web02", disk)
    nothing = coldrise.json("gc")
    assert without_time(nothing) == NOTHING and nothing["chunks_kept_unreferenced"] == 0

    coldrise.json("forget", gone)
    before = database_bytes(coldrise)
    assert before > 40 * MIB
    estimate = coldrise.json("gc", "--dry-run")
    assert estimate["is_dry_run"] and estimate["chunks_to_delete"] == 16 * MIB // (16 * KIB)
    assert database_bytes(coldrise) == before
    done = coldrise.json("gc")
    assert done["chunks_deleted"] == estimate["chunks_to_delete"]
    assert done["pages_deleted"] > 0
    assert 0.9 * estimate["bytes_to_return"] < done["bytes_returned"]
    assert database_bytes(coldrise) < before - 16 * MIB
    assert_restores(coldrise, {kept: content}, tmp_path)
    stats = coldrise.json("stats")
    assert stats["chunks"] == 24 * MIB // (16 * KIB)
    assert 24 * MIB < stats["stored_bytes"] < 25 * MIB
    assert coldrise.json("verify")["is_clean"]

    text = coldrise.run("gc").stdout
    assert text.startswith("deleted 0 chunks, 0 pages and 0 layers in "), text
    assert "would return" in coldrise.run("gc", "--dry-run").stdout


def deleted_files(process):
    """Files of the database that a process holds though they are deleted: they take space."""
    held = []
    for entry in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            held.append(str(entry.readlink()))
    return [name for name in held if name.endswith(".sst (deleted)")]


def test_a_server_releases_space_freed_by_a_gc(coldrise, nbdkit, disk, save):
    kept = save("web01", disk)
    content = bytes(disk.content)
    disk.fill(0, 24 * MIB, "second")
    gone = save("web02", disk)
    export = coldrise.publish(kept, "trial")["vda"]
    server = nbdkit()
    with server.connect(f"{gone}/vda") as handle:
        handle.pread(MIB, 0)
    with server.connect(export) as handle:
        assert handle.pread(MIB, 4 * MIB) == content[4 * MIB:5 * MIB]
        coldrise.json("forget", gone)
        # The server closes a point a moment after its reader has left.
        chunks = 24 * MIB // (16 * KIB)
        wait_until(lambda: coldrise.json("gc")["chunks_deleted"] == chunks, "the end of the chunks")
        # No client sends a request meanwhile.
        wait_until(lambda: not deleted_files(server.process), "files are let go of")
        assert handle.pread(len(content), 0) == content


def test_unreferenced_chunks_among_used_ones_are_kept_and_reused(coldrise, disk, save, tmp_path):
    first = save("web01", disk)
    forgotten = bytes(disk.content)
    disk.fill(0, 4 * MIB, "second")
    second = save("web01", disk)
    coldrise.json("forget", first)
    done = coldrise.json("gc")
    assert (done["chunks_deleted"], done["chunks_kept_unreferenced"]) == (0, 256)
    content = bytes(disk.content)
    disk.content[:] = forgotten
    again = coldrise.json("backup", "web01", f"vda=raw:{disk.save(tmp_path / 'vda.raw')}")
    assert again["disks"][0]["new_chunks"] == 0
    assert_restores(coldrise, {second: content, again["address"]: forgotten}, tmp_path)


@pytest.fixture
def scattered(coldrise, tmp_path):
    """A file of chunks of which less than half is unreferenced: 10 MiB of 24. Returns the point
    that is left, and its content."""
    disk = Image(24 * MIB)
    disk.fill(0, 24 * MIB, "first")
    path = disk.save(tmp_path / "vda.raw")
    first = coldrise.backup("web01", vda=path)
    disk.fill(0, 10 * MIB, "second")
    kept = coldrise.backup("web01", vda=disk.save(path))
    coldrise.json("forget", first)
    assert coldrise.json("gc")["bytes_returned"] < MIB
    return kept, bytes(disk.content)


@pytest.mark.parametrize("command", [("gc",), ("prune", "--keep-last", "1", "--gc")])
def test_the_unreferenced_share_is_configurable(coldrise, scattered, tmp_path, command):
    kept, content = scattered
    waiting = coldrise.json("stats")
    assert waiting["reclaimable_bytes"] == 0
    assert 10 * MIB <= waiting["kept_unreferenced_bytes"] < 10.5 * MIB
    # It is not a failure of deduplication.
    assert waiting["unique_bytes"] == waiting["recoverable_bytes"] == 24 * MIB
    assert waiting["deduplication_percent"] == 0
    estimate = coldrise.json("gc", "--dry-run", "--max-unused", 0)
    assert (estimate["chunks_to_delete"], estimate["chunks_kept_unreferenced"]) == (640, 0)
    assert coldrise.json("gc", "--max-unused", 60)["chunks_deleted"] == 0
    done = coldrise.json(*command, "--max-unused", 0)
    done = done.get("gc", done)
    assert (done["chunks_deleted"], done["chunks_kept_unreferenced"]) == (640, 0)
    assert 9 * MIB < done["bytes_returned"] < 11 * MIB
    after = coldrise.json("stats")
    assert (after["kept_unreferenced_bytes"], after["chunks"]) == (0, 24 * MIB // (16 * KIB))
    assert_restores(coldrise, {kept: content}, tmp_path)
    assert coldrise.json("verify")["is_clean"]
    for wrong in ("-1", "101", "half"):
        assert coldrise.run("gc", f"--max-unused={wrong}").returncode == 2
    assert coldrise.run("prune", "--keep-last", "1", "--max-unused", "0").returncode == 2


def test_a_lost_point_stops_a_gc_until_it_is_repaired_and_forgotten(coldrise, disk, save, tmp_path):
    kept = save("web01", disk)
    content = bytes(disk.content)
    database, older = coldrise.repository / "db", tmp_path / "older"
    shutil.copytree(database, older)
    disk.fill(0, MIB, "second")
    lost = save("web01", disk)
    shutil.rmtree(database)
    shutil.copytree(older, database)

    refused = coldrise.run("gc")
    assert refused.returncode == FAILED and "coldrise repair" in refused.stderr
    # The rest is still counted.
    done = coldrise.run("--json", "stats")
    stats = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == FAILED
    assert [damaged["what"] for damaged in stats["damaged_documents"]] == [lost]
    assert stats["points"] == 1 and stats["recoverable_bytes"] == 24 * MIB
    one = coldrise.run("stats", "web01")
    assert one.returncode == FAILED and kept in one.stdout and lost in one.stderr
    # Its document is restored from the marker, its content is not.
    done = coldrise.run("repair")
    assert done.returncode == FAILED and lost in done.stdout

    coldrise.json("forget", lost)
    coldrise.json("gc")
    assert coldrise.json("stats")["damaged_documents"] == []
    assert_restores(coldrise, {kept: content}, tmp_path)


def test_layers_are_removed_with_their_points(coldrise, disk, save, nbdkit):
    point = save("web01", disk)
    coldrise.publish(point, "trial")
    with nbdkit() as server, server.connect("live/trial/vda") as handle:
        handle.pwrite(b"x" * MIB, 0)
        handle.flush()
        sealed = coldrise.json("seal", "trial")["address"]
    coldrise.json("unpublish", "trial", "--discard")
    layers = list((coldrise.repository / "layers").iterdir())
    assert without_time(coldrise.json("gc")) == NOTHING
    assert list((coldrise.repository / "layers").iterdir()) == layers != []
    coldrise.json("forget", sealed)
    assert coldrise.json("gc", "--dry-run")["layers_to_delete"] in (0, 1)
    coldrise.json("gc")
    assert list((coldrise.repository / "layers").iterdir()) == []
    assert coldrise.json("verify")["is_clean"]


def test_a_served_point_stays_readable_after_forget(coldrise, disk, save, nbdkit):
    other = Image(32 * MIB)
    other.fill(0, 12 * MIB, "other")
    kept = save("web02", other)
    gone = save("web01", disk)
    chunks = 24 * MIB // (16 * KIB)
    with nbdkit("chunk-cache=0") as server, server.connect(f"{gone}/vda") as handle:
        coldrise.json("forget", gone)
        assert without_time(coldrise.json("gc")) == NOTHING
        # An unknown name makes the server catch up with what was deleted.
        other.fill(0, 12 * MIB, "another")
        newest = save("web02", other)
        coldrise.json("forget", kept)
        assert coldrise.json("gc")["chunks_deleted"] == 12 * MIB // (16 * KIB)
        with server.connect(f"{newest}/vda") as second:
            assert read_all(second) == bytes(other.content)
        assert read_all(handle) == bytes(disk.content)
    assert coldrise.json("gc")["chunks_deleted"] == chunks


def test_a_machine_keeps_running_during_a_gc(coldrise, disk, save, nbdkit):
    gone = save("web01", disk)
    coldrise.publish(gone, "trial")
    other = Image(32 * MIB)
    other.fill(0, 24 * MIB, "other")
    rest = save("web02", other)
    with nbdkit("chunk-cache=0") as server, server.connect("live/trial/vda") as handle:
        coldrise.json("forget", rest)
        writer = threading.Thread(target=coldrise.json, args=["gc"])
        writer.start()
        for number in range(200):
            data = random.Random(number).randbytes(64 * KIB)
            handle.pwrite(data, number * 100 * KIB)
            disk.write(number * 100 * KIB, data)
        handle.flush()
        writer.join()
        assert database_bytes(coldrise) < 26 * MIB
        assert read_all(handle) == bytes(disk.content)
    assert coldrise.json("verify")["is_clean"]


def test_a_second_writer_is_refused_and_a_dry_run_is_not(coldrise, disk, save):
    save("web01", disk)
    with open(coldrise.repository / "writer.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = coldrise.run("--json", "gc")
        assert done.returncode == BUSY, done.stdout
        assert coldrise.json("gc", "--dry-run")["chunks_to_delete"] == 0


def test_a_damaged_file_is_named_and_all_others_are_restored(coldrise, disk, save, tmp_path):
    kept = save("web01", disk)
    content = bytes(disk.content)
    files = set((coldrise.repository / "db").glob("*.sst"))
    disk.fill(0, 16 * MIB, "second")
    half_gone = save("web02", disk)
    (damaged,) = (
        path
        for path in set((coldrise.repository / "db").glob("*.sst")) - files
        if path.stat().st_size > 8 * MIB
    )
    disk.fill(0, 10 * MIB, "third")
    newer = save("web02", disk)
    newer_content = bytes(disk.content)
    # In what is forgotten: the first third of the second point's chunks.
    with open(damaged, "r+b") as file:
        file.seek(2 * MIB)
        byte = file.read(1)[0]
        file.seek(2 * MIB)
        file.write(bytes([byte ^ 1]))
    other = Image(32 * MIB)
    other.fill(0, 12 * MIB, "other")
    gone = save("web03", other)
    coldrise.json("forget", half_gone, gone)
    before = database_bytes(coldrise)
    done = coldrise.run("--json", "gc")
    assert done.returncode == FAILED, done.stdout
    message = json.loads(done.stdout.splitlines()[-1])["error"]["message"]
    assert f"db/{damaged.name}" in message and "coldrise verify" in message
    assert damaged.exists() and database_bytes(coldrise) < before - 11 * MIB
    assert_restores(coldrise, {kept: content, newer: newer_content}, tmp_path)
    disk.fill(0, 9 * MIB, "fourth")
    assert_restores(coldrise, {save("web01", disk): bytes(disk.content)}, tmp_path)


def test_readers_open_and_close_during_gcs(coldrise, disk, save, tmp_path):
    """A reader that opens the database finds all its files, despite concurrent deletions."""
    kept = save("web01", disk)
    content = bytes(disk.content)
    failures, is_over = [], threading.Event()

    def read():
        target = tmp_path / "beside.raw"
        while not is_over.is_set():
            done = coldrise.run("restore", f"{kept}/vda", target, "--force")
            if done.returncode != 0 or target.read_bytes() != content:
                failures.append(done.stderr)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(4):
            disk.fill(0, 12 * MIB, f"part {number}")
            gone = save("web02", disk)
            disk.fill(0, 8 * MIB, f"other part {number}")
            last = save("web02", disk)
            coldrise.json("forget", gone)
            coldrise.json("gc")
            coldrise.json("forget", last)
    finally:
        is_over.set()
        reader.join()
    assert failures == []


def test_a_killed_gc_loses_nothing(coldrise, tmp_path, request):
    disk = Image(20 * MIB)
    disk.fill(0, 16 * MIB, "first")
    rounds = request.config.getoption("--gc-kills")
    # The long form tries new ones.
    seed = request.config.getoption("--gc-seed") or (random.SystemRandom().randrange(1 << 32) if rounds > 30 else 8)
    print(f"seed {seed}: pytest {__file__} --gc-seed {seed}")
    chance = random.Random(seed)
    contents, forgotten, number = {}, [], 0
    duration_s = 0.5

    def save():
        nonlocal number
        number += 1
        path = disk.save(tmp_path / "vda.raw")
        time_name = f"2026{number // 672 + 1:02}{number // 24 % 28 + 1:02}T{number % 24:02}0000Z"
        made = coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", time_name)
        contents[made["address"]] = bytes(disk.content)

    save()
    for _ in range(rounds):
        if forgotten and chance.random() < 0.3:
            # Content that is being deleted is stored again.
            disk.content[:] = chance.choice(forgotten)
        else:
            length = chance.choice([64 * KIB, 9 * MIB, 12 * MIB])
            offset = chance.randrange(0, len(disk) - length, 16 * KIB)
            disk.write(offset, chance.randbytes(length))
        disk.stored = [(0, len(disk))]
        save()
        while len(contents) > 3:
            address = chance.choice(sorted(contents)[:-1])
            forgotten = [*forgotten[-2:], contents.pop(address)]
            coldrise.json("forget", address)
        started = time.monotonic()
        gc = coldrise.start("gc", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = gc.communicate(timeout=chance.uniform(0, 1.2 * duration_s))
            assert gc.returncode == 0, output
            duration_s = time.monotonic() - started
        except subprocess.TimeoutExpired:
            how = signal.SIGINT if chance.random() < 0.2 else signal.SIGKILL
            gc.send_signal(how)
            output, _ = gc.communicate()
            expected = (0, INTERRUPTED) if how == signal.SIGINT else (0, -signal.SIGKILL)
            assert gc.returncode in expected or how == signal.SIGINT and gc.returncode == -how, output
        assert coldrise.json("verify")["is_clean"]
        one = chance.choice(sorted(contents))
        assert_restores(coldrise, {one: contents[one]}, tmp_path)
    # Forgotten data is stored again if needed: nothing refers to deleted chunks.
    for content in forgotten:
        disk.content[:] = content
        save()
    assert_restores(coldrise, contents, tmp_path)
    assert coldrise.json("verify")["is_clean"]

    newest = max(contents)
    for address in set(contents) - {newest}:
        coldrise.json("forget", address)
    coldrise.json("gc")
    coldrise.json("gc")
    estimate = coldrise.json("gc", "--dry-run")
    assert (estimate["chunks_to_delete"], estimate["bytes_to_return"]) == (0, 0)
    needed = sum(
        any(contents[newest][at : at + 16 * KIB]) for at in range(0, len(disk), 16 * KIB)
    )
    # Files of which half is in use are not rewritten.
    assert database_bytes(coldrise) < 2 * needed * 16.5 * KIB + MIB
    assert_restores(coldrise, {newest: contents[newest]}, tmp_path)
    assert coldrise.json("verify")["is_clean"]


def test_unreadable_leases_delay_a_gc(coldrise, point):
    """The served points may be named there."""
    leases = coldrise.repository / "leases"
    shutil.rmtree(leases)
    # A check for its existence fails, as it does on a failing drive.
    leases.symlink_to(leases.name)
    done = coldrise.run("gc")
    assert done.returncode == FAILED and str(leases) in done.stderr, done.stderr
    leases.unlink()
    assert coldrise.json("show", point)["address"] == point
