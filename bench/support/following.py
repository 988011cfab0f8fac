"""A guest under QEMU, and a running `protect-live` that follows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence

from bench.support.coldrise import Coldrise
from bench.support.commands import run
from bench.support.figures import Failure
from bench.support.setting import Setting
from tests.support.guest import Guest, GuestError

MACHINE = "followed"
PATIENCE_S = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def followed_guest(setting: Setting, folder: Path, monitor: Path) -> Iterator[Guest]:
    """A guest with a user, whose monitor is a socket."""
    source, image = setting.guest(), folder / "guest.qcow2"
    run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", source.path, image])
    run(["qemu-img", "resize", "-q", image, "+1G"])
    disk = ["-blockdev", f"driver=qcow2,node-name=vda,discard=unmap,file.driver=file,file.filename={image}",
            "-device", "virtio-blk-pci,id=dvda,drive=vda,discard=on",
            "-qmp", f"unix:{monitor},server=on,wait=off"]
    try:
        with Guest([disk], log=folder / "console.log") as guest:
            guest.wait_for_login(timeout=PATIENCE_S)
            guest.login()
            yield guest
            guest.poweroff()
    except GuestError as error:
        raise Failure(f"the guest: {error}") from error


def megahertz() -> float:
    """The mean rate of the processors."""
    found = re.findall(r"^cpu MHz\s*: ([\d.]+)", Path("/proc/cpuinfo").read_text(), re.M)
    return sum(map(float, found)) / len(found)


def processor_s(process: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def drive_bytes(process: int) -> tuple[int, int]:
    """Bytes that a process has read from drives and written to them."""
    text = Path(f"/proc/{process}/io").read_text()
    found = {name: int(value) for name, value in re.findall(r"(\w+): (\d+)", text)}
    return found["read_bytes"], found["write_bytes"]


class Following:
    """A running protect-live."""

    def __init__(self, coldrise: Coldrise, words: Sequence[object], network: Sequence[str] = ()) -> None:
        command = [*network, *map(str, coldrise.command("protect-live", MACHINE, *words))]
        self.process = subprocess.Popen(command, env={**os.environ, **coldrise.env}, stdout=subprocess.PIPE, text=True)

    def event(self, *names: str) -> dict:
        """The next event with one of these names."""
        for line in self.process.stdout:
            event = json.loads(line)
            if event.get("event") in names:
                return event
        raise Failure("protect-live has ended")

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate()
