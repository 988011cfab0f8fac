"""A site that takes copies, or gives them: a repository and its server."""

import concurrent.futures
import functools
import json
import pathlib
import signal
import subprocess
import tempfile
import time

from .cli import PROGRAM, Coldrise
from .cutting_proxy import CuttingProxy
from .line import FAR_ADDRESS
from .nbdserver import DEADLINE_S, wait_until
from .ports import free_port

# Bytes by which a held copy advances at a time.
STEP_BYTES = 512 << 10


def incoming(program):
    """The points on their way to a repository, by address."""
    return {point["address"]: point for point in program.json("list").get("coming", [])}


def wait_for_beginning(program, point):
    """Waits until a point of web01 is on its way to a repository."""
    wait_until(lambda: f"web01/{point}" in incoming(program), f"the beginning of {point}")


def finish(copy):
    """The result of a copy that must succeed."""
    printed, message = copy.communicate(timeout=4 * DEADLINE_S)
    assert copy.returncode == 0, message
    return json.loads(printed.splitlines()[-1])


@functools.cache
def _template(*options):
    """An empty repository, and the folder that lives as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="far-")
    program = Coldrise(pathlib.Path(folder.name) / "repository")
    program.init("--no-encryption", *options)
    return program.repository, folder


class FarSite:
    """A repository that other sites dial. Its server runs until it is stopped: on loopback, or at the far end of a Line."""

    def __init__(self, folder, name="far", *options, line=None, program=None, is_encrypted=False):
        # `program` has a repository already.
        self.program = program or self.repository(folder, name, *options, is_encrypted=is_encrypted)
        self.line = line
        self.address = f"{FAR_ADDRESS}:8481" if line else f"127.0.0.1:{free_port()}"
        # Where others dial: the gate's address, if there is one.
        self.dialled = self.gate = None
        self.process, self.environment = None, {}
        self.log_path = folder / f"{name}.log"
        self.log = open(self.log_path, "a", encoding="utf-8")

    @staticmethod
    def repository(folder, name, *options, is_encrypted=False):
        """A new repository with larger chunks; an encrypted one has another passphrase than the source."""
        options = (*(() if "--chunk-size" in options else ("--chunk-size", "64K")), *options)
        (folder / name).mkdir()
        if not is_encrypted:
            return Coldrise.copied(_template(*options)[0], folder / name / "repository")
        program = Coldrise(folder / name / "repository", folder / f"{name}-passphrase")
        program.passphrase_file.write_text("another one\n", encoding="utf-8")
        program.init(*options)
        return program

    def start(self, environment=None):
        self.environment = environment or {}
        command = [PROGRAM, "--json", "serve", "replica", "--listen", self.address]
        self.process = subprocess.Popen(
            self.line.far.command(*command) if self.line else command,
            env=self.program.environment() | self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, text=True)
        ready = json.loads(self.process.stdout.readline())
        assert ready["event"] == "ready"
        self.address = ready["address"]

    def invite(self, name="source", *options):
        return self.program.json("link", "invite", name, *options)["code"]

    def pair(self, coldrise, name="far", *options):
        """Pairs a source with this site. A server that starts knows the code; one that runs would see it within a second."""
        code = self.invite(f"from-{name}-{len(self.program.json('link', 'list')['links'])}", *options)
        self.stop(signal.SIGKILL)
        self.start(self.environment)
        done = coldrise.run("link", "add", name, self.dialled or self.address, "--code", code)
        assert done.returncode == 0, done.stderr
        return code

    def put_gate(self):
        """Lets others dial a proxy before the server, which can hold their copies."""
        self.gate = CuttingProxy(self.address)
        self.dialled = self.gate.address

    def held(self, program, count, *arguments):
        """A copy that the gate holds after about this many bytes."""
        self.gate.hold_after(count)
        copy = program.start("--json", "copy", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_until(lambda: self.gate.is_holding or copy.poll() is not None, "the middle of the copy")
        assert copy.poll() is None, copy.communicate()
        return copy

    def beside_hold(self, read):
        """Makes a request to the source while a copy is held. Its answer may wait behind content in the held connection, so
        the copy advances step by step."""
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            reading = thread.submit(read)
            while not concurrent.futures.wait([reading], 0.5).done:
                self.gate.hold_after(STEP_BYTES)
            return reading.result()

    def step_until(self, condition, clock):
        """Advances the held copy step by step until the condition is true. Each step skips 10 s, the interval at which a copy
        records its progress."""
        while True:
            clock.skip(10)
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                if found := condition():
                    return found
                time.sleep(0.02)
            # The last part received is incomplete.
            self.gate.hold_after(STEP_BYTES)
            end = time.monotonic() + DEADLINE_S
            while not self.gate.is_held(within_s=1):
                assert time.monotonic() < end, "the held copy does not advance"
                # The skipped time may have ended the connection: the copy makes another one after a pause.
                clock.skip(1)

    def let_note(self, clock):
        """Waits until the site has recorded a share of a point whose first disk has arrived, as it has when the copy is held in
        the next one. The parts of a disk arrive in any order, and only its whole beginning counts."""
        clock.skip(10)
        wait_until(lambda: any(point["percent_here"] for point in incoming(self.program).values()), "the record of a first disk")

    def stop(self, number=signal.SIGTERM):
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)
            assert self.process.wait(timeout=DEADLINE_S) in (0, -signal.SIGKILL)
        if self.process:
            self.process.stdout.close()
            self.process = None

    def close(self):
        self.stop(signal.SIGKILL)
        if self.gate:
            self.gate.close()
        self.log.close()
        assert "panicked" not in self.log_path.read_text(encoding="utf-8")
