"""coldrise prune: the rules keep the right points, and nothing else is removed."""

import contextlib
import datetime
import fcntl
import json
import subprocess

import pytest

from support import retention
from support.cli import Coldrise
from support.image import Image
from support.prepared import become

MIB = 1 << 20
FAILED, USAGE, BUSY = 1, 2, 11
WEEK = [f"202611{day:02}T100000Z" for day in range(1, 8)]

# Week 53 and the ends of years; a leap day; hours of one day; and a clock that was years ahead.
HISTORIES = {
    "weeks": ["20201227T235959Z", "20201228T000000Z", "20201231T235959Z", "20210103T120000Z", "20210104T000000Z"],
    "months": ["20230228T100000Z", "20240229T100000Z", "20240301T100000Z", "20240331T100000Z", "20240531T100000Z"],
    "hours": ["20260101T000000Z", "20261104T220000Z", "20261104T225959Z", "20261104T230000Z", "20261106T100000Z"],
    "future": ["20251101T100000Z", "20251102T100000Z", "20990101T000000Z"],
}
RULES = [{"last": 2}, {"hourly": 2}, {"daily": 3}, {"weekly": 2}, {"monthly": 2}, {"yearly": 2}, {"within": "3m"},
         {"within": "36h", "weekly": 3, "yearly": 1}]  # fmt: skip


def back_up(coldrise, path, machine, times):
    for time in times:
        coldrise.json("backup", machine, f"vda=raw:{path}", "--time", time)


def options(rules):
    return [word for rule, bound in rules.items() for word in (f"--keep-{rule}", bound)]


def decisions(pruned):
    return {machine["machine"]: {point["point"] for point in machine["points"] if point["is_kept"]}
            for machine in pruned["machines"]}  # fmt: skip


def test_retention_matches_a_model(coldrise, tmp_path):
    """Random histories are compared with a model in server/store/src/retention/tests.rs."""
    path = Image(64 << 10).save(tmp_path / "vda.raw")
    points = {machine: list(times) for machine, times in HISTORIES.items()}
    for machine, times in HISTORIES.items():
        back_up(coldrise, path, machine, times)
    # Points of one second, too.
    session = coldrise.json("publish", f"hours/{points['hours'][2]}")["session"]
    points["hours"] += [coldrise.json("seal", session)["address"].split("/")[1] for _ in range(2)]
    coldrise.json("unpublish", session, "--discard")
    for rules in RULES:
        now = datetime.datetime.now(retention.UTC)
        pruned = coldrise.json("prune", "--dry-run", *options(rules))
        expected = {machine: retention.kept(names, rules, now) for machine, names in points.items()}
        assert decisions(pruned) == expected, rules
    # Now without --dry-run; the second prune removes nothing.
    assert coldrise.json("prune", *options(rules))["forgotten"] == pruned["forgotten"] > 4
    listed = coldrise.json("list")["machines"]
    assert {m["machine"]: {point["point"] for point in m["points"]} for m in listed} == expected
    again = coldrise.json("prune", *options(rules))
    assert again["forgotten"] == 0 and decisions(again) == expected


@pytest.fixture(scope="module")
def filled(template, tmp_path_factory):
    """Seven days of web01, each with something of its own, and one point of db01."""
    folder = tmp_path_factory.mktemp("week")
    program = Coldrise.copied(template, folder / "repository")
    disk = Image(16 * MIB)
    for number, time in enumerate(WEEK):
        disk.fill(2 * number * MIB, 2 * MIB, time)
        back_up(program, disk.save(folder / "vda.raw"), "web01", [time])
    back_up(program, folder / "vda.raw", "db01", WEEK[:1])
    return program.repository


@pytest.fixture
def week(coldrise, filled):
    become(coldrise, filled)
    return WEEK


def reasons(pruned, machine="web01"):
    (found,) = [entry for entry in pruned["machines"] if entry["machine"] == machine]
    return {point["point"]: point["reasons"] for point in found["points"]}


