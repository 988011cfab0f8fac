"""A running `coldrise protect-live`."""

import json
import signal
import subprocess
import threading

from .nbdserver import wait_until

SESSION = "web01-1"


class Protection(threading.Thread):
    """`coldrise protect-live`, and the lines that it has printed."""

    def __init__(self, coldrise, *arguments):
        super().__init__(daemon=True)
        self.process = coldrise.start("--json", "protect-live", *arguments,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.lines = []
        self.start()

    def run(self):
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def events(self, kind):
        return [line for line in self.lines if line.get("event") == kind]

    def next_round(self, count=1):
        """The round that ends `count` rounds from now."""
        before = len(self.events("round"))
        wait_until(lambda: len(self.events("round")) >= before + count or not self.is_alive(), "a round")
        rounds = self.events("round")
        assert len(rounds) >= before + count, self.lines
        return rounds[before + count - 1]

    def changed(self):
        """The next round with changes."""
        while True:
            found = self.next_round()
            if found["is_marked"]:
                return found

    def end(self, number=signal.SIGINT):
        """Its exit code, and what it has printed on stderr."""
        self.process.send_signal(number)
        message = self.process.stderr.read()
        code = self.process.wait(timeout=60)
        self.join()
        return code, message


class Protections:
    """Starts protections, of web01 unless others are named, and ends those that run."""

    def __init__(self, coldrise, *options, subject=("web01", "--every", "1s")):
        self.coldrise = coldrise
        self.arguments = (*subject, *options)
        self.started = []

    def __call__(self, *options):
        self.started.append(Protection(self.coldrise, *self.arguments, *options))
        return self.started[-1]

    def end(self):
        for protection in self.started:
            if protection.process.poll() is None:
                code, message = protection.end()
                assert code == 0, message


def marks(coldrise, session=SESSION):
    return coldrise.json("marks", session)["marks"]


def newest(coldrise, session=SESSION):
    return marks(coldrise, session)[-1]["address"]
