"""`coldrise serve nfs` in a private network."""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import threading

from support import nfs3
from support.foreground import ForegroundServer
from support.nbdserver import DEADLINE_S, wait_until

PATH = "/coldrise"


class NfsServer(ForegroundServer):
    """`coldrise serve nfs`, and its clients' view."""

    def __init__(self, coldrise, network, log_path, *options):
        super().__init__(coldrise, log_path, "nfs", *options, wrap=network.command)
        self.network = network

    def root(self, path=PATH):
        return nfs3.mount(self.network, path)

    def connect(self, **keywords):
        return nfs3.Nfs(self.network, **keywords)

    def uri(self, path):
        return f"nfs://127.0.0.1{PATH}/{path}"

    def ganesha(self):
        """The process id of nfs-ganesha, once it runs."""

        def find():
            for child in self.children():
                # One that was killed vanishes at any moment.
                with contextlib.suppress(OSError):
                    if pathlib.Path(f"/proc/{child}/comm").read_text().strip() == "ganesha.nfsd":
                        return child
            return None

        return wait_until(find, "nfs-ganesha to run")

    def crash(self):
        """Kills nfs-ganesha; returns once its successor answers."""
        before = self.ganesha()
        os.kill(before, signal.SIGKILL)

        def answers():
            try:
                if self.ganesha() == before:
                    return False
                self.root()
                return True
            except (OSError, nfs3.Refused):
                return False

        wait_until(answers, "another nfs-ganesha")

    @contextlib.contextmanager
    def in_use(self, file):
        """A client writes a non-empty file continuously: it is not idle, however long a command takes."""
        begun, ending = threading.Event(), threading.Event()

        def write():
            try:
                with self.connect() as client:
                    first, _ = client.read(file, 0, 1)
                    while not ending.is_set():
                        client.write(file, 0, first)
                        begun.set()
                        ending.wait(0.1)
            finally:
                begun.set()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            try:
                begun.wait(DEADLINE_S)
                yield
            finally:
                ending.set()
            writing.result()
