"""Copies over a line that are disturbed at random moments: the far points are equal or absent.

Each round backs up a new point, copies it over an emulated line, and lets one disturbance happen in the middle. Then all stored
data is read and compared, and the next copy completes it. `make test-copy-kills` does it 500 times.
"""

import contextlib
import hashlib
import pathlib
import random
import shutil
import signal
import subprocess
import time

import pytest

from support.cli import Coldrise
from support.copies import addresses, content
from support.far_site import FarSite
from support.full_drive import fill
from support.image import Image
from support.line import Line
from support.nbdserver import wait_until
from support.wallclock import WallClock

KIB, MIB = 1 << 10, 1 << 20
DISKS = {"vda": 3 * MIB, "vdb": 512 * KIB + 4096}
# Backups of one machine before the next one begins.
POINTS_OF_MACHINE = 8
JUMPS_S = [-400 * 86400, -3600, -30, 30, 3600, 400 * 86400]
# Disturbances of a copy, and their frequency.
DECK = ["source"] * 4 + ["far"] * 3 + ["both", "cut", "cut", "full", "full", "rollback", "rollback", "clock", "clock"]
# A copy that was cut off, and killed before it noticed: the far side waits for it for half a minute.
RARE = "silence"
RARE_EVERY = 60


class Disturbed:
    """Two sites, and a machine whose disks change."""

    def __init__(self, folder, drive, line, seed):
        self.folder, self.drive, self.line = folder, drive, line
        self.random = random.Random(seed)
        self.near = Coldrise.encrypted(folder, place=folder)
        self.near.init()
        self.near.wrap = line.near.command
        self.clock = WallClock(folder)
        self.far = FarSite(self.drive, line=line, is_encrypted=True)
        self.far.pair(self.near)
        # Of each point: the hash of each disk.
        self.expected = {}
        self.machines = []
        self.checked = set()
        self.rounds = 0
        self.usual_s = 1.0

    def close(self):
        self.far.close()
        self.near.end()

    # The source.

    def back_up(self):
        """Backs up disks of which some pieces have changed."""
        if self.rounds % POINTS_OF_MACHINE == 0:
            self.next_machine()
        self.rounds += 1
        for name, image in self.disks.items():
            for _ in range(self.random.randint(1, 12)):
                length = min(self.random.randint(1, 96) * 4 * KIB, len(image))
                offset = self.random.randrange(0, len(image) - length + 1, 512)
                kind = self.random.choice(["random", "random", "text", "zeroes", "copy"])
                match kind:
                    case "random":
                        written = self.random.randbytes(length)
                    case "text":
                        written = (b"%d says the same again. " % self.random.randrange(99) * length)[:length]
                    case "zeroes":
                        written = bytes(length)
                    case _:
                        start = self.random.randrange(0, len(image) - length + 1, 512)
                        written = image.read(start, length)
                image.write(offset, written)
            image.save(self.folder / f"{name}.raw")
        time_of_point = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(1_767_225_600 + 60 * self.rounds))
        sources = [f"{name}=raw:{self.folder / name}.raw" for name in self.disks]
        address = self.near.json("backup", self.machines[-1], *sources, "--time", time_of_point)["address"]
        self.expected[address] = {
            name: hashlib.sha256(image.content).hexdigest() for name, image in self.disks.items()}
        return address

    def next_machine(self):
        self.machines.append(f"machine{len(self.machines)}")
        self.disks = {name: Image(size) for name, size in DISKS.items()}
        if len(self.machines) > 2:
            gone = self.machines[-3]
            for program in (self.near, self.far.program):
                program.run("forget", gone, "--all")
                # The far drive is small.
                program.json("gc")
            self.expected = {
                address: disks for address, disks in self.expected.items() if not address.startswith(f"{gone}/")}

    def start_copy(self, retry):
        return self.near.start("copy", "--to", "far", "--retry", retry, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def copy_the_rest(self):
        def is_done():
            done = self.near.run("copy", "--to", "far", "--retry", "60s")
            assert done.returncode in (0, 3), done.stderr
            return done.returncode == 0

        # The far side may still hold the machine for a copy that was killed.
        wait_until(is_done, "the last copy")

    # The points at the far site.

    def check(self, everything):
        """All copied points are equal; `everything`: none is missing."""
        there = addresses(self.far.program) & self.expected.keys()
        for address in sorted(there if everything is None else there - self.checked):
            for disk, expected in self.expected[address].items():
                found = content(self.far.program, f"{address}/{disk}", self.folder)
                assert hashlib.sha256(found).hexdigest() == expected, f"{address}/{disk} differs"
            self.checked.add(address)
        if everything is not False:
            assert there == self.expected.keys()
        if everything is not True:
            verified = self.far.program.json("verify")
            assert verified["is_clean"], verified

    # The disturbance.

    def happen(self, kind):
        """One copy, disturbed. Returns the moment."""
        if kind == "rollback":
            older = self.folder / "older"
            if not older.exists() or self.random.random() < 0.7:
                self.far.stop()
                shutil.rmtree(older, ignore_errors=True)
                # A killed process leaves its sockets.
                sockets = lambda folder, names: [name for name in names if pathlib.Path(folder, name).is_socket()]
                shutil.copytree(self.far.program.repository, older, symlinks=True, ignore=sockets)
                self.far.start()
            for _ in range(self.random.randint(0, 2)):
                self.back_up()
            self.copy_the_rest()
        if kind == "clock":
            self.far.stop()
            self.far.start(self.clock.environment())
            self.near.more = self.clock.environment()
        self.back_up()
        goes_on = kind not in ("source", "both", "full", RARE) and self.random.random() < 0.5
        moment_s = self.random.uniform(0, 1.1 * self.usual_s)
        copy = self.start_copy("60s" if goes_on else "0s")
        # A random moment is intended.
        time.sleep(moment_s)
        pause_s = self.random.uniform(0, 0.7)
        with contextlib.ExitStack() as afterwards:
            match kind:
                case "source":
                    copy.kill()
                case "far":
                    self.far.stop(signal.SIGKILL)
                    self.far.start()
                case "both":
                    copy.kill()
                    self.far.stop(signal.SIGKILL)
                    self.far.start()
                case "cut":
                    self.line.cut()
                    time.sleep(pause_s)
                    self.line.restore()
                case "silence":
                    self.line.cut()
                    copy.kill()
                    time.sleep(pause_s)
                    self.line.restore()
                case "full":
                    filling = self.drive / "filling"
                    afterwards.callback(filling.unlink)
                    fill(filling)
                case "rollback":
                    self.far.stop(signal.SIGKILL)
                    shutil.rmtree(self.far.program.repository)
                    shutil.copytree(self.folder / "older", self.far.program.repository, symlinks=True)
                    # The old content is gone.
                    self.checked.clear()
                    self.far.start()
                case "clock":
                    self.clock.set(self.random.choice(JUMPS_S))
            said = copy.communicate(timeout=120)[1]
        assert "panicked" not in said, said
        # A site that goes away before the copy has greeted it was never reached: that is not waited for.
        is_unreached = kind in ("far", "rollback") and copy.returncode == 1 and self.far.address in said
        is_ended = not goes_on and copy.returncode in (*range(1, 100), -signal.SIGKILL)
        assert copy.returncode == 0 or is_unreached or is_ended, (copy.returncode, said)
        return moment_s, copy.returncode

    def afterwards(self, kind):
        self.check(everything=False)
        begin = time.monotonic()
        self.copy_the_rest()
        if kind in ("source", "far"):
            self.usual_s = 0.8 * self.usual_s + 0.2 * (time.monotonic() - begin)
        if kind == "clock":
            self.clock.set(0)
            self.near.more = {}
            self.far.stop()
            self.far.start()
        self.check(everything=True)


@pytest.fixture
def drive(tmp_path):
    """The far repository's: small, so that it can be filled. The networks of a line see only what is mounted before."""
    folder = tmp_path / "drive"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320M", "far", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def disturbed(request, drive, tmp_path):
    seed = request.config.getoption("--copy-seed")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    print(f"repeat with --copy-seed {seed}")
    with contextlib.closing(Line(tmp_path, mbit=40, round_trip_ms=10, loss=0.001, seed=seed % 1000)) as line:
        with contextlib.closing(Disturbed(tmp_path, drive, line, seed)) as disturbed:
            yield disturbed


def test_disturbed_copies_leave_complete_points_or_none(request, disturbed):
    count = request.config.getoption("--copy-kills")
    deck = []
    begin = time.monotonic()
    outcomes = {}
    for number in range(count):
        if not deck:
            # The first cards are one of each kind.
            deck = list(DECK)
            disturbed.random.shuffle(deck)
            deck.sort(key=lambda kind, seen=[]: (seen.append(kind), seen.count(kind) > 1)[1])
        kind = RARE if number % RARE_EVERY == RARE_EVERY - 1 else deck.pop(0)
        moment_s, code = disturbed.happen(kind)
        outcomes.setdefault(kind, []).append(code)
        print(f"{number}: {kind} at {moment_s:.3f} s: exit {code}; {time.monotonic() - begin:.0f} s", flush=True)
        disturbed.afterwards(kind)
    # Points never change, and nothing is forgotten.
    disturbed.check(everything=None)
    assert disturbed.near.json("verify")["is_clean"]
    said = disturbed.far.log_path.read_text()
    assert "panicked" not in said, said[max(said.find("panicked") - 200, 0) :][:3000]
    print({kind: f"{len(codes)}, {sum(code != 0 for code in codes)} ended early" for kind, codes in outcomes.items()})
    # Some of them must have hit a copy under way.
    assert any(code != 0 for codes in outcomes.values() for code in codes)