def test_kept_points_have_a_reason(coldrise, week):
    coldrise.json("protect", f"web01/{week[1]}")
    coldrise.publish(f"web01/{week[2]}", "trial")
    pruned = coldrise.json("prune", "web01", "--keep-daily", "2", "--keep-weekly", "2",
                           "--keep-within", "25h")  # fmt: skip
    assert (pruned["kept"], pruned["forgotten"]) == (5, 2)
    assert reasons(pruned) == {
        # November 1 is a Sunday.
        week[0]: ["weekly 2026-W44"],
        week[1]: ["protected"],
        week[2]: ["published as trial"],
        week[3]: [],
        week[4]: [],
        week[5]: ["within 25h", "daily 2026-11-06"],
        week[6]: ["within 25h", "daily 2026-11-07", "weekly 2026-W45", "newest backup"],
    }
    # Only the machine that was named.
    assert [m["machine"] for m in pruned["machines"]] == ["web01"]
    coldrise.json("unpublish", "trial", "--discard")
    coldrise.json("unprotect", f"web01/{week[1]}")
    assert reasons(coldrise.json("prune", "--keep-last", "1")) == {
        week[0]: [], week[1]: [], week[2]: [], week[5]: [], week[6]: ["last 1", "newest backup"],
    }  # fmt: skip


def test_prune_lists_forgotten_points_and_returned_space(coldrise, week):
    text = coldrise.run("prune", "-n", "--keep-last", "3").stdout
    lines = text.splitlines()
    assert lines[0].split() == ["ADDRESS", "AGE", "BECAUSE"]
    assert f"web01/{week[0]}" in text and "forget" in text
    assert "web01: 3 kept, 4 forgotten" in lines and "db01: 1 kept, 0 forgotten" in lines
    assert lines[-1].startswith("would forget 4 restore points; coldrise gc would then return about")
    assert len(coldrise.json("list", "web01")["machines"][0]["points"]) == 7
    done = coldrise.run("prune", "--keep-last", "3").stdout.splitlines()
    assert done[-1].startswith("forgot 4 restore points; coldrise gc returns about")
    assert coldrise.run("-q", "prune", "--keep-last", "1").stdout == ""
    coldrise.json("forget", "--all", "web01", "db01")
    assert "coldrise backup" in coldrise.run("prune", "--keep-last", "1").stdout


def test_the_space_is_returned_immediately_on_request(coldrise, week):
    def occupied():
        return coldrise.json("stats")["occupied_bytes"]

    before = occupied()
    planned = coldrise.json("prune", "-n", "--keep-last", "1")["reclaimable_bytes"]
    coldrise.json("protect", f"web01/{week[0]}")
    pruned = coldrise.json("prune", "--keep-last", "1", "--gc")
    assert pruned["forgotten"] == 5 and "reclaimable_bytes" not in pruned
    # Days 2 to 7 wrote over nothing: all is in the newest point, and little returns.
    assert planned < MIB and before - occupied() < MIB
    assert pruned["gc"]["chunks_deleted"] == 0
    coldrise.json("forget", "--all", "db01")
    coldrise.json("forget", f"web01/{week[6]}")
    text = coldrise.run("prune", "--keep-last", "1", "--gc").stdout
    assert "forgot 0 restore points; deleted" in text.splitlines()[-1]
    # Only the first day's 2 MiB are left of 14.
    assert occupied() < 4 * MIB < 12 * MIB < before
    assert coldrise.json("verify")["is_clean"]


