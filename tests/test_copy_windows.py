"""coldrise copy --window: how much is sent follows the clock."""

import json
import random
import signal
import subprocess
import threading

import pytest

from support.cli import PROGRAM
from support.copies import addresses, check
from support.far_site import FarSite
from support.nbdserver import DEADLINE_S, wait_until
from support.wallclock import WallClock

KIB, MIB = 1 << 10, 1 << 20
POINT = "20261101T100000Z"


@pytest.fixture
def source(coldrise, tmp_path):
    site = FarSite(tmp_path, "source", program=coldrise)
    yield site
    site.close()


@pytest.fixture
def far(tmp_path):
    site = FarSite(tmp_path)
    yield site
    site.close()


@pytest.fixture
def disk(coldrise, tmp_path):
    """A point of two disks; the first one is a small part."""
    disks = {"vda": random.Random(9).randbytes(256 * KIB), "vdb": random.Random(10).randbytes(20 * MIB)}
    for name, content in disks.items():
        (tmp_path / f"{name}.raw").write_bytes(content)
    coldrise.json("backup", "web01", *(f"{name}=raw:{tmp_path / name}.raw" for name in disks), "--time", POINT)
    return {POINT: disks}


# Nothing is sent in the morning, and little in the afternoon. A test decides what time it is.
WINDOW = "00:00-12:00=off"
WINDOWS = ("--window", WINDOW, "--window", "13:00-14:00=4M")
MORNING, NOON, AFTERNOON = -3600, 60, 5400


class Copy:
    """A running copy; its stderr is kept."""

    def __init__(self, program, clock, *arguments):
        environment = program.environment() | clock.environment() | {"TZ": "UTC"}
        self.process = subprocess.Popen([PROGRAM, "--json", "copy", *map(str, arguments)], env=environment,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.progress, self.said, self.lines = 0, "", []
        self.threads = [threading.Thread(target=work) for work in (self.read, self.hear)]
        for thread in self.threads:
            thread.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            answer = json.loads(line)
            if answer.get("event") == "progress":
                self.progress = answer["done_bytes"]

    def hear(self):
        for line in self.process.stderr:
            self.said += line

    def waits(self):
        return self.said.count("nothing is sent at this time")

    def end(self):
        code = self.process.wait(timeout=DEADLINE_S)
        for thread in self.threads:
            thread.join()
        return code


@pytest.mark.parametrize("way", ["to", "from"])
def test_an_off_window_closes_the_connection_and_the_copy_resumes(coldrise, source, far, disk, tmp_path, way):
    clock = WallClock(tmp_path)
    if way == "to":
        far.pair(coldrise, "far")
        program, arguments, receiver = coldrise, ["--to", "far"], far.program
    else:
        source.pair(far.program, "source", "--may", "fetch")
        program, arguments, receiver = far.program, ["--from", "source"], far.program
    clock.set_to_noon(MORNING)
    copy = Copy(program, clock, *arguments, *WINDOWS, "--retry", "0s")
    wait_until(copy.waits, "the wait for noon")
    assert "12:00" in copy.said and WINDOW in copy.said and copy.progress == 0
    # It copies until a part of the second disk has arrived, and has to wait again.
    clock.set_to_noon(AFTERNOON)
    wait_until(lambda: copy.progress > 4 * MIB, "content")
    clock.set_to_noon(MORNING)
    wait_until(lambda: copy.waits() == 2, "the second wait")
    assert copy.process.poll() is None and addresses(receiver) == set()
    if way == "to":
        # It waits, and has not failed.
        (target,) = coldrise.json("copies")["targets"]
        assert target["state"] in ("never", "behind") and not target["failure"], target
        assert not any(machine["failure"] for machine in target["machines"]), target
    # The machine is unlocked meanwhile, once the far side has seen the end of the line.
    wait_until(lambda: receiver.run("backup", "web01", f"vda=raw:{tmp_path / 'vda.raw'}", "--time",
                                    "20261001T100000Z").returncode == 0, "the machine is free")
    receiver.json("forget", "web01/20261001T100000Z")
    clock.set_to_noon(NOON)
    assert copy.end() == 0, copy.said
    copied = json.loads(copy.lines[-1])
    assert copied["points"] == 1
    line = copied["line"]
    # Only what was under way when the line was closed came twice.
    assert line["sent_bytes"] < 23 * MIB
    check(receiver, disk, tmp_path)


def test_a_rate_applies_from_the_start_of_its_window(source, far, disk, tmp_path):
    source.pair(far.program, "source", "--may", "fetch")
    clock = WallClock(tmp_path)
    clock.set_to_noon(MORNING)
    copy = Copy(far.program, clock, "--from", "source", "--window", "00:00-12:00=128K")
    # The first disk, after two seconds. The second one would take 160.
    wait_until(lambda: copy.progress > 0, "content")
    clock.set_to_noon(NOON)
    assert copy.end() == 0, copy.said
    assert json.loads(copy.lines[-1])["elapsed_ms"] < 60_000
    check(far.program, disk, tmp_path)


def test_a_copy_to_a_directory_pauses(coldrise, disk, tmp_path):
    clock = WallClock(tmp_path)
    second = FarSite.repository(tmp_path, "second")
    clock.set_to_noon(MORNING)
    copy = Copy(coldrise, clock, "--to", second.repository, *WINDOWS)
    wait_until(copy.waits, "the wait for noon")
    clock.set_to_noon(AFTERNOON)
    wait_until(lambda: copy.progress > 2 * MIB, "content")
    clock.set_to_noon(MORNING)
    wait_until(lambda: copy.waits() == 2, "the pause")
    assert copy.progress < 20 * MIB
    clock.set_to_noon(NOON)
    assert copy.end() == 0, copy.said
    check(second, disk, tmp_path)


def test_a_wait_can_be_cancelled(coldrise, far, disk, tmp_path):
    far.pair(coldrise, "far")
    clock = WallClock(tmp_path)
    clock.set_to_noon(MORNING)
    copy = Copy(coldrise, clock, "--to", "far", "--window", WINDOW)
    wait_until(copy.waits, "the wait")
    copy.process.send_signal(signal.SIGINT)
    assert copy.end() == 130, copy.said


def test_invalid_windows_are_named(coldrise, tmp_path):
    for window, words in (("mon-fry 08:00-18:00=5M", '"fry" is not a weekday'), ("08:00-25:00=5M", '"08:00-25:00" is not a window'),
                          ("08:00-18:00=quick", "quick"), ("08:00-18:00", "has no rate"), ("mon-sun=off", "nothing would ever be sent")):
        refused = coldrise.run("copy", "--to", tmp_path, "--window", window)
        assert refused.returncode == 2 and words in refused.stderr, refused
