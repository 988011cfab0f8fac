"""`coldrise serve nfs` in a private network."""

import json
import os
import pathlib
import signal
import subprocess

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

    def stop(self):
        """Ends it as its users do; it must end without an error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
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