def test_returned_space_is_reported_for_the_requested_mode(coldrise, tmp_path):
    """A file that is mostly in use returns no space, unless all of it is requested."""
    disk = Image(24 * MIB)
    for time, name in (("20261101T100000Z", "first"), ("20261102T100000Z", "second")):
        disk.fill(0, 24 * MIB if name == "first" else 4 * MIB, name)
        back_up(coldrise, disk.save(tmp_path / "vda.raw"), "web01", [time])
    asked = ["prune", "--keep-last", "1", "--gc"]
    some = coldrise.json(*asked, "--dry-run")
    everything = coldrise.json(*asked, "--dry-run", "--max-unused", "0")["reclaimable_bytes"]
    assert some["reclaimable_bytes"] < MIB < 3 * MIB < everything
    assert "gc" not in some and len(coldrise.json("list")["machines"][0]["points"]) == 2
    returned = coldrise.json(*asked, "--max-unused", "0")["gc"]["bytes_returned"]
    assert 0.9 * everything < returned < 1.1 * everything


def test_large_counts_are_accepted_and_invalid_counts_are_refused(coldrise, week):
    kept = coldrise.json("prune", "--keep-last", "9" * 30, "--dry-run")
    assert kept["forgotten"] == 0
    for number in ("0", "-1", "+1", "", "1.5", "many"):
        done = coldrise.run("prune", f"--keep-last={number}", "--dry-run")
        assert done.returncode == 2 and "at least 1" in done.stderr, number


def test_without_a_rule_nothing_is_pruned(coldrise, week):
    for arguments in (
        ["prune"],
        ["prune", "--dry-run"],
        ["prune", "--keep-last", "0"],
        ["prune", "--keep-last", "-1"],
        ["prune", "--keep-daily", "x"],
        ["prune", "--keep-within", "0d"],
        ["prune", "--keep-within", "7"],
    ):
        assert coldrise.run(*arguments).returncode == USAGE, arguments
    assert "forget MACHINE --all" in coldrise.run("prune", "--keep-last", "0").stderr
    assert "db01" in coldrise.run("prune", "web02", "--keep-last", "1").stderr
    assert len(coldrise.json("list", "web01")["machines"][0]["points"]) == 7


def test_a_killed_prune_is_atomic(coldrise, tmp_path):
    path = Image(64 << 10).save(tmp_path / "vda.raw")
    times = [f"202611{day:02}T100000Z" for day in range(1, 4)]
    for number in range(8):
        machine = f"m{number}"
        back_up(coldrise, path, machine, times)
        process = coldrise.start("prune", machine, "--keep-last", "1", stdout=subprocess.DEVNULL)
        # From no time at all to longer than a prune takes.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02 * number)
        process.kill()
        process.wait()
        (listed,) = coldrise.json("list", machine)["machines"]
        left = [point["point"] for point in listed["points"]]
        assert left in (times, times[-1:]), number
        again = coldrise.json("prune", machine, "--keep-last", "1")
        assert again["forgotten"] == len(left) - 1, number
    assert coldrise.json("verify")["is_clean"]
    assert len(coldrise.json("list")["machines"]) == 8


def test_a_dry_run_works_during_a_backup_and_a_prune_waits(coldrise, week, nbdkit):
    """A dry run does not need the writer lock; a prune is refused while another process holds it."""
    coldrise.publish("web01/latest", "trial")
    with nbdkit() as server, server.connect("live/trial/vda") as handle:
        handle.pwrite(b"x" * 4096, 0)
        sealed = coldrise.json("seal", "trial")["address"]
        # It waits in its session's document, and still counts.
        planned = reasons(coldrise.json("prune", "-n", "--keep-last", "1"))
        assert planned[sealed.split("/")[1]] == ["last 1"]
        assert planned[week[6]] == ["published as trial", "newest backup"]
        lock = open(coldrise.repository / "writer.lock", "r+b")
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = coldrise.run("--json", "prune", "--keep-last", "1")
        assert done.returncode == BUSY, done.stdout
        assert json.loads(done.stdout.splitlines()[-1])["error"]["kind"] == "busy"
        assert coldrise.json("prune", "-n", "--keep-last", "1")["forgotten"] == 6
        lock.close()
        assert coldrise.json("prune", "--keep-last", "1")["forgotten"] == 6
        handle.pwrite(b"y" * 4096, 0)
    assert coldrise.json("verify")["is_clean"]
