"""coldrise copies: where copies are, how far behind, and why."""

import json
import os
import subprocess
import time

import pytest

from support.cli import PROGRAM, Coldrise
from support.far_site import finish
from support.nbdserver import DEADLINE_S, wait_until
from support.wallclock import BothClocks

MIB = 1 << 20


def back_up(coldrise, folder, machine, day, *contents):
    paths = {f"vd{letter}": folder / f"{machine}-{letter}.raw" for letter in "ab"[:len(contents)]}
    for path, content in zip(paths.values(), contents):
        path.write_bytes(content)
    coldrise.json("backup", machine, *(f"{disk}=raw:{path}" for disk, path in paths.items()), "--time", f"2026110{day}T100000Z")


def only(coldrise, *arguments):
    (target,) = coldrise.json("copies", *arguments)["targets"]
    return target


def machine_of(target, name="web01"):
    (found,) = [machine for machine in target["machines"] if machine["machine"] == name]
    return found


def random_mib(count):
    return os.urandom(count * MIB)


@pytest.fixture
def far(site, coldrise):
    """A site that is dialled through a gate."""
    made = site()
    made.put_gate()
    made.pair(coldrise)
    yield made
    # A copy that is held would take its time to end.
    for process in coldrise.started:
        process.kill()


def recorded(coldrise, far, folder):
    """A copy that is held in its second disk, and its target when the record, written every 10 s, says how long it takes."""
    clock = BothClocks(folder)
    coldrise.more = clock.environment()
    # The first disk has arrived: only then the next one begins. Parts of a disk arrive in any order.
    copy = far.held(coldrise, 6 * MIB, "--to", "far")
    clock.skip(10)
    return copy, wait_until(lambda: (target := only(coldrise))["remaining_ms"] and target, "the record"), clock


def test_lag_is_counted_against_the_current_points(coldrise, far, tmp_path):
    first = random_mib(4)
    back_up(coldrise, tmp_path, "web01", 1, first)
    never = only(coldrise)
    # A link alone proves nothing.
    assert (never["target"], never["state"], never["last_cut_ms"], never["points_behind"]) == ("far", "never", None, None)
    assert "no copy" in coldrise.run("link", "list").stdout
    copied = coldrise.json("copy", "--to", "far")
    current = only(coldrise)
    web01 = machine_of(current)
    assert (current["state"], current["points_behind"], current["bytes_behind"]) == ("current", 0, 0)
    assert web01["last_cut"]["point"] == "20261101T100000Z" and web01["points_there"] == 1
    assert web01["succeeded_at_ms"] and not web01["failure"] and not web01["running"]
    assert (web01["total"]["points"], web01["total"]["read_bytes"]) == (1, 4 * MIB)
    assert 4 * MIB < web01["total"]["line"]["sent_bytes"] <= copied["line"]["sent_bytes"]
    line = web01["total"]["line"]
    assert line["content_bytes"] == 4 * MIB <= line["packed_bytes"] and line["unchanged_bytes"] == line["known_bytes"] == 0
    (link,) = coldrise.json("link", "list")["links"]
    assert link["last_cut_ms"] == current["last_cut_ms"] == web01["last_cut"]["created_at_ms"]

    # No copy runs, and it falls behind: by only the two changed MiB.
    back_up(coldrise, tmp_path, "web01", 2, random_mib(1) + first[MIB:])
    back_up(coldrise, tmp_path, "web01", 3, random_mib(1) + first[MIB:])
    back_up(coldrise, tmp_path, "web02", 3, first)
    behind = only(coldrise)
    web01, web02 = machine_of(behind), machine_of(behind, "web02")
    assert (web01["state"], web01["points_behind"], web01["bytes_behind"], web01["is_exact"]) == ("behind", 2, 2 * MIB, True)
    # It was never there, and copies are of all machines.
    assert (web02["state"], web02["points_behind"], web02["bytes_behind"]) == ("never", 1, 4 * MIB)
    assert (behind["state"], behind["points_behind"], behind["bytes_behind"]) == ("behind", 3, 6 * MIB)
    assert web01["behind_since_ms"] > web01["last_cut"]["created_at_ms"]
    shown = coldrise.run("copies").stdout
    assert "3 points, 6.0 MiB" in shown and "never" in shown

    # A point in quarantine is not wanted there.
    coldrise.json("quarantine", "web01/20261103T100000Z")
    assert machine_of(only(coldrise))["points_behind"] == 1
    coldrise.json("release", "web01/20261103T100000Z")
    coldrise.json("copy", "web01", "--to", "far")
    after = only(coldrise)
    assert [m["state"] for m in after["machines"]] == ["current", "never"]
    assert machine_of(after)["last"]["points"] == 2 and machine_of(after)["total"]["points"] == 3


