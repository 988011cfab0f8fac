"""A command of Coldrise that serves in the foreground until it is ended."""

import contextlib
import json
import pathlib
import signal
import subprocess

from .cli import PROGRAM
from .nbdserver import DEADLINE_S


class ServerFailed(Exception):
    """It ended before it served."""

    def __init__(self, code, messages):
        super().__init__(f"the server ended with {code}: {messages}")
        self.code = code
        self.messages = messages


class ForegroundServer:
    """`ready` is the first event that it printed."""

    def __init__(self, coldrise, log_path, *words, wrap=None):
        """`wrap` puts it elsewhere, such as into a network of its own."""
        self.log_path = pathlib.Path(log_path)
        self.log = open(self.log_path, "a", encoding="utf-8")
        command = (wrap or coldrise.wrap)(PROGRAM, "--json", "serve", *words)
        self.process = subprocess.Popen(command, env=coldrise.environment(), stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        self.ready = json.loads(line) if line else {}
        if self.ready.get("event") != "ready":
            code = self.process.wait(timeout=DEADLINE_S)
            self.log.close()
            raise ServerFailed(code, line + self.messages())

    def messages(self):
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def children(self):
        return children(self.process.pid)

    def stop(self, number=signal.SIGTERM):
        """Ends it as its users do; it must end without an error."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        self.log.close()
        assert self.process.returncode == 0, f"{output}{self.messages()}"

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)
        self.log.close()


def children(process):
    """The sum of all its threads."""
    found = []
    for thread in pathlib.Path(f"/proc/{process}/task").iterdir():
        # Some are short-lived.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += (thread / "children").read_text(encoding="ascii").split()
    return [int(child) for child in found]


def child_called(process, name):
    """The id of the one child that runs this program. Others, such as virsh, are short-lived."""
    found = []
    for child in children(process):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if pathlib.Path(f"/proc/{child}/comm").read_text(encoding="utf-8").strip() == name:
                found.append(child)
    [only] = found
    return only


def is_running(process):
    try:
        stat = pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
