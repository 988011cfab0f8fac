"""`coldrise serve nfs` in a private network."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import threading

from support import nfs3
from support.cli import PROGRAM
from support.nbdserver import DEADLINE_S, wait_until

PATH = "/coldrise"


class NfsServer:
    """One server in the foreground."""

    def __init__(self, coldrise, network, log_path, *options):
        self.network = network
        self.log_path = pathlib.Path(log_path)
        self.log = open(self.log_path, "a", encoding="utf-8")
        self.process = subprocess.Popen(
            network.command(PROGRAM, "--json", "serve", "nfs", *options),
            env=coldrise.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        line = self.process.stdout.readline()
        self.ready = json.loads(line) if line else {}
        if self.ready.get("event") != "ready":
            code = self.process.wait(timeout=DEADLINE_S)
            self.log.close()
            raise NfsServerFailed(code, line + self.messages())

    def messages(self):
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def root(self, path=PATH):
        return nfs3.mount(self.network, path)

    def connect(self, **keywords):
        return nfs3.Nfs(self.network, **keywords)

    def uri(self, path):
        return f"nfs://127.0.0.1{PATH}/{path}"

    def ganesha(self):
        """The process id of nfs-ganesha, once it runs."""

        def find():
            for child in children(self.process.pid):
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
        """A client writes a file, which has content, all the while: it is not idle, however long a command takes."""
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


class NfsServerFailed(Exception):
    """It ended before it served."""

    def __init__(self, code, messages):
        super().__init__(f"coldrise serve nfs ended with {code}: {messages}")
        self.code = code
        self.messages = messages


def children(process):
    text = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]
