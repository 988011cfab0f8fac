"""Time marks, here and at another site, while everything around them fails: each one is what the disks were at one instant.

A session is written over NBD and sent to another site; one process after the other is killed, the line is cut, drives are full,
clocks are set, and commands run beside it. After every few of these all is left alone for a moment, and marks are compared with
the history of the writes. `make test-mark-kills` does it 1,000 times.
"""

import collections
import concurrent.futures
import contextlib
import pathlib
import random
import re
import signal
import subprocess
import time

import pytest

from support.cli import Coldrise
from support.far_site import FarSite
from support.full_drive import fill
from support.held_line import HeldLine
from support.nbdserver import Nbdkit, wait_until
from support.numbered_writes import images
from support.protection import Protection, marks
from support.wallclock import WallClock
from support.write_history import DISK_BYTES, DISKS, WriteHistory

MIB, DAY_S = 1 << 20, 86400
SESSION = "trial"
# Disturbances and their frequency. Processes that are named together are killed together; those that end are asked to.
DECK = (["server", "sender", "receiver"] * 4 + ["server ends", "sender ends", "receiver ends", "server+sender", "sender+receiver"]
        + ["server+receiver", "server+sender+receiver", "cut", "cut later", "cut later", "hold", "hold", "full there"]
        + ["clock here back", "clock here on", "clock there"])
# After it marks are far apart for up to a minute.
RARE, RARE_EVERY = "full here", 25
# Disturbances between two looks at the marks; and with one pair of sites: each mark that is read makes its session longer.
BEFORE_CHECK, OF_ONE_PAIR = 10, 100
# Marks that are read of each session at a check, besides the oldest and the newest.
CHECKED = 6
# How long a command beside it may take, and until the other site has everything once nothing disturbs: a connection that failed
# is made again after up to 30 s, and after a full drive marks are far apart at first.
PATIENCE_S = 120
# Of each process, at its peak. The disks have 8 MiB.
MEMORY_BYTES = 160 * MIB
RULES = [[], ["--marks", "1s=15s,3s=1m"]]


def despite_full_drive(call):
    """The same until the drive has space again, which it has in a moment."""
    while True:
        try:
            return call()
        except AssertionError as error:
            if "no_space" not in str(error):
                raise
            time.sleep(0.1)


