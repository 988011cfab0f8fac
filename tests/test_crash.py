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
    scenario = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    print(f"{scenario}; {time.monotonic() - began:.0f} s", flush=True)


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
    scenario = []

    def begin(place=tmp_path):
        one = Story(random.Random(seed), tmp_path, place, collections.Counter())
        scenario.append(one)
        one.begin()
        return one

    yield begin
    for one in scenario:
        if one.load is not None:
            one.load.connections.close()
        one.close()


def test_a_server_that_falsely_reports_syncs_is_detected(tmp_path, loop, story):
    """The test of the test: this server loses flushed writes when the power fails."""
    syncs = Syncs(tmp_path)
    disk = loop(1 << 30)
    with syncs.preloaded():
        scenario = story(disk.mount_point)
        scenario.start_server()
        scenario.start_load()
        scenario.run_load(0.1)
        scenario.load.settle()
        syncs.lie()
        for block in range(100):
            assert scenario.load.write(scenario.disks[0], block)
        assert scenario.load.flush(scenario.disks[0])
    disk.cut_power()
    scenario.kill_server()
    disk.power_up()
    scenario.start_server()
    with pytest.raises(CrashViolation, match="after a crash: disk vda"):
        scenario.check_crash()


def loaded(tmp_path, story, seconds):
    """A story under load whose server's syncs can be made to fail, at a quiet moment."""
    syncs = Syncs(tmp_path)
    scenario = story()
    with syncs.preloaded():
        scenario.start_server()
    scenario.start_load()
    scenario.run_load(seconds)
    scenario.load.settle()
    return scenario, syncs


def test_no_flush_succeeds_after_a_failed_one(tmp_path, story):
    """The kernel reports a failed sync once; the next fsync would succeed and
    mean nothing."""
    scenario, syncs = loaded(tmp_path, story, 0.2)
    first, second = scenario.disks
    assert scenario.load.flush(first) and scenario.load.flush(second)
    assert scenario.load.write(first, 5)
    syncs.fail()
    assert not scenario.load.flush(first)
    syncs.work()
    for _ in range(10):
        assert not scenario.load.flush(first), "a flush succeeded after a failed one"
        assert not scenario.load.flush(second), "a flush of the session's other disk succeeded"
        assert not scenario.load.write(first, 6, is_fua=True)
    assert scenario.load.later_flushes_refused >= 20
    sealed = scenario.coldrise.run("--json", "seal", scenario.session)
    assert sealed.returncode == 1, f"sealed after a failed sync: {sealed.stdout}"

    # Everything flushed is still read, then and after the session is opened again.
    scenario.check_crash(look_at_list=True)
    scenario.kill_server()
    scenario.start_server()
    scenario.check_crash()
    scenario.start_load()
    assert scenario.load.write(first, 7, is_fua=True)
    assert scenario.load.flush(first) and scenario.load.flush(second)
    scenario.kill_server()
    scenario.end_session()


def test_a_session_is_reopened_after_a_failed_flush_without_a_restart(tmp_path, story):
    """The last connection closes the session, the next one reopens it."""
    scenario, syncs = loaded(tmp_path, story, 0.1)
    first, second = scenario.disks
    # Nothing older is left that a thread of the server would flush before this client does.
    assert scenario.load.flush(first) and scenario.load.flush(second)
    # Written before syncs fail: such a thread may meet that first, and then writes fail, too.
    assert scenario.load.write(first, 5)
    syncs.fail()
    assert not scenario.load.flush(first)
    scenario.finish_load()
    syncs.work()
    # The server closes a session a moment after its last client has left: who connects before that shares it.
    scenario.wait_until_closed()
    scenario.start_load()
    for disk in scenario.disks:
        disk.crashed()
    assert scenario.load.write(first, 6)
    assert scenario.load.flush(first) and scenario.load.flush(second)
    scenario.check_crash()
    scenario.kill_server()
    scenario.start_server()
    scenario.check_crash()


def session_folder(scenario):
    (document,) = (scenario.coldrise.repository / "live").glob("*/session.json")
    return document.parent