def test_a_point_from_the_future_does_not_block_later_copies(coldrise, far, tmp_path):
    disk = tmp_path / "web01.raw"
    disk.write_bytes(random_mib(1))
    coldrise.backup("web01", vda=disk)
    # A clock that was wrong for one backup, and for its copy.
    coldrise.json("backup", "web01", f"vda=raw:{disk}", "--time", "20991101T100000Z")
    assert coldrise.json("copy", "--to", "far")["points"] == 2
    coldrise.backup("web01", vda=disk)
    behind = only(coldrise)
    assert (behind["state"], behind["points_behind"], behind["last_cut_ms"]) == ("behind", 1, None)
    assert coldrise.json("copy", "--to", "far")["points"] == 1
    current = only(coldrise)
    assert (current["state"], current["points_behind"]) == ("current", 0)
    assert abs(current["last_cut_ms"] / 1000 - time.time()) < 3600
    assert coldrise.json("copy", "--to", "far")["points"] == 0


def test_selected_older_points_count_as_behind_until_copied(coldrise, tmp_path):
    there = local(coldrise, tmp_path)
    for day in (1, 2, 3):
        back_up(coldrise, tmp_path, "web01", day, bytes(MIB))
    to = ["--to", there.repository]
    coldrise.json("copy", *to, "--last", "1")
    # Skipped points are not wanted.
    assert only(coldrise)["state"] == "current"
    coldrise.json("copy", *to, "--all")
    assert machine_of(only(coldrise))["points_there"] == 3


def local(coldrise, folder):
    there = Coldrise(folder / "second", coldrise.passphrase_file)
    there.init(*([] if coldrise.passphrase_file else ["--no-encryption"]))
    return there


def test_failures_are_shown_until_a_copy_succeeds(coldrise, far, tmp_path):
    back_up(coldrise, tmp_path, "web01", 1, random_mib(1))
    coldrise.json("copy", "--to", "far")
    far.stop()
    assert coldrise.run("copy", "--to", "far").returncode != 0
    failing = only(coldrise)
    # The existing copies are still known.
    assert failing["state"] == "failing" and far.dialled in failing["failure"]["message"]
    assert machine_of(failing)["state"] == "current" and failing["last_cut_ms"]
    doctor = coldrise.run("doctor")
    assert any("warn" in line and "copies" in line and "far" in line for line in doctor.stdout.splitlines()), doctor.stdout
    # A new machine is missing there, and an unknown name is not a machine.
    back_up(coldrise, tmp_path, "new01", 1, random_mib(1))
    assert coldrise.run("copy", "--to", "far", "new01", "mistyped").returncode != 0
    failing = only(coldrise)
    assert {machine["machine"] for machine in failing["machines"]} == {"web01", "new01"}
    assert machine_of(failing, "new01")["state"] == "never" and failing["points_behind"] == 1
    far.start()
    coldrise.json("copy", "new01", "--to", "far", "--as", "other")
    coldrise.json("forget", "new01/20261101T100000Z")
    coldrise.json("copy", "--to", "far")
    assert only(coldrise)["state"] == "current"
    # Another machine of that name exists there: only that machine fails.
    back_up(coldrise, tmp_path, "web02", 1, random_mib(1))
    back_up(far.program, tmp_path, "web02", 1, random_mib(1))
    assert coldrise.run("copy", "--to", "far").returncode == 3
    failing = only(coldrise)
    assert machine_of(failing, "web02")["state"] == failing["state"] == "failing"
    assert {m["state"] for m in failing["machines"] if m["machine"] != "web02"} == {"current"}
    assert "another point" in machine_of(failing, "web02")["failure"]["message"]
    coldrise.json("copy", "web02", "--to", "far", "--as", "web02-copy")
    names = {m["far_machine"]: m["state"] for m in only(coldrise)["machines"]}
    assert names == {"web01": "current", "web02": "failing", "web02-copy": "current", "other": "current"}


def test_a_running_copy_shows_its_rate_and_a_killed_one_does_not(coldrise, far, tmp_path):
    back_up(coldrise, tmp_path, "web01", 1, random_mib(4), random_mib(20))
    copy, target, clock = recorded(coldrise, far, tmp_path)
    running = machine_of(target)["running"]
    assert (target["state"], running["point"]) == ("copying", "20261101T100000Z")
    assert 0 < running["done_bytes"] < target["bytes_behind"] == 24 * MIB
    assert 0 < target["sent_bytes_per_second"] < 4 * MIB and target["remaining_ms"] > 1000
    assert "left" in coldrise.run("copies", "far").stdout
    copy.kill()
    # Its record ends automatically: it has no writer left.
    assert only(coldrise)["state"] == "copying"
    clock.skip(40)
    killed = only(coldrise)
    assert (killed["state"], machine_of(killed)["running"]) == ("never", None)


