"""InMage's own tables: files of N MB are written in a guest, which pauses for 4 s and removes them, while `protect-live --to`
captures and sends them over a line. Cycles are processor time times the processors' frequency; QEMU's own share cannot be told
from the guest's."""

from __future__ import annotations

import contextlib
import time

from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.following import Following, PATIENCE_S, drive_bytes, followed_guest, megahertz, processor_s
from bench.support.offsite import USUAL, Sites
from bench.support.setting import Setting
from tests.support.guest import Guest

SUMMARY = "files that a followed guest writes, over the line to another site: InMage's tables"

_FILES_MB = [1, 10, 50, 100, 150, 200, 250]
_REPEATS = 3
# Their compression was off or on; here the line compresses what can be compressed.
_CONTENTS = {"random bytes": "--refill_buffers", "half compressible": "--refill_buffers --buffer_compress_percentage=50"}

_WRITTEN, _LINE = "written in the guest", "on the line"
_SOURCE, _TARGET = "cycles at the source", "cycles at the target"
_READ, _STORED = "read at the target", "written at the target"


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    folder = setting.folder("protect_files")
    monitor = setting.socket("files-qmp")
    with contextlib.closing(USUAL.line(folder)) as line, followed_guest(setting, folder, monitor) as guest:
        with Sites(setting.program, line, folder).paired() as sites:
            words = ["--from", f"qmp:{monitor}", "--to", "far"]
            following = Following(sites.near, words, line.near.command())
            try:
                following.event("connected")
                _tables(setting, sites, guest, following)
            finally:
                following.end()


def _tables(setting: Setting, sites: Sites, guest: Guest, following: Following) -> None:
    sizes = _FILES_MB[1:2] if setting.is_quick else _FILES_MB
    for content, options in _CONTENTS.items():
        for megabytes in sizes:
            command = (f"for i in $(seq {_REPEATS}); do fio --name=f --filename=/root/f --rw=write --bs=1M --size={megabytes}M"
                       f" --end_fsync=1 --ioengine=psync {options} >/dev/null; sleep 4; rm /root/f; done; sync")
            sample = {COLDRISE: lambda: _sample(setting, sites, guest, following, command)}
            title = f"files of {megabytes} MB, {content}"
            results = setting.race(title, sample, setting.sizes.few_rounds)
            limit = 78 if content == "random bytes" else 121
            for name, unit, targets in [
                (_WRITTEN, "MB/s", []),
                (_LINE, "Mbit/s", []),
                (_SOURCE, "cycles/byte", []),
                (_TARGET, "cycles/byte", []),
                ("cycles at both", "cycles/byte", [Target(at_most=limit)]),
                (_READ, "bytes/byte", [Target(at_most=0.01)]),
                (_STORED, "bytes/byte", [Target(at_most=1.1)]),
            ]:
                setting.add(Row("protect_files", f"{title}: {name}", USUAL.text(), unit, column(results, name), targets, command))


def _written_bytes(guest: Guest) -> int:
    """Bytes that the guest has written to its disk."""
    return 512 * int(guest.check("awk '{print $7}' /sys/block/vda/stat").split()[-1])


def _sample(setting: Setting, sites: Sites, guest: Guest, following: Following, command: str) -> dict[str, float]:
    near, far = following.process.pid, sites.server_pid
    settle(setting.work)
    _caught_up(guest, following)
    written, cpu, far_drive, line = _written_bytes(guest), (processor_s(near), processor_s(far)), drive_bytes(far), sites.line.counters()
    began = time.monotonic()
    guest.check(command, timeout=PATIENCE_S)
    took = time.monotonic() - began
    written = _written_bytes(guest) - written
    _caught_up(guest, following)
    settle(setting.work)
    sent_for_s = time.monotonic() - began
    source, target = ((after - before) * megahertz() * 1e6 / written
                      for before, after in zip(cpu, (processor_s(near), processor_s(far))))
    read, stored = ((after - before) / written for before, after in zip(far_drive, drive_bytes(far)))
    sent_bytes = sites.line.counters()[0].bytes - line[0].bytes
    return {_WRITTEN: written / took / 1e6, _LINE: sent_bytes * 8 / sent_for_s / 1e6, _SOURCE: source, _TARGET: target,
            "cycles at both": source + target, _READ: read, _STORED: stored}


def _caught_up(guest: Guest, following: Following) -> None:
    """Waits until the other site has what the guest has written until now. The time of a mark is up to a second after its
    instant, and a guest that writes nothing has no new mark."""
    now_ms = time.time() * 1000
    guest.check("sleep 2; date > /root/now; sync")
    while following.event("sent")["marked_at_ms"] <= now_ms + 1000:
        pass
