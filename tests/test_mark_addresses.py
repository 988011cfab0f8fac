"""Addresses of time marks: what takes them, and what a command leaves behind."""

import os
import signal
import struct
import subprocess
import time

import pytest

from support.nbdserver import wait_until
from support.service import Coldrised

BLOCK = 4096
MIB = 1 << 20
# xor ax,ax; mov ds,ax; mov si,0x7c16; …: prints the text to the serial port (see test_check_boot).
LOGIN = bytes.fromhex("fc31c08ed8be167cbaf803ac84c07403eeebf8f4ebfd") + b"web01 login: \0"


def content(number):
    return struct.pack("<Q", number) * (BLOCK // 8)


def points(coldrise):
    return [point["address"] for machine in coldrise.json("list")["machines"] for point in machine["points"]]


@pytest.fixture
def marked(coldrise, nbdkit, tmp_path):
    """A session with two disks that was written, marked, and written again; its mark and the writer's server."""
    disks = {}
    for name in ["vda", "vdb"]:
        disks[name] = tmp_path / f"{name}.raw"
        disks[name].write_bytes((LOGIN.ljust(510, b"\0") + b"\x55\xaa").ljust(MIB, b"\0"))
    exports = coldrise.publish(coldrise.backup("web01", **disks), "trial")
    server = nbdkit()
    with server.connect(exports["vda"]) as disk:
        disk.pwrite(content(1), BLOCK)
        [mark] = wait_until(lambda: coldrise.json("marks", "trial")["marks"], "a mark")
        disk.pwrite(content(2), BLOCK)
        disk.flush()
    return mark, server


def test_readers_and_failed_commands_leave_no_point(coldrise, marked, tmp_path):
    address, before = marked[0]["address"], points(coldrise)
    restored = coldrise.json("restore", f"{address}/vda", tmp_path / "restored.raw")
    assert restored["address"] == f"{address}/vda"
    assert (tmp_path / "restored.raw").read_bytes()[BLOCK:][:BLOCK] == content(1)
    difference = coldrise.json("diff", f"{address}/vda", "live/trial/vda")
    assert (difference["from"], difference["differing_bytes"]) == (address, BLOCK)
    refused = coldrise.run("restore", address, tmp_path / "none.raw")
    assert refused.returncode == 2 and f"{address} has several disks: name one of vda, vdb" in refused.stderr
    for wrong in [["restore", f"{address}/vdc", tmp_path / "none.raw"], ["publish", address, "--name", "trial"],
                  ["diff", address, "live/trial/vda"], ["serve", "iscsi", f"{address}/vdc"],
                  ["boot", address, "--name", "trial", "--headless"]]:  # fmt: skip
        assert coldrise.run(*wrong).returncode != 0, wrong
    assert points(coldrise) == before
    assert coldrise.run("verify").returncode == 0
    assert [found for found in coldrise.json("doctor")["findings"] if found["status"] == "fail"] == []
    kept = coldrise.json("seal", address)["address"]
    coldrise.json("restore", "--force", f"{address}/vda", tmp_path / "restored.raw")
    assert points(coldrise) == [*before, kept]


def test_a_cancelled_restore_leaves_no_point(coldrise, marked, tmp_path):
    before, socket = points(coldrise), tmp_path / "slow.sock"
    slow = subprocess.Popen(["nbdkit", "-f", "-U", socket, "--filter=delay", "memory", "1M", "delay-write=3"])
    try:
        wait_until(socket.exists, "the slow server")
        target = f"nbd+unix:///?socket={socket}"
        restoring = coldrise.start("restore", f"{marked[0]['address']}/vda", target, stderr=subprocess.PIPE)
        wait_until(lambda: points(coldrise) != before, "the point of the mark")
        restoring.send_signal(signal.SIGINT)
        assert "cancelled" in restoring.communicate(timeout=60)[1] and restoring.returncode != 0
        assert points(coldrise) == before
    finally:
        slow.kill()
        slow.wait()


@pytest.mark.parametrize("reading", ["restore", "seal"])
def test_writes_after_a_mark_that_was_used_are_in_the_last_point(coldrise, marked, tmp_path, reading):
    mark, server = marked
    if reading == "restore":
        coldrise.json("restore", f"{mark['address']}/vda", tmp_path / "restored.raw")
    else:
        coldrise.json("seal", mark["address"])
    server.stop()
    # Nothing was captured since: all writes are in a sealed layer, and the point shows only some of them.
    coldrise.json("unpublish", "trial")
    coldrise.json("restore", "--force", "web01/latest/vda", tmp_path / "restored.raw")
    assert (tmp_path / "restored.raw").read_bytes()[BLOCK:][:BLOCK] == content(2)


def test_latest_is_the_newest_state(coldrise, marked, tmp_path):
    address = marked[0]["address"]
    backup = points(coldrise)[0]
    # Of a mark a point is made; the other address means what was there before.
    difference = coldrise.json("diff", address, "web01/latest")
    assert (difference["from"], difference["to"], difference["differing_bytes"]) == (address, backup, BLOCK)
    assert coldrise.json("diff", "web01/latest", address)["differing_bytes"] == BLOCK
    sealed = coldrise.json("seal", "trial")["address"]
    older = coldrise.json("seal", address)["address"]
    assert int(older.split("+")[1]) > int(sealed.split("+")[1])
    found = [coldrise.json("show", f"web01/{name}")["address"] for name in ["latest", "latest~1", "latest~2"]]
    assert found == [sealed, older, backup]
    [plan] = coldrise.json("prune", "--keep-last", "1", "--dry-run")["machines"]
    assert [(point["address"], point["reasons"]) for point in plan["points"] if point["is_kept"]] \
        == [(backup, ["published as trial", "newest backup"]), (sealed, ["last 1"])]
    [machine] = coldrise.json("list")["machines"]
    assert [point.get("marked_at_ms") for point in machine["points"] if point["address"] == older] \
        == [marked[0]["marked_at_ms"]]
    assert "AS OF" in coldrise.run("list").stdout
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        wait_until(lambda: service.call("GET", "machines").status == 200, "the service")
        assert service.get("machines/web01")["latest"]["address"] == sealed
        assert service.get("points") == coldrise.json("list")


def test_an_age_means_one_time_for_all_disks(coldrise, marked, tmp_path):
    """One disk after the other at an age would be a machine of two times."""
    _, server = marked
    with server.connect("live/trial/vda") as disk:
        disk.pwrite(content(3), BLOCK)
        newest = wait_until(lambda: (found := coldrise.json("marks", "trial")["marks"])[1:] and found[-1], "the second mark")
    wait_until(lambda: time.time() > newest["marked_at_ms"] / 1000 + 1, "its age")
    age, newest, before = "live/trial@-1s", newest["address"], points(coldrise)
    refused = coldrise.run("restore", f"{age}/vda", tmp_path / "none.raw")
    assert refused.returncode == 2 and f"name the time: it is {newest}/vda now" in refused.stderr
    assert subprocess.run(["nbdinfo", server.uri(f"{age}/vda")], capture_output=True).returncode != 0
    assert points(coldrise) == before
    published = coldrise.run("publish", age, "--name", "before")
    assert f"{age} is {newest}" in published.stderr
    with server.connect("live/before/vda") as disk:
        assert disk.pread(BLOCK, BLOCK) == content(3)


def test_the_service_compares_and_checks_marks(coldrise, marked, tmp_path):
    address, before = marked[0]["address"], points(coldrise)
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        wait_until(lambda: service.call("GET", "machines").status == 200, "the service")
        for query in [f"from={address}&to=web01/latest", f"from=web01/latest&to={address}"]:
            assert service.get(f"difference?{query}")["differing_bytes"] == BLOCK, query
        assert service.call("GET", f"difference?from={address}/vda&to=web01/latest/vda").status == 400
        token = service.token("viewer", ["web*"])
        assert service.call("GET", f"difference?from={address}&to=web01/latest", token=token).status == 403
        assert points(coldrise) == before
        for run in [{"kind": "check-boot", "address": address, "until": "firmware"}, {"kind": "verify", "address": address}]:
            started = service.post("runs", run)["run"]
            def ended():
                answer = service.call("GET", f"runs/{started}")
                return answer.status == 200 and answer.json["state"] != "running" and answer.json["state"]
            assert wait_until(ended, "the end of the run") == "ok", run
    assert len(points(coldrise)) == len(before) + 1


def test_a_mark_is_booted_for_a_check(coldrise, marked):
    address = marked[0]["address"]
    assert coldrise.run("check-boot", f"{address}/vda").returncode == 2
    done = coldrise.json("check-boot", address, "--memory", "64M", "--until", "firmware", timeout_s=300)
    # The point has the result.
    assert coldrise.json("show", done["address"])["marked_at_ms"] == marked[0]["marked_at_ms"]
    assert coldrise.json("show", done["address"])["boot"]["verdict"] == "ok"


def test_the_mount_has_a_link_for_each_mark(coldrise, marked, mount):
    address, before = marked[0]["address"], points(coldrise)
    root = mount().folder
    assert os.listdir(root / "live") == ["trial"]
    assert os.path.islink(root / address) and points(coldrise) == before
    assert not os.path.lexists(root / "live/trial@20200101T000000Z")
    assert (root / address / "vda.raw").read_bytes()[BLOCK:][:BLOCK] == content(1)
    [made] = set(points(coldrise)) - set(before)
    assert os.readlink(root / address) == f"../{made}"
    assert (root / "live/trial@last-good-20991231T235959Z/vdb.raw").stat().st_size == MIB


def test_the_rule_of_marks_is_chosen_at_every_start(coldrise, point):
    for start in [["boot", point, "--headless"], ["recover", point, "--to", "libvirt"]]:
        wrong = coldrise.run(*start, "--marks", "1m=1s")
        assert wrong.returncode == 2 and "1s=10m,10s=1h,1m=1d" in wrong.stderr, start
    booted = coldrise.start("boot", point, "--name", "quiet", "--memory", "64M", "--marks", "off", stdout=subprocess.PIPE)
    wait_until(lambda: [each["session"] for each in coldrise.json("sessions")["sessions"]] == ["quiet"], "the session")
    wait_until(lambda: coldrise.json("marks", "quiet")["rule"] == "off", "the rule")
    booted.terminate()
    booted.wait(timeout=60)
    assert coldrise.json("marks", "quiet")["rule"] == "off"
