"""A wall clock that a test sets, for real processes: Debian's libfaketime."""

import datetime
import contextlib
import pathlib
import subprocess
import time

from .nbdserver import wait_until

LIBRARIES = sorted(pathlib.Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


class WallClock:
    """The time of the processes that get its environment. Their steady clock is not changed."""

    def __init__(self, folder):
        assert LIBRARIES, "install faketime"
        self.file = pathlib.Path(folder) / "clock"
        self.offset_s = 0
        self.set(0)

    def set(self, offset_s):
        """Sets the clock to this many seconds ahead of the host's."""
        self.offset_s = offset_s
        new = self.file.with_suffix(".new")
        new.write_text(f"{offset_s:+d}\n")
        new.replace(self.file)

    def set_to_noon(self, seconds_after):
        """Sets the clock to noon of this day in UTC, or to this many seconds after it."""
        now = datetime.datetime.now(datetime.UTC)
        noon = now.replace(hour=12, minute=0, second=0, microsecond=0)
        self.set(round((noon - now).total_seconds()) + seconds_after)

    def now(self):
        return time.time() + self.offset_s

    def environment(self):
        # Without the cache, a change counts immediately. Times of files stay true.
        return {"LD_PRELOAD": str(LIBRARIES[0]), "FAKETIME_TIMESTAMP_FILE": str(self.file),
                "FAKETIME_NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}

    def program(self, program, folder):
        """A program that starts the other one with this clock: runs get no environment of the service."""
        path = pathlib.Path(folder) / "with-clock"
        words = [f"export {name}='{value}'" for name, value in self.environment().items()]
        path.write_text("\n".join(["#!/bin/sh", *words, f'exec "{program}" "$@"\n']))
        path.chmod(0o755)
        return path


class BothClocks(WallClock):
    """The steady clock, too: a test triggers what a process does every few seconds."""

    def __init__(self, folder):
        super().__init__(folder)
        self.deadlines = self.file.with_name("futex_deadline.so")
        source = pathlib.Path(__file__).with_name("futex_deadline.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", self.deadlines, source, "-ldl"], check=True)

    def environment(self):
        kept = {name: value for name, value in super().environment().items() if name != "DONT_FAKE_MONOTONIC"}
        return kept | {"LD_PRELOAD": f"{self.deadlines}:{kept['LD_PRELOAD']}"}

    @contextlib.contextmanager
    def of(self, coldrise):
        """Within it, coldrise gets the clocks."""
        kept = coldrise.more
        coldrise.more = kept | self.environment()
        yield
        coldrise.more = kept

    def skip(self, seconds):
        self.set(self.offset_s + seconds)

    def end_of(self, process):
        """Skips what the process waits for until it has ended; returns its exit code."""
        def has_ended():
            self.skip(1)
            return process.poll() is not None

        wait_until(has_ended, "the end of a process")
        return process.returncode
