"""Kills and power cuts under load: flushed data is present, nothing else is invented.

The short form runs with all tests; `make test-crash` runs the long one. Every
number comes from one seed, which is printed; --crash-seed repeats it (the
moments of the crashes are real time and vary).
"""

import collections
import errno
import os
import random
import time

import pytest

from support.crash.load import MAX_WRITE_BLOCKS, CrashViolation
from support.crash.loopfs import LoopFileSystem
from support.crash.oracle import PointOracle
from support.crash.rounds import run_command_kills, run_cuts, run_kills, run_reopenings
from support.crash.story import Story
from support.crash.syncs import Syncs

# See "Superblock area" in docs/on-disk-format.md.
LAYER_HEAD_BYTES = 64 << 10


@pytest.fixture
def seed(request):
    value = request.config.getoption("--crash-seed")
    if value is None:
        # The long form tries new ones.
        is_long = request.config.getoption("--crash-kills") > 25
        value = random.SystemRandom().randrange(1 << 32) if is_long else 17
    print(f"\n--crash-seed {value}")
    return value


def reporter():
    """Prints progress now and then: the long form takes an hour."""
    began = last = time.monotonic()

    def report(what, done, seconds):
        nonlocal last
        if time.monotonic() - last > 30:
            last = time.monotonic()
            print(f"{what}: {done} in {last - began:.0f} s, the last took {seconds:.2f} s", flush=True)

    return report


def tell(counts, began):
    told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    print(f"{told}; {time.monotonic() - began:.0f} s", flush=True)


def test_kills(request, seed):
    counts, began = collections.Counter(), time.monotonic()
    run_kills(random.Random(seed), seed, request.config.getoption("--crash-kills"), counts, reporter())
    tell(counts, began)


def test_power_cuts(request, seed):
    counts, began = collections.Counter(), time.monotonic()
    wanted = request.config.getoption("--crash-cuts")
    run_cuts(random.Random(seed), seed, wanted, counts, reporter())
    tell(counts, began)


