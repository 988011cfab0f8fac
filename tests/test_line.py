"""A line between two sites over a slow, lossy network that breaks."""

import contextlib
import json
import os
import subprocess

import pytest
from support.cli import PROGRAM
from support.line import FAR_ADDRESS, Line
from support.nbdserver import wait_until

SPEED = PROGRAM.parent / "examples" / "line_speed"
ADDRESS = f"{FAR_ADDRESS}:7411"
# Time after which a silent peer counts as dead; the product takes 20.
SILENCE_S = 6
ENVIRONMENT = os.environ | {"LINE_SILENCE_S": str(SILENCE_S)}


@pytest.fixture
def line(tmp_path):
    with contextlib.closing(Line(tmp_path)) as line:
        yield line


@pytest.fixture
def listening(line):
    command = line.far.command(SPEED, "listen", ADDRESS)
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout
        process.kill()


def send(line, code, seconds):
    command = line.near.command(SPEED, "send", ADDRESS, code.strip(), seconds)
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def test_a_cut_line_fails_at_both_sides_and_the_next_one_fills_it(line, listening):
    code = listening.readline()
    with send(line, code, 100) as sender:
        wait_until(lambda: line.counters()[0].bytes > 2_000_000, "bulk on the line")
        line.cut()
        # This long after the last packet and the next message of each side.
        result, _ = sender.communicate(timeout=60)
    failed = json.loads(result)
    assert f"silent for {SILENCE_S} s" in failed["failed"]
    assert failed["seconds"] < 40
    assert f"silent for {SILENCE_S} s" in listening.readline()

    line.restore()
    before = line.counters()[0]
    with send(line, listening.readline(), 4) as sender:
        result, _ = sender.communicate(timeout=60)
    measured = json.loads(result)
    assert measured["failed"] == ""
    # Of 45; bench/measure/line.py measures how full the line really is.
    assert measured["mbit"] > 15, measured
    # Blocks are fetched while bulk has queued for more than a second.
    assert measured["fetch_ms_p50"] < 1000, measured
    on_line = line.counters()[0].bytes - before.bytes
    assert 0.5 * on_line < measured["sent_bytes"] < 1.1 * on_line + 4_000_000
