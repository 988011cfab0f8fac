"""Kills of the command line: publish, seal, unpublish and backup."""

import hashlib
import subprocess
import time

from support.cli import Coldrise
from support.nbdserver import Nbdkit, read_all, wait_until

from .stamp import BLOCK

MIB = 1 << 20
MACHINE = "web01"
SIZES = {"vda": 24 * MIB, "vdb": 6 * MIB + 512}


class CommandKills:
    """One repository, one server that reads it, and commands that are killed. Digests record the
    content of each point, taken before anything could damage it."""

    def __init__(self, rng, directory, counts):
        self.rng = rng
        self.counts = counts
        self.directory = directory
        self.coldrise = Coldrise(directory / "repository")
        self.durations = {}
        self.points = {}
        self.server = None
        self.images = {}
        self.sessions = 0
        self.session = None

    def begin(self):
        self.coldrise.init("--no-encryption")
        self._change_images()
        self.points[self.coldrise.backup(MACHINE, **self.images)] = self._image_digests()
        self.server = Nbdkit(self.coldrise, self.directory / "server")

    def close(self):
        if self.server is not None:
            self.server.kill()

    def round(self):
        action = self.rng.choice(
            (self.backup, self.publish, self.seal_idle, self.seal_live, self.unpublish)
        )
        action()
        self.counts[f"command_kills_{action.__name__}"] += 1

    # ------------------------------------------------------------ actions

    def backup(self):
        self._change_images()
        sources = [f"{disk}=raw:{image}" for disk, image in self.images.items()]
        digests = self._image_digests()
        before = set(self._listed())
        answer = self._run_and_kill("backup", "backup", MACHINE, *sources)
        self._adopt_points(before, digests, answer)
        # A second run works and makes one more point.
        before = set(self._listed())
        address = self.coldrise.json("backup", MACHINE, *sources)["address"]
        assert address not in before
        self._adopt_points(before, digests, address)

    def publish(self):
        address = self.rng.choice(list(self.points))
        name = self._next_name()
        answer = self._run_and_kill("publish", "publish", address, "--name", name)
        listed = self._sessions()
        assert listed in ([], [self.session])
        assert listed or not answer, "an answered publish is not there"
        if not listed:
            self.coldrise.publish(address, name)
        assert self._live_digests(self.session) == self.points[address]
        self._write(self.session)
        self.coldrise.json("unpublish", self.session, "--discard")
        self._check()

    def seal_idle(self):
        self._seal(in_use=False)

    def seal_live(self):
        self._seal(in_use=True)

    def _seal(self, in_use):
        address = self.rng.choice(list(self.points))
        self.coldrise.publish(address, self._next_name())
        digests = self._write(self.session)
        before = set(self._listed())
        if in_use:
            with self.server.connect(f"live/{self.session}/vda"):
                answer = self._run_and_kill("seal", "seal", self.session)
                # The serving process may still be sealing after its caller has gone.
                after = self.coldrise.json("seal", self.session)["address"]
            self._adopt_points(before, digests, answer, after, at_most=2)
        else:
            answer = self._run_and_kill("seal", "seal", self.session)
            self._adopt_points(before, digests, answer)
            assert self._sessions() == [self.session]
            before = set(self._listed())
            self._adopt_points(before, digests, self.coldrise.json("seal", self.session)["address"])
        assert self._live_digests(self.session) == digests
        self.coldrise.json("unpublish", self.session, "--discard")
        self._check()

    def unpublish(self):
        discard = self.rng.random() < 0.3
        self.coldrise.publish(self.rng.choice(list(self.points)), self._next_name())
        digests = self._write(self.session)
        before = set(self._listed())
        options = ["--discard"] if discard else []
        answer = self._run_and_kill("unpublish", "unpublish", self.session, *options)
        sessions = self._sessions()
        if discard:
            assert set(self._listed()) == before
        else:
            new = self._adopt_points(before, digests, answer)
            assert bool(new) == (not sessions), f"points {new}, sessions {sessions}"
        assert sessions == [] or not answer
        if sessions:
            assert self._live_digests(self.session) == digests
            before = set(self._listed())
            again = self.coldrise.json("unpublish", self.session, *options)
            self._adopt_points(before, digests, again["address"])
        assert self._sessions() == []
        self._check()

    # -------------------------------------------------------------- means

    def _next_name(self):
        # An ended session keeps its name until a backup enters its points.
        self.sessions += 1
        self.session = f"trial{self.sessions}"
        return self.session

    def _run_and_kill(self, name, *arguments):
        """Kills the command at some moment; returns its answer if that came first."""
        usual_s = self.durations.get(name, 0.3)
        began = time.monotonic()
        process = self.coldrise.start(
            "--json", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            process.wait(timeout=self.rng.random() * 1.1 * usual_s)
            self.durations[name] = time.monotonic() - began
            self.counts["command_ended_first"] += 1
        except subprocess.TimeoutExpired:
            process.kill()
        output, errors = process.communicate()
        if process.returncode == -9:
            # It was killed before its end: allow a little more time the next time.
            self.durations[name] = min(2.0, usual_s * 1.02)
            return None
        assert process.returncode == 0, f"{arguments}: {output}{errors}"
        return output

    def _listed(self):
        (machine,) = self.coldrise.json("list", MACHINE)["machines"]
        for entry in machine["points"]:
            assert sorted(disk["disk"] for disk in entry["disks"]) == sorted(SIZES), entry
        return [entry["address"] for entry in machine["points"]]

    def _sessions(self):
        listed = self.coldrise.json("sessions")["sessions"]
        for session in listed:
            assert sorted(disk["disk"] for disk in session["disks"]) == sorted(SIZES), session
        return [session["session"] for session in listed]

    def _adopt_points(self, before, digests, answer, *more, at_most=1):
        listed = self._listed()
        assert before <= set(listed), f"points are gone: {before - set(listed)}"
        new = [address for address in listed if address not in before]
        assert len(new) <= at_most, f"more points than were made: {new}"
        assert new or not answer, f"answered, but not there: {answer}"
        assert set(more) <= set(new)
        for address in new:
            assert self._digests_of(address) == digests, f"{address} holds something else"
            self.points[address] = digests
        return new

    def _check(self):
        """Old points have not changed."""
        assert set(self._listed()) == set(self.points)
        address = self.rng.choice(list(self.points))
        assert self._digests_of(address) == self.points[address], f"{address} has changed"

    def _digests_of(self, prefix):
        found = {}
        for disk in SIZES:
            with self.server.connect(f"{prefix}/{disk}") as handle:
                found[disk] = hashlib.blake2b(read_all(handle)).digest()
        return found

    def _live_digests(self, session):
        digests = self._digests_of(f"live/{session}")
        # The server closes a session a moment after its last client has left. Until then it is in use.
        wait_until(lambda: not any(one["is_served"] for one in self.coldrise.json("sessions")["sessions"]),
                   "the session to be closed")
        return digests

    def _write(self, session):
        """Writes a little to each disk; returns the disks' content."""
        for disk, size in SIZES.items():
            with self.server.connect(f"live/{session}/{disk}") as handle:
                for _ in range(self.rng.choice((1, 40))):
                    block = self.rng.randrange(size // BLOCK)
                    handle.pwrite(self.rng.randbytes(BLOCK), block * BLOCK)
                handle.flush()
        return self._live_digests(session)

    def _change_images(self):
        for disk, size in SIZES.items():
            path = self.directory / f"{disk}.raw"
            with open(path, "r+b" if path.exists() else "w+b") as file:
                file.truncate(size)
                for _ in range(self.rng.choice((1, 30))):
                    length = self.rng.choice((4096, 65536, MIB))
                    file.seek(self.rng.randrange(size - length) // 4096 * 4096)
                    file.write(self.rng.randbytes(length))
            self.images[disk] = path

    def _image_digests(self):
        return {
            disk: hashlib.blake2b(path.read_bytes()).digest() for disk, path in self.images.items()
        }
