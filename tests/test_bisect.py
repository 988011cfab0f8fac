"""coldrise bisect: the last good point, found by booting as few as possible."""

import contextlib
import datetime
import json
import pathlib
import random
import signal
import subprocess

import pytest

from support.foreground import children, is_running
from support.nbdserver import wait_until
from test_check_boot import HALT, LIMITS, LOGIN, boot_record

MIB = 1 << 20
GOOD, BAD, SILENT = boot_record(LOGIN), b"", boot_record(HALT)
SMALL = "--memory", "64M"


@pytest.fixture
def back_up(coldrise, tmp_path):
    """Backs up one machine of a boot record per point, an hour apart; returns the addresses."""
    def back_up(records):
        path = tmp_path / "disk.raw"
        now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=10)
        addresses = []
        for i, record in enumerate(records):
            path.write_bytes(record.ljust(4096, b"\0") + i.to_bytes(4, "big").ljust(MIB, b"\0"))
            time = now + datetime.timedelta(hours=i)
            backed_up = coldrise.json("backup", "web01", "--time", time.strftime("%Y%m%dT%H%M%SZ"),
                                      f"vda=raw:{path}")
            addresses.append(backed_up["address"])
        return addresses
    return back_up


def bisect(coldrise, *options):
    """The exit code, the final object and the messages. No session is left."""
    done = coldrise.run("--json", "bisect", "web01", *SMALL, *options, timeout_s=360)
    assert coldrise.json("sessions") == {"sessions": []}
    return done.returncode, json.loads(done.stdout.strip().splitlines()[-1]), done.stderr


def test_twenty_points_need_five_rounds(coldrise, back_up):
    first_bad = random.Random(16).randrange(1, 20)
    points = back_up([GOOD] * first_bad + [BAD] * (20 - first_bad))
    status, found, messages = bisect(coldrise, "--parallel", "1", "--time-limit", "60s")
    assert status == 0, messages
    assert found["last_good"] == points[first_bad - 1] and found["first_bad"] == points[first_bad]
    assert found["rounds"] <= 5 and found["boots"] == found["rounds"] and not found["unproven"]
    assert messages.count("round ") == found["rounds"]
    # The results are stored with their points, so nothing is booted again.
    verdicts = [point.get("boot") for point in coldrise.json("list")["machines"][0]["points"]]
    assert sum(verdict is not None for verdict in verdicts) == found["boots"]
    assert verdicts[first_bad - 1:first_bad + 1] == ["ok", "failed"]
    status, again, _messages = bisect(coldrise)
    assert (status, again["rounds"], again["last_good"]) == (0, 0, found["last_good"])
    # Two concurrently, between given ends.
    status, found, messages = bisect(coldrise, "--again", "--parallel", "2",
                                     "--good", points[0].split("/")[1])
    assert status == 0 and found["last_good"] == points[first_bad - 1], messages
    assert found["rounds"] <= 3 and found["parallel"] == 2


def test_unproven_points_are_skipped_and_named(coldrise, back_up):
    points = back_up([GOOD, GOOD, SILENT, BAD])
    for limit in LIMITS:
        status, found, messages = bisect(coldrise, "--again", "--time-limit", limit, "--parallel", "2")
        if found["unproven"] == [points[2]]:
            break
    assert status == 0, messages
    assert (found["last_good"], found["first_bad"], found["unproven"]) == (points[1], points[3], [points[2]])
    text = coldrise.run("bisect", "web01", *SMALL, "--time-limit", "1s").stdout
    assert text.startswith(f"last good   {points[1]}\nfirst bad   {points[3]}\nunproven    {points[2]}")


@pytest.mark.parametrize("records, limit, said", [
    ([GOOD, GOOD], "60s", "nothing bad found: the newest good point is {1}"),
    ([BAD, BAD], "60s", "nothing good found: the oldest bad point is {0}"),
    ([SILENT], "1s", "no point is proven to be good or bad"),
], ids=["good", "bad", "silent"])
def test_bisect_without_a_good_and_a_bad_point_is_undecided(coldrise, back_up, records, limit, said):
    points = back_up(records)
    done = coldrise.run("bisect", "web01", *SMALL, "--time-limit", limit)
    assert done.returncode == 14 and said.format(*points) in done.stdout, done.stderr


def test_a_user_command_decides_the_verdict(coldrise, back_up):
    points = back_up([GOOD] * 4)
    status, found, messages = bisect(
        coldrise, "--check", f'test "$COLDRISE_ADDRESS" "<" {points[2]}')
    assert status == 0, messages
    assert (found["last_good"], found["first_bad"]) == (points[1], points[2])


def test_invalid_bisect_ranges_are_refused(coldrise, back_up):
    points = [address.split("/")[1] for address in back_up([GOOD, BAD])]
    ends = coldrise.run("bisect", "web01", "--good", points[1], "--bad", points[0])
    assert ends.returncode == 2 and "not older" in ends.stderr
    missing = coldrise.run("bisect", "web02")
    assert missing.returncode == 1 and "web02" in missing.stderr
    memory = coldrise.run("bisect", "web01", "--memory", "8T")
    assert memory.returncode == 3


def test_ctrl_c_ends_all_machines(coldrise, back_up):
    back_up([SILENT] * 4)
    process = coldrise.start("bisect", "web01", "--memory", "64M", "--parallel", "2",
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def machines():
        found = []
        for child in children(process.pid):
            # Not every child stays.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [child] if b"-nodefaults" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes() else []
        return found

    wait_until(lambda: len(machines()) == 2, "two machines")
    running = children(process.pid)
    process.send_signal(signal.SIGINT)
    _output, messages = process.communicate(timeout=60)
    assert process.returncode == 130, messages
    assert not any(map(is_running, running))
    assert coldrise.json("sessions") == {"sessions": []}
