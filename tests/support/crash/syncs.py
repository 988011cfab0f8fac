"""Controls the results of a server's fdatasync and fsync."""

import contextlib
import os
import pathlib
import subprocess

_SOURCE = pathlib.Path(__file__).resolve().parents[1] / "storage_shim.c"


class Syncs:
    """A library to preload into a server, and its control file."""

    def __init__(self, directory):
        self.library = directory / "storage_shim.so"
        self.order = directory / "sync_order"
        self.work()
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", self.library, _SOURCE, "-ldl"],
            check=True,
        )

    def _say(self, order):
        """Atomic: a sync that read half of it would work as usual."""
        new = self.order.with_name(f"{self.order.name}.new")
        new.write_text(order, encoding="utf-8")
        os.replace(new, self.order)

    def work(self):
        self._say("o")

    def fail(self):
        self._say("f")

    def lie(self):
        self._say("l")

    @contextlib.contextmanager
    def held_back(self):
        """No fdatasync returns inside this context; they continue after it."""
        self._say("w")
        try:
            yield
        finally:
            self.work()

    def count(self):
        """The number of fdatasyncs that have returned."""
        counted = self.order.with_name(f"{self.order.name}.count")
        return counted.stat().st_size if counted.exists() else 0

    def fail_at(self, path):
        """Only the fsync of this file or folder fails."""
        self._say(f"p{path.resolve()}")

    @contextlib.contextmanager
    def preloaded(self):
        """The environment for a controlled process."""
        ours = {"LD_PRELOAD": str(self.library), "COLDRISE_TEST_SYNC": str(self.order)}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