def test_killed_commands(request, seed):
    counts, began = collections.Counter(), time.monotonic()
    wanted = max(5, request.config.getoption("--crash-kills") // 3)
    run_command_kills(random.Random(seed), seed, wanted, counts, reporter())
    tell(counts, began)


def test_reopenings(request, seed):
    counts, began = collections.Counter(), time.monotonic()
    wanted = request.config.getoption("--crash-reopenings")
    run_reopenings(random.Random(seed), seed, wanted, counts, reporter())
    tell(counts, began)


@pytest.fixture
def loop(tmp_path):
    """Makes small file systems on loop files."""
    made = []

    def make(size_bytes):
        made.append(LoopFileSystem(tmp_path, size_bytes))
        return made[-1]

    yield make
    for file_system in made:
        file_system.close()


@pytest.fixture
def story(tmp_path, seed):
    """Begins a story in a folder; remaining processes are ended at the end."""
    told = []

    def begin(place=tmp_path):
        one = Story(random.Random(seed), tmp_path, place, collections.Counter())
        told.append(one)
        one.begin()
        return one

    yield begin
    for one in told:
        if one.load is not None:
            one.load.connections.close()
        one.close()


def test_a_server_that_falsely_reports_syncs_is_detected(tmp_path, loop, story):
    """The test of the test: this server loses flushed writes when the power fails."""
    syncs = Syncs(tmp_path)
    disk = loop(1 << 30)
    with syncs.preloaded():
        told = story(disk.mount_point)
        told.start_server()
        told.start_load()
        told.run_load(0.1)
        told.load.settle()
        syncs.lie()
        for block in range(100):
            assert told.load.write(told.disks[0], block)
        assert told.load.flush(told.disks[0])
    disk.cut_power()
    told.kill_server()
    disk.power_up()
    told.start_server()
    with pytest.raises(CrashViolation, match="after a crash: disk vda"):
        told.check_crash()


def loaded(tmp_path, story, seconds):
    """A story under load whose server's syncs can be made to fail, at a quiet moment."""
    syncs = Syncs(tmp_path)
    told = story()
    with syncs.preloaded():
        told.start_server()
    told.start_load()
    told.run_load(seconds)
    told.load.settle()
    return told, syncs


def test_no_flush_succeeds_after_a_failed_one(tmp_path, story):
    """The kernel reports a failed sync once; the next fsync would succeed and
    mean nothing."""
    told, syncs = loaded(tmp_path, story, 0.2)
    first, second = told.disks
    assert told.load.flush(first) and told.load.flush(second)
    assert told.load.write(first, 5)
    syncs.fail()
    assert not told.load.flush(first)
    syncs.work()
    for _ in range(10):
        assert not told.load.flush(first), "a flush succeeded after a failed one"
        assert not told.load.flush(second), "a flush of the session's other disk succeeded"
        assert not told.load.write(first, 6, is_fua=True)
    assert told.load.later_flushes_refused >= 20
    sealed = told.coldrise.run("--json", "seal", told.session)
    assert sealed.returncode == 1, f"sealed after a failed sync: {sealed.stdout}"

    # Everything flushed is still read, then and after the session is opened again.
    told.check_crash(look_at_list=True)
    told.kill_server()
    told.start_server()
    told.check_crash()
    told.start_load()
    assert told.load.write(first, 7, is_fua=True)
    assert told.load.flush(first) and told.load.flush(second)
    told.kill_server()
    told.end_session()


def test_a_session_is_reopened_after_a_failed_flush_without_a_restart(tmp_path, story):
    """The last connection closes the session, the next one reopens it."""
    told, syncs = loaded(tmp_path, story, 0.1)
    first, second = told.disks
    # Nothing older is left that a thread of the server would flush before this client does.
    assert told.load.flush(first) and told.load.flush(second)
    # Written before syncs fail: such a thread may meet that first, and then writes fail, too.
    assert told.load.write(first, 5)
    syncs.fail()
    assert not told.load.flush(first)
    told.finish_load()
    syncs.work()
    # The server closes a session a moment after its last client has left: who connects before that shares it.
    told.wait_until_closed()
    told.start_load()
    for disk in told.disks:
        disk.crashed()
    assert told.load.write(first, 6)
    assert told.load.flush(first) and told.load.flush(second)
    told.check_crash()
    told.kill_server()
    told.start_server()
    told.check_crash()


def session_folder(told):
    (document,) = (told.coldrise.repository / "live").glob("*/session.json")
    return document.parent


def captured(told):
    """The content of each layer file, without the header, which opening changes."""
    layers = (told.coldrise.repository / "layers").iterdir()
    return {path: path.read_bytes()[LAYER_HEAD_BYTES:] for path in layers}


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_seal_that_fails_late_stops_the_session(tmp_path, story, is_restarted):
    """session.json is replaced, but its folder's sync fails: it is unknown whether the
    captured writes belong to a restore point from now on, so none may be added."""
    told, syncs = loaded(tmp_path, story, 0.2)
    assert all(told.load.flush(disk) for disk in told.disks)
    flushed, layers = told.read_session(), captured(told)

    syncs.fail_at(session_folder(told))
    began = told.clock.tick()
    failed = told.coldrise.run("--json", "seal", told.session)
    # The rename has happened and no power was cut: the point is complete.
    told.perhaps = PointOracle(told.disks, began, told.clock.tick())
    assert failed.returncode == 1, f"sealed without a sync: {failed.stdout}"
    assert f"syncing {session_folder(told)}: {os.strerror(errno.EIO)}" in failed.stderr
    syncs.work()

    for disk in told.disks:
        assert not told.load.write(disk, 5), "a write succeeded after a seal that failed late"
        assert not told.load.write(disk, 6, is_fua=True)
        assert not told.load.flush(disk)
    assert {error for _, error in told.load.errors} == {errno.EIO}
    assert told.coldrise.run("seal", told.session).returncode == 1, "sealed again"
    now = captured(told)
    assert len(now) == len(layers) + len(told.disks), "a layer file was removed"
    for path, content in layers.items():
        assert now[path].startswith(content), f"{path} was written to after its seal"

    told.finish_load()
    if is_restarted:
        told.server.stop()
        told.start_server()
    else:
        told.wait_until_closed()
    assert told.read_session() == flushed
    told.check_crash(look_at_list=True)
    assert told.counts["seals_found_after_a_crash"] == 1, "the point that was named is not there"
    (address,) = told.points
    assert [told.read_disk(f"{address}/{disk.name}") for disk in told.disks] == flushed
    told.start_load()
    told.run_load(0.1)
    assert told.load.errors == {}
    told.kill_server()
    told.end_session()


@pytest.mark.parametrize("what", ["the new layers", "the new document"])
def test_a_seal_that_fails_early_changes_nothing(tmp_path, story, what):
    told, syncs = loaded(tmp_path, story, 0.1)
    if what == "the new layers":
        syncs.fail_at(told.coldrise.repository / "layers")
    else:
        syncs.fail_at(session_folder(told) / "session.json.new")
    failed = told.coldrise.run("seal", told.session)
    assert failed.returncode == 1, f"sealed without a sync: {failed.stdout}"
    syncs.work()
    told.check_list(None)
    told.run_load(0.1)
    told.load.settle()
    assert told.load.errors == {}
    began = told.clock.tick()
    told.note_seal(began, told.coldrise.run("--json", "seal", told.session).stdout)
    told.kill_server()
    told.end_session()


def test_a_failing_file_system_loses_no_flushed_data(loop, story):
    disk = loop(1 << 30)
    told = story(disk.mount_point)
    first, second = told.disks
    told.start_server()
    told.start_load()
    told.run_load(0.3)
    told.load.settle()
    assert told.load.flush(first) and told.load.flush(second)
    assert told.load.write(second, 3)
    disk.cut_power()
    assert not told.load.flush(second)
    assert not told.load.flush(second)
    assert not told.load.flush(first)
    told.load.run(0.1)
    assert told.server.process.poll() is None, "the server died of its file system's failure"
    told.kill_server()
    disk.power_up()
    told.start_server()
    told.check_crash(look_at_list=True)
    told.start_load()
    assert told.load.write(first, 3, is_fua=True)
    told.kill_server()
    told.end_session()


@pytest.mark.parametrize("is_killed_while_full", [False, True])
def test_a_full_disk_refuses_writes_and_loses_nothing(loop, story, is_killed_while_full):
    disk = loop(256 << 20)
    told = story(disk.mount_point)
    told.start_server()
    told.start_load()
    told.run_load(0.05)
    told.load.settle()
    assert all(told.load.flush(oracle) for oracle in told.disks)
    ballast = disk.fill()
    # The space that the layer already has does not last for the whole disk.
    first = told.disks[0]
    for cell in range(0, first.coarse_cells, MAX_WRITE_BLOCKS):
        told.load.write(first, cell, MAX_WRITE_BLOCKS)
    told.load.run(0.1)
    told.load.settle()
    assert {error for _, error in told.load.errors} == {errno.ENOSPC}
    assert not [kind for kind, _ in told.load.errors if kind in ("read", "flush")]
    # Writes accepted before can be read and flushed.
    assert all(told.load.flush(oracle) for oracle in told.disks)
    told.check_crash()
    # A seal needs a little space: it succeeds, or no new point appears.
    began = told.clock.tick()
    sealed = told.coldrise.run("--json", "seal", told.session)
    if sealed.returncode == 0:
        told.note_seal(began, sealed.stdout)
    told.check_list(None)

    if is_killed_while_full:
        told.kill_server()
        ballast.unlink()
        told.start_server()
        told.check_crash(look_at_list=True)
        told.start_load()
    else:
        ballast.unlink()
        told.load.errors.clear()
    told.run_load(0.3)
    told.load.settle()
    assert told.load.errors == {}
    assert all(told.load.flush(oracle) for oracle in told.disks)
    told.kill_server()
    told.end_session()
