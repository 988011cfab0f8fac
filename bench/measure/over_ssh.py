"""Backups of a machine of another host, which is reached over SSH, against `ssh HOST cat IMAGE`. Both sides are on this machine.

The peer uses the ciphers and key exchange that ssh chooses by itself, with this user's configuration."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
import time
from pathlib import Path

from bench.support import fio, images
from bench.support.commands import run, settle, timed
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.fio import Load
from bench.support.images import MIB
from bench.support.servers import nbd_uri, nbdkit_memory
from bench.support.setting import Setting
from tests.support.domain import Domain
from tests.support.ssh_host import SshHost

SUMMARY = "backup of a machine of another host over SSH, connections, small requests"

_PEER = "ssh"
_LOCAL = "without SSH"
_MACHINE = "web01"
_FIRST = "first backup"
_CHANGED = "backup, 1 % changed"
_CHECK = "a connection: host check without the program's start"
_FURTHER = "a further session of a connection"
_MEMORY = "memory of coldrise-host, highest (VmHWM)"
_DELAY = "4 KiB reads, one at a time: longer by"
_READS = "4 KiB reads, 16 at a time"
_FLUSHED = "4 KiB write and flush: longer by, in delays of a read"
_SAMPLE_EVERY_S = 0.05
_START_LIMIT_S = 30


def measure(setting: Setting) -> None:
    folder = setting.folder("over_ssh")
    with contextlib.closing(SshHost()) as host:
        raw = folder / "random.raw"
        ssh = _Ssh(folder, host)
        try:
            image = _random_image(host, _MACHINE, raw, setting.sizes.incremental_disk_bytes)
            raw.unlink()
            _changes(setting, folder, host, ssh, image)
            host.libvirt.clear()
            images.removed(image.parent)
            image = _random_image(host, _MACHINE, raw, setting.sizes.disk_bytes)
            _backups(setting, folder, host, Domain(host.libvirt, _MACHINE), ssh, image)
            _small_requests(setting, ssh)
        finally:
            host.libvirt.clear()
    images.removed(folder)


def _random_image(host: SshHost, machine: str, raw: Path, size_bytes: int) -> Path:
    """A disk of a machine, as a qcow2 image."""
    run(["dd", "if=/dev/urandom", f"of={raw}", "bs=1M", f"count={size_bytes // MIB}", "status=none"])
    image = host.libvirt.images / machine / "vda.qcow2"
    image.parent.mkdir()
    run(["qemu-img", "convert", "-O", "qcow2", raw, image])
    return image


class _Ssh:
    """OpenSSH with a key of its own, and otherwise as this user has it."""

    def __init__(self, folder: Path, host: SshHost) -> None:
        self._key = folder / "key"
        self._control = folder / "control"
        self._words = [
            "-i", self._key, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
            "-o", "LogLevel=ERROR", "-p", host.port,
        ]
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._key])
        with host.keys.open("a", encoding="utf-8") as keys:
            keys.write(self._key.with_suffix(".pub").read_text())

    def command(self, *options: object) -> list[str]:
        return [str(word) for word in ["ssh", *self._words, *options, "root@127.0.0.1"]]

    @contextlib.contextmanager
    def session(self, *options: object):
        """A connection with a session in which a command waits. Yields the options for further sessions."""
        words = [*self.command("-M", "-S", self._control, *options), "echo ready; exec cat"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as master:
            if master.stdout.readline() != "ready\n":
                raise Failure("ssh has not started a session")
            yield "-S", self._control
            master.stdin.close()


class _HostMemory(threading.Thread):
    """Records the highest resident memory of the program on the host."""

    def __init__(self, host: SshHost) -> None:
        super().__init__(daemon=True)
        self._host, self._done, self.peak_mib = host, threading.Event(), 0.0

    def run(self) -> None:
        while not self._done.wait(_SAMPLE_EVERY_S):
            for process in self._host.sessions():
                with contextlib.suppress(OSError, StopIteration):
                    lines = Path(f"/proc/{process}/status").read_text().splitlines()
                    # The name in the kernel has 15 bytes.
                    if lines[0].split()[1].startswith("coldrise-host"):
                        peak = next(line for line in lines if line.startswith("VmHWM"))
                        self.peak_mib = max(self.peak_mib, int(peak.split()[1]) / 1024)

    def __enter__(self) -> "_HostMemory":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def _repository(setting: Setting, folder: Path, host: SshHost, name: str):
    """A new one that knows the host, to which it has copied the program. Returns what a check of the host takes, too."""
    program = setting.new_coldrise(folder / name)
    program.init(chunk_size=setting.chunk_size, compression=setting.compression)
    added = program.call("host", "add", "hv1", host.address)
    with host.keys.open("a", encoding="utf-8") as keys:
        keys.write(added["authorized_keys"] + "\n")
    program.call("host", "check")
    return program, program.call_timed("host", "check") - program.call_timed("host", "list")


_BACKUP = ("backup", _MACHINE, "--from", "libvirt", "--on", "hv1")


def _cat(ssh: _Ssh, image: Path) -> float:
    return timed(["sh", "-c", 'exec "$@" > /dev/null', "sh", *ssh.command(), f"cat {image}"])


def _changes(setting: Setting, folder: Path, host: SshHost, ssh: _Ssh, image: Path) -> None:
    size_bytes = setting.sizes.incremental_disk_bytes
    changed_mib = max(1, size_bytes // MIB // 100)
    domain = Domain(host.libvirt, _MACHINE)
    program, _ = _repository(setting, folder, host, "changes")
    program.call(*_BACKUP)
    turns = itertools.count(1)

    def coldrise() -> dict[str, float]:
        turn = next(turns)
        for number in range(changed_mib):
            domain.write("vda", f"write -P {1 + turn % 250} {number * size_bytes // changed_mib // MIB}M 1M")
        settle(setting.work)
        return {_CHANGED: program.call_timed(*_BACKUP)}

    def cat() -> dict[str, float]:
        settle(setting.work)
        return {_CHANGED: _cat(ssh, image)}

    results = setting.race("over_ssh", {COLDRISE: coldrise, _PEER: cat}, setting.sizes.rounds)
    setting.add(Row("over_ssh", _CHANGED, f"{size_bytes // MIB} MiB, random", "s", column(results, _CHANGED),
                    [Target(_PEER, at_most=0.03)], "backup --from libvirt --on hv1; ssh hv1 cat of the whole IMAGE"))
    images.removed(program.repository)


def _backups(setting: Setting, folder: Path, host: SshHost, domain: Domain, ssh: _Ssh, image: Path) -> None:
    turns = itertools.count(1)

    def coldrise() -> dict[str, float]:
        program, check = _repository(setting, folder, host, f"repository{next(turns)}")
        settle(setting.work)
        with _HostMemory(host) as memory:
            first = program.call_timed(*_BACKUP)
        for checkpoint in domain.checkpoints():
            host.libvirt.virsh("checkpoint-delete", _MACHINE, checkpoint)
        images.removed(program.repository)
        return {_FIRST: first, _CHECK: check, _MEMORY: memory.peak_mib}

    def cat() -> dict[str, float]:
        settle(setting.work)
        seconds = _cat(ssh, image)
        login = timed([*ssh.command(), "true"])
        with ssh.session() as shared:
            further = timed([*ssh.command(*shared), "true"])
        return {_FIRST: seconds, _CHECK: login, _FURTHER: further}

    results = setting.race("over_ssh", {COLDRISE: coldrise, _PEER: cat}, setting.sizes.rounds)
    subject = f"{setting.sizes.disk_bytes // MIB} MiB, random"
    rows = [
        (_FIRST, "s", [Target(_PEER, at_most=round(1 / 0.9, 2))], "backup --from libvirt --on hv1; ssh hv1 cat IMAGE, to /dev/null"),
        (_CHECK, "s", [Target(at_most=0.4)], "host check less host list; ssh hv1 true"),
        (_FURTHER, "s", [], "ssh -S CONTROL hv1 true"),
        (_MEMORY, "MiB", [Target(at_most=20)], "during the first backup"),
    ]
    for title, unit, targets, note in rows:
        setting.add(Row("over_ssh", title, subject, unit, column(results, title), targets, "", note))


def _small_requests(setting: Setting, ssh: _Ssh) -> None:
    size_bytes = setting.sizes.disk_bytes
    one, many = (Load("randread", "4k", depth, size_bytes, seconds=setting.sizes.seconds) for depth in (1, 16))
    write = Load("randwrite", "4k", 1, size_bytes, seconds=setting.sizes.seconds).with_extra("--fsync=1")
    forwarded = setting.socket("forwarded")

    def flushed_us(uri: str) -> float:
        """The time of a write and its flush; fio's own mean covers only the write."""
        return 1e6 / fio.over_nbd(write, uri).operations_per_s

    def local(server) -> dict[str, float]:
        return {_READS: fio.over_nbd(many, server.uri()).operations_per_s}

    def over_ssh(server) -> dict[str, float]:
        here_us, flushed_here_us = fio.over_nbd(one, server.uri()).mean_us, flushed_us(server.uri())
        # As recover connects: AES-GCM first, a command in the session, and a socket there that leads here.
        options = ("-o", "Ciphers=^aes128-gcm@openssh.com", "-R", f"{forwarded}:{server.socket_path}")
        with ssh.session(*options):
            _wait_for(forwarded)
            there_us = fio.over_nbd(one, nbd_uri(forwarded)).mean_us
            flushed_there_us = flushed_us(nbd_uri(forwarded))
            reads = fio.over_nbd(many, nbd_uri(forwarded)).operations_per_s
        forwarded.unlink(missing_ok=True)
        trips = (flushed_there_us - flushed_here_us) / (there_us - here_us)
        return {_DELAY: there_us - here_us, _READS: reads, _FLUSHED: trips}

    # The time of a drive's flush varies by more than the way takes.
    with nbdkit_memory(size_bytes, setting.socket("nbdkit")) as server:
        results = setting.race("over_ssh", {COLDRISE: lambda: over_ssh(server), _LOCAL: lambda: local(server)}, setting.sizes.few_rounds)
    rows = [
        (_DELAY, "µs", [Target(at_most=250)], one),
        (_READS, "1/s", [Target(_LOCAL, at_least=0.4)], many),
        (_FLUSHED, "delays", [Target(at_most=2)], write),
    ]
    note = "nbdkit memory, over a Unix socket that ssh -R makes as recover --on does"
    for title, unit, targets, load in rows:
        setting.add(Row("over_ssh", title, "NBD", unit, column(results, title), targets, load.text(), note))


def _wait_for(path: Path) -> None:
    until = time.monotonic() + _START_LIMIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise Failure(f"{path}: ssh does not forward it")
        time.sleep(_SAMPLE_EVERY_S)
