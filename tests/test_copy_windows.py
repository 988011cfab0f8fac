"""coldrise copy --window: how much is sent follows the clock."""

import datetime
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

MIB = 1 << 20
POINT = "20261101T100000Z"


@pytest.fixture
def source(coldrise, tmp_path):
    site = FarSite(tmp_path, "source", program=coldrise)
    site.start()
    yield site
    site.close()


@pytest.fixture
def far(tmp_path):
    site = FarSite(tmp_path, "far")
    site.start()
    yield site
    site.close()


@pytest.fixture
def disk(coldrise, tmp_path):
    path = tmp_path / "vda.raw"
    path.write_bytes(random.Random(9).randbytes(32 * MIB))
    coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", POINT)
    return {POINT: {"vda": path.read_bytes()}}


class Noon:
    """A clock whose noon a test decides. Nothing is sent in the morning."""

    WINDOW = "00:00-12:00=off"

    def __init__(self, folder):
        self.clock = WallClock(folder)

    def set(self, seconds_after_noon):
        now = datetime.datetime.now(datetime.UTC)
        noon = now.replace(hour=12, minute=0, second=0, microsecond=0)
        self.clock.set(round((noon - now).total_seconds()) + seconds_after_noon)


class Copy:
    """A running copy; what it says on stderr is kept."""

    def __init__(self, program, noon, *arguments):
        environment = program.environment() | noon.clock.environment() | {"TZ": "UTC"}
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
def test_off_closes_the_line_and_the_copy_goes_on_after_it(coldrise, source, far, disk, tmp_path, way):
    noon = Noon(tmp_path)
    if way == "to":
        far.pair(coldrise, "far")
        program, arguments, receiver = coldrise, ["--to", "far"], far.program
    else:
        source.pair(far.program, "source", "--may", "fetch")
        program, arguments, receiver = far.program, ["--from", "source"], far.program
    noon.set(-3600)
    copy = Copy(program, noon, *arguments, "--window", Noon.WINDOW, "--rate", "2M", "--retry", "0s")
    wait_until(copy.waits, "the wait for noon")
    assert "12:00" in copy.said and Noon.WINDOW in copy.said and copy.progress == 0
    # Noon comes, and is taken back in the middle.
    noon.set(1)
    begun = receiver.repository / "begun"
    wait_until(lambda: begun.exists() and list(begun.iterdir()), "a note of what has arrived")
    noon.set(-3600)
    wait_until(lambda: copy.waits() == 2, "the second wait")
    assert copy.process.poll() is None and addresses(receiver) == set()
    if way == "to":
        # It waits, and has not failed.
        (target,) = coldrise.json("copies")["targets"]
        assert target["state"] in ("never", "behind") and not target["failure"], target
        assert not any(machine["failure"] for machine in target["machines"]), target
    # The machine is free meanwhile: nobody holds it, once the far side has seen the end of the line.
    wait_until(lambda: receiver.run("backup", "web01", f"vda=raw:{tmp_path / 'vda.raw'}", "--time",
                                    "20261001T100000Z").returncode == 0, "the machine is free")
    receiver.json("forget", "web01/20261001T100000Z")
    noon.set(60)
    assert copy.end() == 0, copy.said
    copied = json.loads(copy.lines[-1])
    assert copied["points"] == 1
    line = copied["line"]
    # Only what was under way when the line was closed came twice.
    assert line["sent_bytes"] < 40 * MIB
    check(receiver, disk, tmp_path)


def test_a_rate_holds_from_the_minute_at_which_its_window_begins(source, far, disk, tmp_path):
    source.pair(far.program, "source", "--may", "fetch")
    noon = Noon(tmp_path)
    noon.set(-3600)
    copy = Copy(far.program, noon, "--from", "source", "--window", "00:00-12:00=512K")
    # It grows when a batch of 4 MiB is stored, and two can be on their way side by side: after 16 seconds.
    wait_until(lambda: copy.progress > 0, "content")
    # At 512 KiB per second it would take 64 seconds.
    noon.set(60)
    assert copy.end() == 0, copy.said
    assert json.loads(copy.lines[-1])["elapsed_ms"] < 60_000
    check(far.program, disk, tmp_path)


def test_a_copy_to_a_directory_pauses(coldrise, disk, tmp_path):
    noon = Noon(tmp_path)
    second = FarSite.repository(tmp_path, "second")
    place = ["--to", second.repository, "--to-passphrase-file", second.passphrase_file]
    noon.set(-4)
    copy = Copy(coldrise, noon, *place, "--window", Noon.WINDOW, "--rate", "4M")
    wait_until(lambda: copy.progress > 2 * MIB, "content")
    # It has waited already if it started within 4 seconds.
    waits = copy.waits()
    noon.set(-3600)
    wait_until(lambda: copy.waits() > waits, "the pause")
    at = copy.progress
    noon.set(60)
    assert copy.end() == 0, copy.said
    assert at < 32 * MIB
    check(second, disk, tmp_path)


def test_a_wait_can_be_cancelled(coldrise, far, disk, tmp_path):
    far.pair(coldrise, "far")
    noon = Noon(tmp_path)
    noon.set(-3600)
    copy = Copy(coldrise, noon, "--to", "far", "--window", Noon.WINDOW)
    wait_until(copy.waits, "the wait")
    copy.process.send_signal(signal.SIGINT)
    assert copy.end() == 130, copy.said


@pytest.mark.parametrize(
    ("window", "words"),
    [
        ("mon-fry 08:00-18:00=5M", '"fry" is not a weekday'),
        ("08:00-25:00=5M", '"08:00-25:00" is not a window'),
        ("08:00-18:00=quick", "quick"),
        ("08:00-18:00", "has no rate"),
        ("mon-sun=off", "nothing would ever be sent"),
    ],
)
def test_windows_that_are_wrong_are_named(coldrise, tmp_path, window, words):
    refused = coldrise.run("copy", "--to", tmp_path, "--window", window)
    assert refused.returncode == 2 and words in refused.stderr, refused
