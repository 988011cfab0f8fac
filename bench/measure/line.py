"""How full a line between two sites is, over an emulated network: beside one TCP connection of CUBIC, which
rsync and ssh use."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

from bench.support.commands import run
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.setting import Setting
from tests.support.line import FAR_ADDRESS, Line

SUMMARY = "a line of 45 Mbit/s with losses: Mbit/s of content"

_PEER = "one CUBIC connection"
_PORT = 7411
_MBIT = 45.0
# Of a packet of 1,500 bytes TCP's content is 1,448.
_POSSIBLE = _MBIT * 1448 / 1500
# Round trip in ms, share of lost packets, share of what is possible that is asked.
_LINES = [(50.0, 0.001, 0.95), (50.0, 0.01, 0.9), (200.0, 0.001, 0.9)]
# Times the shortest run of other measurements: a line of 200 ms takes seconds to fill.
_LONGER = 3

_SINK = """
import socket, sys, time
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    print("ready", flush=True)
    taken, _ = listener.accept()
    begin, count = time.monotonic(), 0
    while data := taken.recv(1 << 18):
        count += len(data)
    print(count * 8 / (time.monotonic() - begin) / 1e6, flush=True)
"""
_SOURCE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as taken:
    until = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < until:
        taken.sendall(bytes(1 << 16))
"""


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    run(["cargo", "build", "--release", "--locked", "-p", "coldrise-line", "--example", "line_speed"])
    speed = Path(setting.program).parent / "examples" / "line_speed"
    folder = setting.folder("line")
    seconds = setting.sizes.seconds * _LONGER
    for round_trip_ms, loss, asked in _LINES:
        subject = f"{_MBIT:g} Mbit/s, {round_trip_ms:g} ms, {loss:.1%} lost"

        def sample(measured, round_trip_ms=round_trip_ms, loss=loss) -> dict[str, float]:
            with contextlib.closing(Line(folder, mbit=_MBIT, round_trip_ms=round_trip_ms, loss=loss)) as line:
                return {subject: measured(line, speed, seconds)}

        results = setting.race(
            "line", {COLDRISE: lambda: sample(_coldrise), _PEER: lambda: sample(lambda line, _speed, seconds: one_connection(line, seconds))}, setting.sizes.few_rounds)
        setting.add(
            Row("line", "content over the line", subject, "Mbit/s", column(results, subject),
                [Target(at_least=round(asked * _POSSIBLE, 1))], "", f"TCP can carry {_POSSIBLE:.1f} Mbit/s")
        )


def _coldrise(line: Line, speed: Path, seconds: float) -> float:
    address = f"{FAR_ADDRESS}:{_PORT}"
    with _started(line.far.command(speed, "listen", address)) as far:
        code = far.stdout.readline().strip()
        sent = line.near.run(speed, "send", address, code, seconds, timeout_s=seconds + 60)
    if sent.returncode != 0:
        raise Failure(f"line_speed send failed: {sent.stderr.decode()}")
    measured = json.loads(sent.stdout)
    if measured["failed"]:
        raise Failure(measured["failed"])
    return measured["mbit"]


def one_connection(line: Line, seconds: float) -> float:
    """Mbit/s over one TCP connection."""
    python = "/usr/bin/python3"
    with _started(line.far.command(python, "-c", _SINK, FAR_ADDRESS, _PORT)) as far:
        far.stdout.readline()
        line.near.run(python, "-c", _SOURCE, FAR_ADDRESS, _PORT, seconds, timeout_s=seconds + 60)
        return float(far.stdout.readline())


@contextlib.contextmanager
def _started(command):
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
