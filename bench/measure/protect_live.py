"""A guest whose writes `protect-live` captures, against the same guest without it.

The second load is that of InMage's own tables: a file of N MB is written, the guest pauses for 4 s, and removes it. Cycles
are processor time of protect-live times the processor's frequency; QEMU's own share cannot be told from the guest's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from bench.support import images
from bench.support.coldrise import Coldrise
from bench.support.commands import run, settle
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.setting import Setting
from tests.support.guest import Guest, GuestError

SUMMARY = "a guest that is followed every 5 s, and what following it costs"

_PLAIN = "not followed"
_RATE = "random write 8K + fsync in the guest"
_TAIL = "the same, 99th percentile"
_MACHINE = "followed"
_LIMIT_S = 300.0
_FILES_MB = [1, 10, 50, 100, 150, 200, 250]
_TICKS = os.sysconf("SC_CLK_TCK")


class _Following:
    """A running protect-live."""

    def __init__(self, coldrise: Coldrise, monitor: Path, every: str) -> None:
        command = coldrise.command("protect-live", _MACHINE, "--from", f"qmp:{monitor}", "--every", every)
        self.process = subprocess.Popen(command, env=coldrise.env, stdout=subprocess.PIPE, text=True)
        self.rounds: list[dict] = []

    def round(self) -> dict:
        """The next round that ends."""
        for line in self.process.stdout:
            event = json.loads(line)
            if event.get("event") == "round":
                self.rounds.append(event)
                return event
        raise Failure("protect-live has ended")

    def processor_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def drive(self) -> dict[str, int]:
        text = Path(f"/proc/{self.process.pid}/io").read_text()
        return {name: int(value) for name, value in re.findall(r"(\w+): (\d+)", text)}

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate()


@contextmanager
def _following(coldrise: Coldrise, monitor: Path, every: str = "5s") -> Iterator[_Following]:
    following = _Following(coldrise, monitor, every)
    try:
        following.round()
        yield following
    finally:
        following.end()


def _written(guest: Guest) -> int:
    """Bytes that the guest has written to its disk."""
    return 512 * int(guest.check("awk '{print $7}' /sys/block/vda/stat").split()[-1])


def _megahertz() -> float:
    found = re.findall(r"^cpu MHz\s*: ([\d.]+)", Path("/proc/cpuinfo").read_text(), re.M)
    return sum(map(float, found)) / len(found)


def measure(setting: Setting) -> None:
    source = setting.guest()
    if setting.program is None:
        return
    folder = setting.folder("protect-live")
    image, monitor = folder / "guest.qcow2", setting.socket("followed-qmp")
    run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", source.path, image])
    run(["qemu-img", "resize", "-q", image, "+1G"])
    coldrise = setting.new_coldrise(folder / "repository")
    coldrise.init(chunk_size=setting.chunk_size, compression=setting.compression)
    disk = ["-blockdev", f"driver=qcow2,node-name=vda,discard=unmap,file.driver=file,file.filename={image}",
            "-device", "virtio-blk-pci,id=dvda,drive=vda,discard=on",
            "-qmp", f"unix:{monitor},server=on,wait=off"]
    try:
        with Guest([disk], log=folder / "console.log") as guest:
            guest.wait_for_login(timeout=_LIMIT_S)
            guest.login()
            _transactions(setting, coldrise, guest, monitor)
            _files(setting, coldrise, guest, monitor)
            guest.poweroff()
    except GuestError as error:
        raise Failure(f"the guest: {error}") from error


def _transactions(setting: Setting, coldrise: Coldrise, guest: Guest, monitor: Path) -> None:
    command = ("fio --name=t --filename=/root/t --rw=randwrite --bs=8k --size=128M --fsync=1 --ioengine=psync"
               f" --time_based --runtime={5 * setting.sizes.seconds} --output-format=json")
    guest.check(command, timeout=_LIMIT_S)

    def load() -> dict[str, float]:
        said = guest.check(command, timeout=_LIMIT_S)
        job = json.loads(said[said.index("{"):])["jobs"][0]
        tail = job["sync"]["lat_ns"]["percentile"]["99.000000"] / 1e6
        return {_RATE: job["write"]["iops"], _TAIL: tail}

    def followed() -> dict[str, float]:
        with _following(coldrise, monitor):
            return load()

    results = setting.race(_RATE, {COLDRISE: followed, _PLAIN: load}, setting.sizes.rounds)
    setting.add(Row("protect_live", _RATE, "guest", "IO/s", column(results, _RATE), [Target(_PLAIN, at_least=0.97)], command))
    setting.add(Row("protect_live", _TAIL, "guest", "ms", column(results, _TAIL), [], command))


def _files(setting: Setting, coldrise: Coldrise, guest: Guest, monitor: Path) -> None:
    sizes = _FILES_MB if not setting.is_quick else _FILES_MB[1:2]
    for megabytes in sizes:
        title = f"files of {megabytes} MB, 4 s, removed"
        repeats = max(3, (5 * setting.sizes.seconds) // 5)
        command = (f"for i in $(seq {repeats}); do dd if=/dev/urandom of=/root/f bs=1M count={megabytes} conv=fsync 2>/dev/null;"
                   " sleep 4; rm /root/f; done; sync")

        def sample() -> dict[str, float]:
            settle(setting.work)
            with _following(coldrise, monitor) as following:
                before, began = _written(guest), time.monotonic()
                processor_s, drive = following.processor_s(), following.drive()
                guest.check(command, timeout=_LIMIT_S)
                took, written = time.monotonic() - began, _written(guest) - before
                # What is on the way ends with the round after it.
                following.round()
                following.round()
                processor_s = following.processor_s() - processor_s
                moved = {name: value - drive[name] for name, value in following.drive().items()}
            return {
                "written": written / took / 1e6,
                "cycles": processor_s * _megahertz() * 1e6 / written,
                "read at the target": moved["read_bytes"] / written,
                "written at the target": moved["write_bytes"] / written,
            }

        results = setting.race(title, {COLDRISE: sample}, setting.sizes.few_rounds)
        for name, unit, targets in [
            ("written", "MB/s", []),
            ("cycles", "cycles/byte", [Target(at_most=78)]),
            ("read at the target", "bytes/byte", [Target(at_most=0.01)]),
            ("written at the target", "bytes/byte", [Target(at_most=1.1)]),
        ]:
            setting.add(Row("protect_live", f"{title}: {name}", "guest", unit, column(results, name), targets, command))
