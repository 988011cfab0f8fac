"""Rules over what a server's fdatasync and fsync do."""

import contextlib
import os
import pathlib
import subprocess

_SOURCE = pathlib.Path(__file__).resolve().parents[1] / "storage_shim.c"


class Syncs:
    """A library to preload into a server, and the file that steers it."""

    def __init__(self, directory):
        self.library = directory / "storage_shim.so"
        self.order = directory / "sync_order"
        self.work()
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", self.library, _SOURCE, "-ldl"],
            check=True,
        )

    def work(self):
        self.order.write_text("o", encoding="ascii")

    def fail(self):
        self.order.write_text("f", encoding="ascii")

    def lie(self):
        self.order.write_text("l", encoding="ascii")

    def fail_at(self, path):
        """Only the fsync of this file or folder fails."""
        self.order.write_text(f"p{path.resolve()}", encoding="utf-8")

    @contextlib.contextmanager
    def preloaded(self):
        """What is started in here is steered."""
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
