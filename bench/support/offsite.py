"""Two sites and the line between them: Coldrise's own, and what its peers need there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from bench.support.coldrise import Coldrise
from bench.support.commands import run
from bench.support.figures import Failure
from bench.support.images import MIB
from tests.support.line import FAR_ADDRESS, NEAR_ADDRESS, Counters, Line
from tests.support.network import Network

MBIT = 45.0
_PORT, _SSH_PORT = 8481, 2222
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Condition:
    """The disturbances of a line."""

    round_trip_ms: float
    loss: float

    def text(self) -> str:
        return f"{MBIT:g} Mbit/s, {self.round_trip_ms:g} ms, {self.loss:.1%} lost"

    def line(self, folder: Path, congestion_control: str = "cubic") -> Line:
        """`congestion_control` is that of programs that do not choose one."""
        return Line(folder, mbit=MBIT, round_trip_ms=self.round_trip_ms, loss=self.loss,
                    peer_congestion_control=congestion_control)


USUAL, LOSSY, LONG = Condition(50.0, 0.001), Condition(50.0, 0.01), Condition(200.0, 0.001)


@dataclass(frozen=True)
class Passed:
    """The time and bytes of one command."""

    elapsed_s: float
    out: Counters
    back: Counters
    near_cpu_s: float
    far_cpu_s: float
    answer: dict

    @property
    def wire_bytes(self) -> int:
        """Of both directions, with all headers."""
        return self.out.bytes + self.back.bytes

    @property
    def packets(self) -> int:
        return self.out.packets + self.back.packets


def ended(network: Network, argv: list[object], env: dict[str, str], timeout_s: float = 1800) -> str:
    """The output of a program that must succeed, in a network."""
    done = subprocess.run(network.command(*argv), env={**os.environ, **env}, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise Failure(f"{argv[0]}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


class Sites:
    """Two repositories, paired, and the far one's server."""

    def __init__(self, program: Path, line: Line, folder: Path) -> None:
        self.line = line
        self.near, self.far = Coldrise(program, folder / "near"), Coldrise(program, folder / "far")
        self.near.init()
        self.far.init()

    @contextlib.contextmanager
    def paired(self) -> Iterator["Sites"]:
        command = self.line.far.command(*self.far.command("serve", "replica", "--listen", f"{FAR_ADDRESS}:{_PORT}"))
        with subprocess.Popen(command, env={**os.environ, **self.far.env}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, text=True) as self._server:
            try:
                self._server.stdout.readline()
                self._pair()
                yield self
            finally:
                self._server.terminate()

    def _pair(self) -> None:
        code = self.far.call("link", "invite", "near")["code"]
        until = time.monotonic() + 10
        while True:
            try:
                self.run("link", "add", "far", f"{FAR_ADDRESS}:{_PORT}", "--code", code)
                return
            except Failure:
                # The server looks for new codes every second.
                if time.monotonic() > until:
                    raise
                time.sleep(0.3)

    def run(self, *words: object) -> dict:
        lines = ended(self.line.near, self.near.command(*words), self.near.env).splitlines()
        return json.loads(lines[-1]) if lines else {}

    def copied(self, *words: object) -> Passed:
        return self.measured(lambda: self.run("copy", *words, "--to", "far"))

    def measured(self, work) -> Passed:
        before, children, server = self.line.counters(), os.times(), self._server_cpu_s()
        start = time.monotonic()
        answer = work()
        elapsed_s = time.monotonic() - start
        now, after = os.times(), self.line.counters()
        near_cpu_s = now.children_user + now.children_system - children.children_user - children.children_system
        out, back = (Counters(*(getattr(late, name) - getattr(early, name) for name in Counters.__annotations__))
                     for early, late in zip(before, after))
        return Passed(elapsed_s, out, back, near_cpu_s, self._server_cpu_s() - server, answer)

    @property
    def server_pid(self) -> int:
        """Of the far site's server."""
        return self._server.pid

    def _server_cpu_s(self) -> float:
        fields = Path(f"/proc/{self._server.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextlib.contextmanager
def ssh_server(line: Line, folder: Path) -> Iterator[list[str]]:
    """sshd at the far end, on keys of its own. Yields the client's command without the command there."""
    sshd = "/usr/sbin/sshd"
    if not os.access(sshd, os.X_OK):
        raise Failure("openssh-server is not installed: make bench-deps")
    for name in ("host", "client"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name])
    (folder / "authorized").write_text((folder / "client.pub").read_text())
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[{FAR_ADDRESS}]:{_SSH_PORT} {host_key}\n")
    (folder / "sshd_config").write_text(
        f"ListenAddress {FAR_ADDRESS}\nPort {_SSH_PORT}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        "UsePAM no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nStrictModes no\nPidFile none\n"
        f"AllowUsers *@{NEAR_ADDRESS}\nSubsystem sftp internal-sftp\n")
    start = f"mkdir -p /run/sshd && exec {sshd} -D -e -f {folder}/sshd_config"
    client = ["ssh", "-F", "none", "-i", str(folder / "client"), "-p", str(_SSH_PORT), "-o", f"UserKnownHostsFile={folder}/known",
              "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", f"root@{FAR_ADDRESS}"]
    with open(folder / "sshd.log", "w") as log, subprocess.Popen(line.far.command("sh", "-c", start), stdin=subprocess.DEVNULL,
                                                               stdout=log, stderr=log) as server:
        try:
            until = time.monotonic() + 10
            while line.near.run(*client, "true").returncode != 0:
                if time.monotonic() > until:
                    raise Failure(f"sshd does not answer: {(folder / 'sshd.log').read_text()[-500:]}")
                time.sleep(0.2)
            yield client
        finally:
            server.terminate()


def part_of(source: Path, target: Path, offset_bytes: int, count_bytes: int) -> Path:
    with open(source, "rb") as taken, open(target, "wb") as made:
        taken.seek(offset_bytes)
        left = count_bytes
        while left and (part := taken.read(min(left, 8 * MIB))):
            made.write(part)
            left -= len(part)
    return target