def test_holes_are_not_counted_as_remaining(coldrise, far, tmp_path):
    """Else a thin disk seems to take as long as a full one."""
    small, first = random_mib(4), bytearray(random_mib(20) + bytes(200 * MIB) + random_mib(4))
    back_up(coldrise, tmp_path, "web01", 1, small, first)
    copy, target, _ = recorded(coldrise, far, tmp_path)
    assert (target["bytes_behind"], target["is_exact"]) == (28 * MIB, True)
    running = machine_of(target)["running"]
    assert 0 < running["done_bytes"] < 28 * MIB
    # For the whole disk it would be ten times as long.
    left_s = (28 * MIB - running["done_bytes"]) / running["bytes_per_second"]
    assert 0.5 * left_s < target["remaining_ms"] / 1000 < 2 * left_s, target
    far.gate.release()
    output = copy.communicate(timeout=120)[0]
    assert copy.returncode == 0
    events = [event for event in map(json.loads, output.splitlines()) if event.get("event") == "progress"]
    assert {event["total_bytes"] for event in events} == {4 * MIB, 24 * MIB}
    assert events[-1]["done_bytes"] == 24 * MIB
    # New zeroes take no time either, and new content does, wherever it is.
    second = first.copy()
    second[MIB : 5 * MIB] = bytes(4 * MIB)
    second[100 * MIB : 102 * MIB] = random_mib(2)
    back_up(coldrise, tmp_path, "web01", 2, small, second)
    back_up(coldrise, tmp_path, "web01", 3, small, second + bytes(16 * MIB) + random_mib(1))
    assert only(coldrise)["bytes_behind"] == 3 * MIB
    coldrise.json("copy", "--to", "far")
    assert only(coldrise)["state"] == "current"


@pytest.mark.encrypted
def test_records_are_sealed_and_a_damaged_one_is_unknown(coldrise, tmp_path):
    there = local(coldrise, tmp_path)
    back_up(coldrise, tmp_path, "web01", 1, bytes(MIB))
    coldrise.json("copy", "--to", there.repository)
    (record,) = (coldrise.repository / "copies").iterdir()
    stored = record.read_bytes()
    assert record.stat().st_mode & 0o077 == 0
    assert b"web01" not in stored and b"second" not in stored and "second" not in record.name
    record.write_bytes(stored[:-1])
    unknown = only(coldrise)
    assert unknown["state"] == "unknown" and unknown["points_behind"] is None
    # It blocks nothing.
    coldrise.json("copy", "--to", there.repository)
    assert only(coldrise)["state"] == "current"
    coldrise.json("copies", there.repository, "--forget")
    assert coldrise.json("copies")["targets"] == []
    refused = coldrise.run("copies", "nowhere")
    assert refused.returncode == 1 and "nothing was copied" in refused.stderr


def test_a_removed_link_has_no_status(coldrise, far, tmp_path):
    back_up(coldrise, tmp_path, "web01", 1, bytes(MIB))
    coldrise.json("copy", "--to", "far")
    coldrise.json("link", "remove", "far")
    assert coldrise.json("copies")["targets"] == [] and json.loads(coldrise.run("--json", "link", "list").stdout)["links"] == []


def test_a_link_removed_during_its_copy_has_no_status(coldrise, far, tmp_path):
    back_up(coldrise, tmp_path, "web01", 1, random_mib(8))
    copy = far.held(coldrise, 2 * MIB, "--to", "far")
    assert only(coldrise)["state"] == "copying"
    coldrise.json("link", "remove", "far")
    far.gate.release()
    # It continues, and records its end.
    finish(copy)
    assert coldrise.json("copies")["targets"] == []


def test_two_copies_to_one_target_record_their_own_machines(coldrise, tmp_path):
    there = local(coldrise, tmp_path)
    machines = [f"web0{number}" for number in range(1, 5)]
    for machine in machines:
        back_up(coldrise, tmp_path, machine, 1, random_mib(2))
    running = [subprocess.Popen([PROGRAM, "copy", machine, "--to", there.repository], env=coldrise.environment(),
                                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
               for machine in machines]
    for process in running:
        message = process.communicate(timeout=DEADLINE_S)[1]
        assert process.returncode == 0, message
    target = only(coldrise)
    assert [(m["machine"], m["state"], m["total"]["points"]) for m in target["machines"]] == [
        (machine, "current", 1) for machine in machines]
