"""Kills and power cuts under load: what was flushed is there, nothing else is made up.

The short form runs with all tests; `make test-crash` runs the long one. Every
number comes from one seed, which is printed; --crash-seed repeats it (the
moments of the crashes are real time and vary).
"""

import collections
import errno
import os
import random
import time

import nbd
import pytest

from support.crash.load import MAX_WRITE_BLOCKS, CrashViolation
from support.crash.loopfs import LoopFileSystem, LoopUnavailable
from support.crash.rounds import run_command_kills, run_cuts, run_kills
from support.crash.story import Story
from support.crash.syncs import Syncs
from support.nbdserver import wait_until


@pytest.fixture
def seed(request):
    value = request.config.getoption("--crash-seed")
    if value is None:
        value = random.SystemRandom().randrange(1 << 32)
    print(f"\n--crash-seed {value}")
    return value


@pytest.fixture
def loop_devices():
    """Turns missing loop devices into a clear end of the test."""

    def unavailable(reason):
        message = f"no ext4 on a loop file here, so no power can be cut: {reason}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)

    return unavailable


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


def test_power_cuts(request, seed, loop_devices):
    counts, began = collections.Counter(), time.monotonic()
    wanted = request.config.getoption("--crash-cuts")
    try:
        run_cuts(random.Random(seed), seed, wanted, counts, reporter())
    except LoopUnavailable as error:
        if counts["cuts"]:
            raise
        loop_devices(error)
    tell(counts, began)


def test_killed_commands(request, seed):
    counts, began = collections.Counter(), time.monotonic()
    wanted = max(5, request.config.getoption("--crash-kills") // 3)
    run_command_kills(random.Random(seed), seed, wanted, counts, reporter())
    tell(counts, began)


@pytest.fixture
def loop(tmp_path, loop_devices):
    """Makes small file systems on loop files."""
    made = []

    def make(size_bytes):
        try:
            made.append(LoopFileSystem(tmp_path, size_bytes))
        except LoopUnavailable as error:
            loop_devices(error)
        return made[-1]

    yield make
    for file_system in made:
        file_system.close()


@pytest.fixture
def story(tmp_path, seed):
    """Begins a story in a folder; what still runs at the end is ended."""
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


def test_a_server_that_only_says_it_synced_is_found(tmp_path, loop, story):
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


def test_no_flush_succeeds_after_a_failed_one(tmp_path, story):
    """The kernel reports a failed sync once; the next fsync would succeed and
    mean nothing."""
    syncs = Syncs(tmp_path)
    told = story()
    first, second = told.disks
    with syncs.preloaded():
        told.start_server()
    told.start_load()
    told.run_load(0.2)
    told.load.settle()
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
    """The last connection closes the session, the next one opens it anew."""
    syncs = Syncs(tmp_path)
    told = story()
    first, second = told.disks
    with syncs.preloaded():
        told.start_server()
    told.start_load()
    told.run_load(0.1)
    told.load.settle()
    syncs.fail()
    assert told.load.write(first, 5)
    assert not told.load.flush(first)
    told.finish_load()
    syncs.work()

    def opens():
        try:
            told.start_load()
        except nbd.Error:
            return False
        return True

    wait_until(opens, "the session to be free")
    for disk in told.disks:
        disk.crashed()
    assert told.load.write(first, 6)
    assert told.load.flush(first) and told.load.flush(second)
    told.check_crash()
    told.kill_server()
    told.start_server()
    told.check_crash()


def test_a_file_system_that_fails_loses_nothing_flushed(loop, story):
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
    # What was taken before is read, and can be flushed.
    assert all(told.load.flush(oracle) for oracle in told.disks)
    told.check_crash()
    # A seal needs a little space: it succeeds, or there is no new point.
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