def captured(scenario):
    """The content of each layer file, without the header, which opening changes."""
    layers = (scenario.coldrise.repository / "layers").iterdir()
    return {path: path.read_bytes()[LAYER_HEAD_BYTES:] for path in layers}


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_seal_that_fails_late_stops_the_session(tmp_path, story, is_restarted):
    """session.json is replaced, but its folder's sync fails: it is unknown whether the
    captured writes belong to a restore point from now on, so none may be added."""
    scenario, syncs = loaded(tmp_path, story, 0.2)
    assert all(scenario.load.flush(disk) for disk in scenario.disks)
    flushed, before = scenario.read_session(), captured(scenario)

    syncs.fail_at(session_folder(scenario))
    began = scenario.clock.tick()
    failed = scenario.coldrise.run("--json", "seal", scenario.session)
    # The rename has happened and no power was cut: the point is complete.
    scenario.perhaps = PointOracle(scenario.disks, began, scenario.clock.tick())
    assert failed.returncode == 1, f"sealed without a sync: {failed.stdout}"
    assert f"syncing {session_folder(scenario)}: {os.strerror(errno.EIO)}" in failed.stderr
    syncs.work()
    # Until the seal, a time mark was still written to them.
    layers = captured(scenario)
    assert before.keys() <= layers.keys(), "a layer file was removed"

    for disk in scenario.disks:
        assert not scenario.load.write(disk, 5), "a write succeeded after a seal that failed late"
        assert not scenario.load.write(disk, 6, is_fua=True)
        assert not scenario.load.flush(disk)
    assert {error for _, error in scenario.load.errors} == {errno.EIO}
    assert scenario.coldrise.run("seal", scenario.session).returncode == 1, "sealed again"
    now = captured(scenario)
    assert len(now) == len(before) + len(scenario.disks), "a layer file was removed"
    for path in before:
        assert now[path].startswith(layers[path]), f"{path} was written to after its seal"

    scenario.finish_load()
    if is_restarted:
        scenario.server.stop()
        scenario.start_server()
    else:
        scenario.wait_until_closed()
    assert scenario.read_session() == flushed
    scenario.check_crash(look_at_list=True)
    assert scenario.counts["seals_found_after_a_crash"] == 1, "the point that was named is not there"
    (address,) = scenario.points
    assert [scenario.read_disk(f"{address}/{disk.name}") for disk in scenario.disks] == flushed
    scenario.start_load()
    scenario.run_load(0.1)
    assert scenario.load.errors == {}
    scenario.kill_server()
    scenario.end_session()


@pytest.mark.parametrize("what", ["the new layers", "the new document"])
def test_a_seal_that_fails_early_changes_nothing(tmp_path, story, what):
    scenario, syncs = loaded(tmp_path, story, 0.1)
    if what == "the new layers":
        syncs.fail_at(scenario.coldrise.repository / "layers")
    else:
        syncs.fail_at(session_folder(scenario) / "session.json.new")
    failed = scenario.coldrise.run("seal", scenario.session)
    assert failed.returncode == 1, f"sealed without a sync: {failed.stdout}"
    syncs.work()
    scenario.check_list(None)
    scenario.run_load(0.1)
    scenario.load.settle()
    assert scenario.load.errors == {}
    began = scenario.clock.tick()
    scenario.note_seal(began, scenario.coldrise.run("--json", "seal", scenario.session).stdout)
    scenario.kill_server()
    scenario.end_session()


def test_a_failing_file_system_loses_no_flushed_data(loop, story):
    disk = loop(1 << 30)
    scenario = story(disk.mount_point)
    first, second = scenario.disks
    scenario.start_server()
    scenario.start_load()
    scenario.run_load(0.3)
    scenario.load.settle()
    assert scenario.load.flush(first) and scenario.load.flush(second)
    assert scenario.load.write(second, 3)
    disk.cut_power()
    assert not scenario.load.flush(second)
    assert not scenario.load.flush(second)
    assert not scenario.load.flush(first)
    scenario.load.run(0.1)
    assert scenario.server.process.poll() is None, "the server died of its file system's failure"
    scenario.kill_server()
    disk.power_up()
    scenario.start_server()
    scenario.check_crash(look_at_list=True)
    scenario.start_load()
    assert scenario.load.write(first, 3, is_fua=True)
    scenario.kill_server()
    scenario.end_session()


@pytest.mark.parametrize("is_killed_while_full", [False, True])
def test_a_full_disk_refuses_writes_and_loses_nothing(loop, story, is_killed_while_full):
    disk = loop(256 << 20)
    scenario = story(disk.mount_point)
    scenario.start_server()
    scenario.start_load()
    scenario.run_load(0.05)
    scenario.load.settle()
    assert all(scenario.load.flush(oracle) for oracle in scenario.disks)
    ballast = disk.fill()
    # The space that the layer already has does not last for the whole disk.
    first = scenario.disks[0]
    for cell in range(0, first.coarse_cells, MAX_WRITE_BLOCKS):
        scenario.load.write(first, cell, MAX_WRITE_BLOCKS)
    scenario.load.run(0.1)
    scenario.load.settle()
    assert {error for _, error in scenario.load.errors} == {errno.ENOSPC}
    assert not [kind for kind, _ in scenario.load.errors if kind in ("read", "flush")]
    # Writes accepted before can be read and flushed.
    assert all(scenario.load.flush(oracle) for oracle in scenario.disks)
    scenario.check_crash()
    # A seal needs a little space: it succeeds, or no new point appears.
    began = scenario.clock.tick()
    sealed = scenario.coldrise.run("--json", "seal", scenario.session)
    if sealed.returncode == 0:
        scenario.note_seal(began, sealed.stdout)
    scenario.check_list(None)

    if is_killed_while_full:
        scenario.kill_server()
        ballast.unlink()
        scenario.start_server()
        scenario.check_crash(look_at_list=True)
        scenario.start_load()
    else:
        ballast.unlink()
        scenario.load.errors.clear()
    scenario.run_load(0.3)
    scenario.load.settle()
    assert scenario.load.errors == {}
    assert all(scenario.load.flush(oracle) for oracle in scenario.disks)
    scenario.kill_server()
    scenario.end_session()
