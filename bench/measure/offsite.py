"""Copies to another site over an emulated line, beside the disk as it is over one CUBIC connection: what a
replication without a store of its own sends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from bench.measure.line import one_connection
from bench.support.coldrise import Coldrise
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.images import MIB, removed
from bench.support.setting import Setting
from tests.support.line import FAR_ADDRESS, Line

SUMMARY = "copies to another site over 45 Mbit/s with losses: cold, warm, and 1 % changed"

_PEER = "the disk as it is, one CUBIC connection"
_PORT = 8481
_MBIT = 45.0
# Round trip in ms, share of lost packets.
_LINES = [(50.0, 0.001), (50.0, 0.01), (200.0, 0.001)]
_COLD, _CHANGED = "cold", "1 % changed by 16 KiB writes"
_WARM, _WHOLE = "warm: the same data as another machine", "warm: the whole disk, brought on a drive as another machine"
_SPENT = "sent per changed byte, 1 % changed by 16 KiB writes"
# Of the guest's disk, cold: enough to fill the line for a quarter of a minute.
_COPIED_BYTES = 256 * MIB
_WRITE_BYTES = 16 << 10


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    copied_bytes = min(_COPIED_BYTES, setting.sizes.disk_bytes)
    guest = setting.guest()
    seconds = setting.sizes.seconds * 3
    for round_trip_ms, loss in _LINES:
        subject = f"{_MBIT:g} Mbit/s, {round_trip_ms:g} ms, {loss:.1%} lost"

        def sample(measured, round_trip_ms=round_trip_ms, loss=loss) -> dict[str, float]:
            folder = setting.folder("offsite")
            try:
                with contextlib.closing(Line(folder, mbit=_MBIT, round_trip_ms=round_trip_ms, loss=loss)) as line:
                    return measured(line, folder)
            finally:
                removed(folder)

        def ours(line: Line, folder: Path) -> dict[str, float]:
            return _copies(setting, line, folder, guest.path, guest.window_offset_bytes, copied_bytes)

        def peer(line: Line, _folder: Path) -> dict[str, float]:
            rate = one_connection(line, seconds)
            return {kind: rate for kind in (_COLD, _WARM, _WHOLE, _CHANGED)}

        results = setting.race(
            "offsite", {COLDRISE: lambda: sample(ours), _PEER: lambda: sample(peer)}, setting.sizes.few_rounds)
        part, whole = f"{copied_bytes // MIB} MiB of the guest's disk", f"{guest.path.stat().st_size // MIB} MiB"
        for kind, asked in ((_COLD, 9.41), (_WARM, None), (_WHOLE, 200.0), (_CHANGED, None)):
            note = f"{whole if kind == _WHOLE else part}; bytes of the disk by the time of the command"
            targets = [] if asked is None else [Target(_PEER, at_least=asked)]
            setting.add(Row("offsite", f"copy over a line, {kind}", subject, "Mbit/s of the disk", column(results, kind), targets,
                            "", note))
        spent = {COLDRISE: column(results, _SPENT)[COLDRISE]}
        setting.add(Row("offsite", _SPENT, subject, "bytes", spent, [Target(at_most=1.0)], "", "random content"))


def _copies(setting: Setting, line: Line, folder: Path, source: Path, offset: int, count: int) -> dict[str, float]:
    image = folder / "disk.raw"
    with open(source, "rb") as taken, open(image, "wb") as made:
        taken.seek(offset)
        left = count
        while left:
            part = taken.read(min(left, 8 * MIB))
            made.write(part)
            left -= len(part)
    near, far = Coldrise(setting.program, folder / "near"), Coldrise(setting.program, folder / "far")
    near.init()
    far.init()
    near.call("backup", "web01", f"vda=raw:{image}")
    figures = {}
    with _server(line, far):
        _pair(line, near, far)

        def copied(machine: str) -> tuple[float, dict]:
            start = time.monotonic()
            done = _in(line.near, near, "copy", machine, "--to", "far")
            return time.monotonic() - start, json.loads(done.splitlines()[-1])

        elapsed, _ = copied("web01")
        figures[_COLD] = count * 8 / elapsed / 1e6
        near.call("backup", "web02", f"vda=raw:{image}")
        elapsed, _ = copied("web02")
        figures[_WARM] = count * 8 / elapsed / 1e6
        near.call("backup", "web03", f"vda=raw:{source}")
        near.call("copy", "web03", "--to", far.repository, "--to-passphrase-file", far.env["COLDRISE_PASSPHRASE_FILE"])
        near.call("backup", "web04", f"vda=raw:{source}")
        elapsed, _ = copied("web04")
        figures[_WHOLE] = source.stat().st_size * 8 / elapsed / 1e6
        writes = count // 100 // _WRITE_BYTES
        with open(image, "r+b") as made:
            for number in range(writes):
                # Spread over the disk, each in a place of its own.
                made.seek(number * 100 * _WRITE_BYTES)
                made.write(os.urandom(_WRITE_BYTES))
        near.call("backup", "web01", f"vda=raw:{image}")
        before = line.counters()[0].bytes
        elapsed, _ = copied("web01")
        figures[_SPENT] = (line.counters()[0].bytes - before) / (writes * _WRITE_BYTES)
        figures[_CHANGED] = count * 8 / elapsed / 1e6
    shutil.rmtree(folder / "near")
    return figures


def _in(network, coldrise: Coldrise, *words: object) -> str:
    done = subprocess.run(network.command(*coldrise.command(*words)), env={**os.environ, **coldrise.env},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise Failure(f"coldrise {words[0]}: {done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def _server(line: Line, far: Coldrise):
    command = line.far.command(*far.command("serve", "replica", "--listen", f"{FAR_ADDRESS}:{_PORT}"))
    with subprocess.Popen(command, env={**os.environ, **far.env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          text=True) as process:
        try:
            process.stdout.readline()
            yield
        finally:
            process.terminate()


def _pair(line: Line, near: Coldrise, far: Coldrise) -> None:
    code = far.call("link", "invite", "near")["code"]
    until = time.monotonic() + 10
    while True:
        try:
            _in(line.near, near, "link", "add", "far", f"{FAR_ADDRESS}:{_PORT}", "--code", code)
            return
        except Failure:
            # The server looks for new codes every second.
            if time.monotonic() > until:
                raise
            time.sleep(0.3)
