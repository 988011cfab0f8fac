"""The cost of small changes on the line, and the data that is sent twice if the line is cut repeatedly."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from pathlib import Path
from typing import Callable

from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.images import MIB, TextSource, removed, scattered
from bench.support.offsite import USUAL, Sites, part_of
from bench.support.setting import Setting
from tests.support.line import Line

SUMMARY = "what changes of 4 to 16 KiB cost on the line; bytes that are sent twice over a line that is cut"

_DISK_BYTES = 256 * MIB
_SHARE = 0.01
_WRITES = (4 << 10, 8 << 10, 16 << 10)
_CHANGE = "sent per changed byte"
_TWICE = "sent twice, cut every 20 s"
# Longer than a line may be silent: both sides notice, and connect again.
_CUT_S, _BETWEEN_S = 22.0, 20.0
_CUT_BYTES, _UNCUT_BYTES = 256 * MIB, 48 * MIB


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    results = setting.race("offsite_changes", {COLDRISE: lambda: _on_line(setting, _changes)}, 1)
    count = min(_DISK_BYTES, setting.sizes.disk_bytes)
    for kind in ("random", "compressible"):
        for size in _WRITES:
            key = _key(kind, size)
            note = f"{_SHARE:.0%} of {count // MIB} MiB of the guest's disk; bytes that the source sent, with all headers, by bytes written"
            setting.add(Row("offsite_changes", f"{_CHANGE}, {size >> 10} KiB writes of {kind} bytes", USUAL.text(), "bytes",
                            column(results, key), [Target(at_most=1.0)], "", note))
    results = setting.race("offsite_changes", {COLDRISE: lambda: _on_line(setting, _cuts)}, 1)
    cut = setting.sizes.seconds * 2 if setting.is_quick else _BETWEEN_S
    setting.add(Row("offsite_changes", _TWICE, USUAL.text(), "% of the content", column(results, _TWICE), [Target(at_most=1.0)], "",
                    f"{_content_bytes(setting) // MIB} MiB of random bytes; after each {cut:g} s the line is silent for {_CUT_S:g} s; "
                    "bytes that the source gave to the network, without what TCP itself sends again, beside a copy that was not cut"))


def _key(kind: str, size: int) -> str:
    return f"{kind} {size}"


def _on_line(setting: Setting, measured: Callable) -> dict[str, float]:
    folder = setting.folder("offsite-changes")
    try:
        with contextlib.closing(USUAL.line(folder)) as line:
            with Sites(setting.program, line, folder).paired() as sites:
                return measured(setting, line, sites, folder)
    finally:
        removed(folder)


def _changes(setting: Setting, _line: Line, sites: Sites, folder: Path) -> dict[str, float]:
    count, guest = min(_DISK_BYTES, setting.sizes.disk_bytes), setting.guest()
    image = part_of(guest.path, folder / "disk.raw", guest.window_offset_bytes, count)
    sites.near.call("backup", "web01", f"vda=raw:{image}")
    # The first copy is brought on a drive.
    sites.near.call("copy", "--to", sites.far.repository, "--to-passphrase-file", sites.far.env["COLDRISE_PASSPHRASE_FILE"])
    text, figures = TextSource(random.Random(6)), {}
    for kind in ("random", "compressible"):
        for seed, size in enumerate(_WRITES):
            offsets = scattered(count, size, _SHARE, seed)
            with open(image, "r+b") as made:
                for offset in offsets:
                    made.seek(offset)
                    made.write(os.urandom(size) if kind == "random" else text.take(size).ljust(size, b" "))
            sites.near.call("backup", "web01", f"vda=raw:{image}")
            figures[_key(kind, size)] = sites.copied("web01").out.bytes / (len(offsets) * size)
    return figures


def _content_bytes(setting: Setting) -> int:
    return 24 * MIB if setting.is_quick else _CUT_BYTES


def _cuts(setting: Setting, line: Line, sites: Sites, folder: Path) -> dict[str, float]:
    image = folder / "random.raw"

    def copied(machine: str, count: int) -> float:
        """Bytes that were given to the network for each byte of content, in all attempts."""
        image.write_bytes(os.urandom(count))
        sites.near.call("backup", machine, f"vda=raw:{image}")
        return sites.copied(machine).answer["line"]["sent_bytes"] / count

    uncut = copied("uncut", min(_UNCUT_BYTES, _content_bytes(setting)))
    is_over = threading.Event()
    between_s = 2.0 if setting.is_quick else _BETWEEN_S

    def flows(since: int) -> bool:
        """Waits until content is on the line."""
        while line.counters()[0].bytes < since + MIB:
            if is_over.wait(0.1):
                return False
        return True

    def cut() -> None:
        while flows(line.counters()[0].bytes) and not is_over.wait(between_s):
            line.cut()
            is_over.wait(_CUT_S)
            line.restore()

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        twice = copied("cut", _content_bytes(setting))
    finally:
        is_over.set()
        cutting.join()
    return {_TWICE: (twice / uncut - 1) * 100}
