"""Reads of a restore point over NBD.

With every chunk decoded in the cache, the peer is `nbdkit file` on the raw image.
With an empty cache, it is qemu-nbd on a zstd qcow2 with an overlay.
"""

from __future__ import annotations

from contextlib import ExitStack

from bench.support import fio, images
from bench.support.commands import run
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load
from bench.support.images import Disk
from bench.support.servers import Server, nbdkit_file, qemu_nbd
from bench.support.setting import Setting

SUMMARY = "random and sequential reads of a restore point over NBD"

_NBDKIT = "nbdkit file"
_CHAIN = "qemu-nbd zstd qcow2 chain"


def _export(disk: Disk, contestant: str) -> str:
    """The export name; peers serve one image under the empty name."""
    return f"{disk.name}/latest/vda" if contestant == COLDRISE else ""


def _warm_up(server: Server, export: str, disk: Disk) -> None:
    """Reads the whole disk once, which fills the cache and the page cache below it.
    Compares the bytes with the image, because the speed of wrong bytes is meaningless."""
    script = 'nbdcopy "$1" - | cmp - "$2"'
    run(["bash", "-o", "pipefail", "-c", script, "warm-up", server.uri(export), disk.path])


def measure(setting: Setting) -> None:
    for disk in setting.disks():
        _warm(setting, disk)
        _uncached(setting, disk)


def _random(setting: Setting, disk: Disk, depth: int) -> Load:
    return Load(
        "randread",
        "4k",
        depth,
        disk.window_bytes,
        disk.window_offset_bytes,
        seconds=setting.sizes.seconds,
    )


def _warm(setting: Setting, disk: Disk) -> None:
    """Servers run through all rounds, so that the decoded cache stays warm."""
    loads = {
        "random read 4K QD16, decoded cache warm": _random(setting, disk, 16),
        "random read 4K QD1, decoded cache warm": _random(setting, disk, 1),
    }
    with ExitStack() as servers:
        started: dict[str, Server] = {}

        def served(name: str) -> Server:
            if name not in started:
                if name == COLDRISE:
                    server = setting.coldrise(disk).serve(setting.socket("coldrise"))
                else:
                    server = nbdkit_file(disk.path, setting.socket("nbdkit"), read_only=True)
                started[name] = servers.enter_context(server)
                _warm_up(started[name], _export(disk, name), disk)
            return started[name]

        def lane(name: str):
            return lambda: {
                title: fio.over_nbd(load, served(name).uri(_export(disk, name))).operations_per_s
                for title, load in loads.items()
            }

        results = setting.race(
            f"warm read, {disk.name}", {COLDRISE: lane(COLDRISE), _NBDKIT: lane(_NBDKIT)}, setting.sizes.rounds
        )
    for title, load in loads.items():
        targets = [Target(_NBDKIT, at_least=0.95)] if load.depth == 16 else []
        setting.add(
            Row("nbd_read", title, disk.name, "IO/s", column(results, title), targets, load.text(),
                "coldrise serve nbd without options, everything read once before")
        )


def _uncached(setting: Setting, disk: Disk) -> None:
    folder = setting.folder("chain")
    overlay = images.zstd_chain(disk, folder)
    random_title = "random read 4K QD16, decoded cache off"
    sequential_title = "sequential read 256K QD4, decoded cache cold"
    random_load = _random(setting, disk, 16)
    sequential_load = Load(
        "read", "256k", 4, disk.window_bytes, disk.window_offset_bytes, is_pass=True
    )

    def sample(name: str, fresh_server, uncached_server) -> dict[str, float]:
        # One pass through a server that has just started decodes every chunk
        # exactly once.
        with fresh_server() as server:
            sequential = fio.over_nbd(sequential_load, server.uri(_export(disk, name)))
        with uncached_server() as server:
            scattered = fio.over_nbd(random_load, server.uri(_export(disk, name)))
        return {
            random_title: scattered.operations_per_s,
            sequential_title: sequential.bytes_per_s / images.MIB,
        }

    def chain_server() -> Server:
        return qemu_nbd(overlay, setting.socket("qemu"))

    contestants = {
        COLDRISE: lambda: sample(
            COLDRISE,
            lambda: setting.coldrise(disk).serve(setting.socket("coldrise")),
            lambda: setting.coldrise(disk).serve(setting.socket("coldrise"), cache="0"),
        ),
        _CHAIN: lambda: sample(_CHAIN, chain_server, chain_server),
    }
    results = setting.race(f"uncached read, {disk.name}", contestants, setting.sizes.rounds)
    setting.add(
        Row("nbd_read", random_title, disk.name, "IO/s", column(results, random_title),
            [Target(_CHAIN, at_least=1.0)], random_load.text(), "coldrise serve nbd --cache 0")
    )
    setting.add(
        Row("nbd_read", sequential_title, disk.name, "MiB/s", column(results, sequential_title),
            [Target(_CHAIN, at_least=1.0)], sequential_load.text(),
            "a server just started, default cache, one pass")
    )
    images.removed(folder)
