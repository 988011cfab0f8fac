"""A site that takes copies, or gives them: a repository and its server."""

import json
import signal
import subprocess

from .cli import PROGRAM, Coldrise
from .line import FAR_ADDRESS
from .nbdserver import DEADLINE_S, wait_until
from .ports import free_port


def wait_for_beginning(program, point):
    """Waits until a point of web01 is on its way to a repository."""
    address = f"web01/{point}"
    wait_until(lambda: any(coming["address"] == address for coming in program.json("list").get("coming", [])),
               f"the beginning of {point}")


def wait_for_note(program):
    """Waits until a part of a point on its way is durable in a repository."""
    def missing():
        return [coming["missing_bytes"] for coming in program.json("list").get("coming", [])]

    first = wait_until(missing, "a point on its way")
    wait_until(lambda: missing() != first, "a note")


class FarSite:
    """A repository that other sites dial. Its server runs until it is stopped: on loopback, or at the far end of a Line."""

    def __init__(self, folder, name="far", *options, line=None, program=None):
        # `program` has a repository already.
        self.program = program or self.repository(folder, name, *options)
        self.line = line
        self.address = f"{FAR_ADDRESS}:8481" if line else f"127.0.0.1:{free_port()}"
        # Where others dial; a proxy's address, if it is not the own one.
        self.dialled = None
        self.process = None
        self.log_path = folder / f"{name}.log"
        self.log = open(self.log_path, "a", encoding="utf-8")

    @staticmethod
    def repository(folder, name, *options):
        """A new repository with larger chunks and another passphrase."""
        program = Coldrise.encrypted(folder, place=folder / name)
        program.passphrase_file = folder / f"{name}-passphrase"
        program.passphrase_file.write_text("another one\n", encoding="utf-8")
        program.repository.parent.mkdir()
        chunk = () if "--chunk-size" in options else ("--chunk-size", "64K")
        program.init(*chunk, *options)
        return program

    def start(self, environment=None):
        command = [PROGRAM, "--json", "serve", "replica", "--listen", self.address]
        self.process = subprocess.Popen(
            self.line.far.command(*command) if self.line else command,
            env=self.program.environment() | (environment or {}),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, text=True)
        ready = json.loads(self.process.stdout.readline())
        assert ready["event"] == "ready"
        self.address = ready["address"]

    def invite(self, name="source", *options):
        return self.program.json("link", "invite", name, *options)["code"]

    def pair(self, coldrise, name="far", *options):
        """Pairs a source with this site. The server sees a new code within a second."""
        code = self.invite(f"from-{name}-{len(self.program.json('link', 'list')['links'])}", *options)

        def has_paired():
            done = coldrise.run("link", "add", name, self.dialled or self.address, "--code", code)
            # Other words are a failure of the test.
            assert done.returncode == 0 or "code" in done.stderr, done.stderr
            return done.returncode == 0

        wait_until(has_paired, "pairing")
        return code

    def wait_for_note(self):
        wait_for_note(self.program)

    def stop(self, number=signal.SIGTERM):
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(timeout=DEADLINE_S)
        if self.process:
            self.process.stdout.close()
            self.process = None

    def close(self):
        self.stop()
        self.log.close()
