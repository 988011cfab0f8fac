"""The setting of all measurements: sizes, folders, disks, the repository."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Mapping

from . import images
from .coldrise import Coldrise
from .commands import settle
from .figures import COLDRISE, Contestant, Failure, Row, Sample, interleave
from .images import GIB, MIB, Disk


@dataclass(frozen=True)
class Sizes:
    """The extent of the measurements. Times in seconds, sizes in bytes."""

    rounds: int
    few_rounds: int
    seconds: int
    disk_bytes: int
    window_bytes: int
    many_chunks_bytes: int
    captured_bytes: int
    sessions_disk_bytes: int
    incremental_disk_bytes: int
    memory_cache: str
    memory_cache_bytes: int

    @staticmethod
    def full(rounds: int | None) -> "Sizes":
        return Sizes(
            rounds=rounds or 5,
            few_rounds=min(rounds or 3, 3),
            seconds=6,
            disk_bytes=GIB,
            window_bytes=384 * MIB,
            many_chunks_bytes=4 * GIB,
            captured_bytes=4 * GIB,
            sessions_disk_bytes=128 * MIB,
            incremental_disk_bytes=8 * GIB,
            memory_cache="256M",
            memory_cache_bytes=256 * MIB,
        )

    @staticmethod
    def quick(rounds: int | None) -> "Sizes":
        return Sizes(
            rounds=rounds or 2,
            few_rounds=min(rounds or 1, 2),
            seconds=1,
            disk_bytes=64 * MIB,
            window_bytes=64 * MIB,
            many_chunks_bytes=64 * MIB,
            captured_bytes=64 * MIB,
            sessions_disk_bytes=8 * MIB,
            incremental_disk_bytes=256 * MIB,
            memory_cache="32M",
            memory_cache_bytes=32 * MIB,
        )


@dataclass
class Setting:
    project: Path
    # Kept between runs: generated images, the virtual environment of Benji.
    store: Path
    # For this run only; removed at its end.
    work: Path
    # Sockets: their paths must stay below 108 bytes.
    sockets: Path
    sizes: Sizes
    is_quick: bool
    program: Path | None
    guest_source: Path | None
    # Numbers of points of `growth`, ascending.
    points: list[int]
    chunk_size: str | None
    compression: str
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    _disks: list[Disk] | None = None
    _coldrise: Coldrise | None = None
    _guest: Disk | None = None
    _stored: set[str] = field(default_factory=set)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def socket(self, name: str) -> Path:
        return self.sockets / f"{name}.sock"

    def folder(self, name: str) -> Path:
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def guest(self) -> Disk:
        """The real guest: the named image, or the project's own, built on demand."""
        if self._guest is None:
            source = self.guest_source or images.build_guest(self.project)
            self._guest = images.guest(self.store / "images", source, self.sizes.window_bytes)
            self.say(f"  disk {self._guest.text()}")
        return self._guest

    def disks(self) -> list[Disk]:
        """The disks of every data-path measurement. A quick run includes the guest only if
        its image was named."""
        if self._disks is None:
            disks = [images.half_random(self.store / "images", self.sizes.disk_bytes)]
            self.say(f"  disk {disks[0].text()}")
            if self.guest_source is not None or not self.is_quick:
                try:
                    disks.append(self.guest())
                except Failure as error:
                    self.failures.append(f"the guest's disk: {error}")
                    self.say(f"  the guest's disk FAILED: {error}")
            self._disks = disks
        return self._disks

    def new_coldrise(self, folder: Path) -> Coldrise:
        if self.program is None:
            raise Failure("no coldrise program")
        return Coldrise(self.program, folder)

    def coldrise(self, disk: Disk) -> Coldrise:
        """The shared repository: encrypted, with every disk as MACHINE/latest/vda,
        including this one."""
        if self._coldrise is None:
            coldrise = self.new_coldrise(self.folder("shared") / "repository")
            coldrise.init(chunk_size=self.chunk_size, compression=self.compression)
            self._coldrise = coldrise
        missing = [each for each in [*self.disks(), disk] if each.name not in self._stored]
        for each in missing:
            if each.name not in self._stored:
                self._coldrise.call("backup", each.name, f"vda=raw:{each.path}")
                self._stored.add(each.name)
        if missing:
            settle(self.work)
            self._coldrise.preread()
        return self._coldrise

    def race(
        self, what: str, contestants: Mapping[str, Contestant], rounds: int
    ) -> dict[str, list[Sample | None]]:
        """Runs `interleave` and reports progress and failures. Without a program
        Coldrise's column stays empty."""
        running = dict(contestants)
        if self.program is None and running.pop(COLDRISE, None) is not None:
            self.left_out[COLDRISE] = "no program in the build folder; only peers were measured"

        def on_sample(name: str, turn: int, sample: Sample) -> None:
            figures = ", ".join(f"{title} {value:,.4g}" for title, value in sample.items())
            self.say(f"  {what} · {name} · round {turn + 1}: {figures}")

        def on_failure(name: str, error: Exception) -> None:
            self.failures.append(f"{what}: {name}: {error}")
            self.say(f"  {what} · {name} FAILED: {error}")

        return interleave(running, rounds, on_sample, on_failure)

    def add(self, row: Row) -> None:
        self.rows.append(row)


Measure = Callable[[Setting], None]
