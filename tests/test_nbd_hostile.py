"""NBD: no client ends the server or disturbs another one."""

import concurrent.futures
import contextlib
import json
import random
import subprocess
import threading

import nbd
import pytest

from support import hostile_nbd
from support.certificates import client_context, make_certificates
from support.image import Image

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.fixture
def serve(coldrise, tmp_path):
    """Starts `coldrise serve nbd` on a Unix socket: the process and what it logs."""
    processes = []

    def start(*options):
        number = len(processes)
        path, log = tmp_path / f"socket{number}", tmp_path / f"log{number}"
        with open(log, "w", encoding="utf-8") as file:
            process = coldrise.start("--json", "serve", "nbd", "--socket", path, *options,
                                     stdout=subprocess.PIPE, stderr=file)
        processes.append(process)
        assert json.loads(process.stdout.readline())["event"] == "ready"
        return path, log

    yield start
    for process in processes:
        process.terminate()
        process.communicate(timeout=30)
        assert process.returncode == 0


class Neighbour:
    """A client that writes, flushes, reads and compares as long as it runs."""

    def __init__(self, handle, size_bytes):
        self.handle, self.disk = handle, Image(size_bytes)
        self.disk.content[:] = b"".join(bytes(handle.pread(MIB, at)) for at in range(0, size_bytes, MIB))
        self.ended, self.rounds = threading.Event(), 0

    def run(self):
        choice = random.Random(1)
        while not self.ended.is_set():
            offset = choice.randrange(len(self.disk) // 4096 - 16) * 4096
            self.disk.write(offset, choice.randbytes(4096))
            self.handle.pwrite(self.disk.read(offset, 4096), offset)
            if self.rounds % 16 == 0:
                self.handle.flush()
            offset = choice.randrange(len(self.disk) - 64 * KIB)
            assert bytes(self.handle.pread(64 * KIB, offset)) == self.disk.read(offset, 64 * KIB)
            self.rounds += 1

    @contextlib.contextmanager
    def beside(self):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.run)
            try:
                yield
            finally:
                self.ended.set()
            running.result()
        assert self.rounds > 0


def connected(path, name, certificates=None):
    handle = nbd.NBD()
    handle.set_export_name(name)
    if certificates is not None:
        handle.set_tls(nbd.TLS_REQUIRE)
        handle.set_tls_certificates(str(certificates))
    handle.connect_unix(str(path))
    return handle


def break_off(path, name, count, tls=None):
    """That many clients, of each kind in turn, four at a time."""
    kinds = list(hostile_nbd.LEAVES.values())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        clients = [
            pool.submit(hostile_nbd.leave, path, name, kinds[i % len(kinds)], tls)
            for i in range(count)
        ]
        for client in clients:
            client.result()


def test_aborted_connections_do_not_disturb_other_clients(live, point, serve, pytestconfig):
    path, log = serve()
    neighbour = Neighbour(connected(path, live), 8 * MIB)
    with neighbour.beside():
        for name in (f"{point}/vda", live):
            break_off(path, name, pytestconfig.getoption("--hostile-clients") // 2)
    assert "started again" not in log.read_text(encoding="utf-8")


@pytest.fixture
def certificates(tmp_path):
    return make_certificates(tmp_path / "certificates")


def test_aborted_tls_connections_do_not_disturb_other_clients(live, serve, certificates, pytestconfig):
    """Without its preloaded library nbdkit ends with a damaged heap: it takes some
    hundred of those that send garbage behind requests."""
    path, log = serve("--tls-certificates", certificates)
    tls = client_context(certificates)
    neighbour = Neighbour(connected(path, live, certificates), 8 * MIB)
    with neighbour.beside():
        break_off(path, live, pytestconfig.getoption("--hostile-clients"), tls)
        garbage = hostile_nbd.LEAVES["garbage behind reads"]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            clients = [
                pool.submit(hostile_nbd.leave, path, live, garbage, tls)
                for _ in range(5 * pytestconfig.getoption("--hostile-clients"))
            ]
            for client in clients:
                client.result()
    with hostile_nbd.connect(path, tls) as stream:
        assert b"live/other/vda" in hostile_nbd.go(stream, "live/other/vda")[1], "the reason"
    assert "started again" not in log.read_text(encoding="utf-8")


def test_a_block_status_of_four_gigabytes(coldrise, serve, tmp_path):
    """The largest request: nbdkit 1.32 aborts if the plugin announces more."""
    big = Image(MIB)
    big.fill(0, 4096, "start")
    path = big.save(tmp_path / "big.raw")
    with open(path, "r+b") as file:
        file.truncate(9 * GIB)
    point = coldrise.backup("big", vda=path)
    path, _log = serve()
    handle = nbd.NBD()
    handle.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    handle.set_export_name(f"{point}/vda")
    handle.connect_unix(str(path))
    for offset in (0, MIB, 4 * GIB, 5 * GIB - 1):
        for flags in (0, nbd.CMD_FLAG_REQ_ONE):
            seen = []
            handle.block_status((1 << 32) - 1, offset, lambda *reply: seen.append(reply), flags=flags)
            assert seen