class Protected:
    """A session that is served here and sent to another site, and who writes to it."""

    def __init__(self, folder, seed, counts):
        self.folder, self.counts = folder, counts
        self.random = random.Random(seed)
        self.history = WriteHistory(seed)
        self.drives = [folder / "here", folder / "there"]
        self.clocks = [WallClock(drive) for drive in self.drives]
        self.near = Coldrise(self.drives[0] / "repository")
        self.near.init("--no-encryption")
        self.near.more = self.clocks[0].environment()
        self.far = FarSite(self.drives[1])
        self.far.program.more = self.clocks[1].environment()
        self.far.start(self.clocks[1].environment())
        self.far.gate = HeldLine(self.far.address)
        self.far.dialled = self.far.gate.address
        self.far.pair(self.near)
        disks = {name: folder / f"{name}.raw" for name in DISKS}
        for image in disks.values():
            image.write_bytes(bytes(DISK_BYTES))
        self.disks = disks
        rule = self.random.choice(RULES)
        self.exports = list(self.near.publish(self.near.backup("web01", **disks), SESSION, *rule).values())
        self.server = self.sender = self.writer = None
        self.beside = concurrent.futures.ThreadPoolExecutor(1)
        self.running_beside = []
        # The state of each mark that was read, by site and address: an address always means the same.
        self.seen = {}
        self.servers = 0
        self.start("server")
        self.start("sender")

    def close(self):
        self.far.gate.release()
        self.beside.shutdown()
        self.near.end()
        if self.server:
            self.server.kill()
            self.writer.finish(is_closed=False)
        self.far.close()

    # The three processes.

    def start(self, role):
        match role:
            case "server":
                self.servers += 1
                environment = self.near.environment()
                self.server = Nbdkit(self.near, self.folder / f"nbd{self.servers}", environment=environment)
                self.writer = self.history.begin(self.server, self.exports)
            case "sender":
                self.sender = Protection(self.near, f"live/{SESSION}", "--to", "far")
            case "receiver":
                self.far.start(self.clocks[1].environment())

    def processes(self):
        return {"server": self.server.process, "sender": self.sender.process, "receiver": self.far.process}

    def end(self, role, number=signal.SIGKILL):
        self.look_at_memory(role)
        match role:
            case "server":
                is_closed = number != signal.SIGKILL
                self.server.stop() if is_closed else self.server.kill()
                self.writer.finish(is_closed)
            case "sender":
                was_ready = bool(self.sender.lines)
                code, said = self.sender.end(number)
                # One that has just started ends by the signal.
                allowed = [0] if was_ready and number == signal.SIGINT else [0, -number]
                assert code in allowed and "panicked" not in said, (code, said)
            case "receiver":
                self.far.stop(number)

    def look_at_memory(self, role):
        process = self.processes()[role]
        assert process.poll() is None, f"{role} has ended with {process.poll()}"
        peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{process.pid}/status").read_text())[1])
        self.counts["peak MiB", role] = max(self.counts["peak MiB", role], peak // MIB)
        assert peak < MEMORY_BYTES, f"{role} takes {peak} bytes"

    # Disturbances.

    def happen(self, kind):
        if self.random.random() < 0.5:
            self.start_beside()
        # A random moment is intended.
        time.sleep(self.random.uniform(0, self.random.choice([0.1, 1.5])))
        self.far.gate.release()
        match kind.split():
            case ["cut"]:
                self.far.gate.cut()
            case ["cut", "later"]:
                self.far.gate.cut_after(self.random.randint(1, 100_000))
            case ["hold"]:
                self.far.gate.hold()
            case ["full", where]:
                self.fill_drive(where == "there")
            case ["clock", where, *how]:
                self.set_clock(where == "there", *how)
            case [names, *ends]:
                roles = names.split("+")
                gently = signal.SIGINT if names == "sender" else signal.SIGTERM
                for step in (lambda role: self.end(role, gently if ends else signal.SIGKILL), self.start):
                    for role in self.random.sample(roles, len(roles)):
                        time.sleep(self.random.choice([0, 0.5]) * self.random.random())
                        step(role)

    def fill_drive(self, is_far):
        """One drive is full until a write or a connection has failed or marks have become fewer, which may not happen."""
        filling = self.drives[is_far] / "filling"
        failed = lambda: (self.writer.failed, len(self.sender.events("failed")))
        before, end = failed(), time.monotonic() + self.random.uniform(2, 8)
        try:
            fill(filling)
            is_met = lambda: failed() != before or not is_far and "reduced_rule" in self.near.json("marks", SESSION)
            wait_until(lambda: is_met() or time.monotonic() > end, "the end of a wait")
            self.counts["full drives that were met"] += time.monotonic() < end
        finally:
            filling.unlink()

    def set_clock(self, is_far, how=None):
        clock, days = self.clocks[is_far], DAY_S * self.random.choice([-1, 1])
        if is_far:
            clock.set(clock.offset_s + days)
        elif how == "on":
            self.set_right()
            clock.set(clock.offset_s + DAY_S)
            self.history.set_ahead(clock.offset_s)
        else:
            # Without a mark before them, marks have the clock's time.
            wait_until(lambda: marks(self.near, SESSION), "a mark")
            self.history.set_back()
            clock.set(self.history.ahead_s - DAY_S)

    def set_right(self):
        self.clocks[0].set(self.history.ahead_s)
        self.history.set_right()

    # Commands beside them.

    def start_beside(self):
        is_far = self.random.random() < 0.5
        program, chance = self.far.program if is_far else self.near, random.Random(self.random.random())
        run = self.random.choice(["gc", "fold", "prune", "verify", "backup", "seal", "publish", "seal", "publish"])
        self.running_beside.append(self.beside.submit(self.run_beside, program, run, chance))

    def run_beside(self, program, name, chance):
        match name:
            case "prune":
                words = ["prune", "--keep-last", "2"]
            case "backup":
                words = ["backup", chance.choice(["web01", "web02"]), *(f"{disk}=raw:{at}" for disk, at in self.disks.items())]
            case "seal" | "publish":
                listed = [mark for session in self.sessions(program) for mark in marks(program, session)]
                if not listed:
                    return
                mark = chance.choice(listed)
                words = [name, mark["address"], *(["--name", "back"] if name == "publish" else [])]
            case _:
                words = [name]
        done = program.run(*words, timeout_s=PATIENCE_S)
        assert done.returncode in (0, 1, 3, 11) and "panicked" not in done.stderr, (words, done)
        self.counts[name, "failed" if done.returncode else "done"] += 1
        if done.returncode:
            self.counts["why", re.sub(r"[0-9]+|\S*/\S*", "…", f"{name}: {done.stderr.strip()[:200]}")] += 1
        elif name == "publish":
            folder = self.folder / "back"
            folder.mkdir(exist_ok=True)
            self.history.find(mark, despite_full_drive(lambda: images(program, "live/back", folder)))
            despite_full_drive(lambda: program.json("unpublish", "back", "--discard"))

    # All is left alone.

    def calm(self):
        """Waits until the other site has the newest state; returns the lock of the writes."""
        for running in self.running_beside:
            running.result(timeout=PATIENCE_S)
        self.running_beside.clear()
        self.far.gate.release()
        self.far.gate.cut_after(None)
        self.set_right()
        for role in self.processes():
            self.look_at_memory(role)
        writer, count = self.writer, len(self.writer.served.writes)
        wait_until(lambda: len(writer.served.writes) > count + 1 or not writer.is_alive(), "a write")
        assert writer.is_alive(), "the server has ended a connection"
        with writer.writing:
            begin, last = time.monotonic(), writer.served.writes[-1]
            until_ms = int(1000 * (last.begin + self.history.ahead_s))

            def is_there():
                assert self.sender.is_alive(), self.sender.process.stderr.read()
                sent = [line for line in self.sender.lines if line.get("marked_at_ms", 0) >= until_ms]
                if not sent:
                    return False
                newest = marks(self.far.program, sent[-1]["site_session"])[-1]
                place, _ = self.history.find(newest, images(self.far.program, newest["address"], self.folder))
                return place == (len(self.history.served) - 1, len(writer.served.writes))

            # A mark may be a second ahead.
            written_ms = int(1000 * (last.end + self.history.ahead_s)) + 1500

            def is_claimed():
                return any(site["current_ms"] > written_ms for site in self.near.json("marks", SESSION).get("sites", []))

            while not is_claimed():
                assert time.monotonic() < begin + PATIENCE_S, self.how_far(until_ms)
                time.sleep(0.1)
            wait_until(is_there, f"what the other site claims to have, of before {written_ms}")
            self.counts["longest catching up, s"] = max(
                self.counts["longest catching up, s"], round(time.monotonic() - begin, 1))
            for name, program in (("here", self.near), ("there", self.far.program)):
                sessions = self.sessions(program)
                self.counts["most sessions", name] = max(self.counts["most sessions", name], len(sessions))
                for session in sessions:
                    self.check(name, program, session)
                verified = program.json("verify")
                assert verified["is_clean"], verified

    def how_far(self, until_ms):
        last = self.sender.lines[-1]
        found = {"here": self.near.json("marks", SESSION), "there": self.far.program.json("marks", last["site_session"])}
        for shown in found.values():
            del shown["marks"][:-2]
        return f"the other site is behind: {until_ms=}, sent {last}, {found}"

    @staticmethod
    def sessions(program):
        found = [session["session"] for session in program.json("sessions")["sessions"]]
        return [name for name in found if name == SESSION or name.startswith("web01-")]

    def check(self, name, program, session):
        listed = marks(program, session)
        times = [mark["marked_at_ms"] for mark in listed]
        assert all(before < after for before, after in zip(times, times[1:])), times
        middle = self.random.sample(range(1, len(listed) - 1), min(CHECKED, max(len(listed) - 2, 0)))
        last = (0, 0)
        for at in sorted({0, *middle, len(listed) - 1} if listed else []):
            address = listed[at]["address"]
            try:
                found = images(program, address, self.folder)
            except AssertionError:
                # It may have come to its age.
                assert listed[at] not in marks(program, session)
                continue
            place, state = self.history.find(listed[at], found)
            assert place >= last, f"{address} is older than the mark before"
            assert self.seen.setdefault((name, listed[at]["marked_at_ms"]), state) == state, f"{address} has changed"
            last = place
            self.counts["marks read", name] += 1
        self.counts["states in part"] = self.history.in_part


@pytest.fixture
def small_drives(tmp_path):
    """A folder with a drive of each site, small, so that it can be filled."""
    with contextlib.ExitStack() as mounted:
        def make(number):
            folder = tmp_path / str(number)
            for name in ("here", "there"):
                (folder / name).mkdir(parents=True)
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400M", name, folder / name], check=True)
                mounted.callback(subprocess.run, ["umount", "-l", folder / name], check=True)
            return folder
        yield make


def test_each_mark_is_one_instant_whatever_is_killed(request, small_drives):
    count, seed = (request.config.getoption(name) for name in ("--mark-kills", "--mark-seed"))
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    counts, begin, done = collections.Counter(), time.monotonic(), 0
    try:
        while done < count:
            print(f"repeat with --mark-seed {seed} --mark-kills {min(OF_ONE_PAIR, count - done)}", flush=True)
            with contextlib.closing(Protected(small_drives(done), seed, counts)) as protected:
                deck = []
                last = min(OF_ONE_PAIR, count - done)
                for number in range(1, last + 1):
                    # Each kind is once among the first ones.
                    deck = deck or sorted(protected.random.sample(DECK, len(DECK)), key=lambda kind: counts[kind] > 0)
                    kind = deck.pop(0) if number % RARE_EVERY else RARE
                    print(f"{done}: {kind}; {time.monotonic() - begin:.0f} s", flush=True)
                    protected.happen(kind)
                    counts[kind] += 1
                    done += 1
                    if number % BEFORE_CHECK == 0 and number < last:
                        protected.calm()
                protected.calm()
                protected.end("sender", signal.SIGINT)
                protected.end("server", signal.SIGTERM)
            seed += 1
        print("mixed = 0")
    finally:
        print(f"{done} disturbances, {time.monotonic() - begin:.0f} s: {dict(counts)}")
    assert counts["marks read", "here"] and counts["marks read", "there"]
