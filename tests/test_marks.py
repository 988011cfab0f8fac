"""Time marks: a session goes back to any second in which it was written."""

import contextlib
import json
import math
import random
import struct
import subprocess
import threading
import time

import nbd
import pytest

from support.cli import Coldrise
from support.nbdserver import Nbdkit, refused, wait_until
from support.numbered_writes import (BLOCK, BLOCKS, DISK_BYTES, NumberedWrites, content, images,
                                     publish_empty_disks)


@pytest.fixture
def session(coldrise, tmp_path):
    return publish_empty_disks(coldrise, tmp_path, "trial")


def marks(coldrise, session="trial"):
    return coldrise.json("marks", session)["marks"]


def wait_for_marks(coldrise, count, after=0):
    def enough():
        found = [mark for mark in marks(coldrise) if mark["marked_at_ms"] > after]
        return found if len(found) >= count else None
    return wait_until(enough, f"{count} marks")


def test_each_mark_is_what_both_disks_were_at_one_instant(coldrise, session, nbdkit, tmp_path):
    server = nbdkit()
    writer = NumberedWrites(server, list(session.values()))
    writer.start()
    try:
        # While the disks are written, the session is sealed and writes to other layers.
        for mark in wait_for_marks(coldrise, 3):
            writer.check(mark, images(coldrise, mark["address"], tmp_path))
        newest = marks(coldrise)[-1]["marked_at_ms"]
        wait_for_marks(coldrise, 3, after=newest)
    finally:
        server.kill()
        writer.end()
    after_kill = marks(coldrise)
    assert len([mark for mark in after_kill if mark["marked_at_ms"] > newest]) >= 1
    numbers = [writer.check(mark, images(coldrise, mark["address"], tmp_path)) for mark in after_kill]
    assert numbers == sorted(numbers)
    assert coldrise.run("verify").returncode == 0


def test_a_session_published_at_a_mark_is_independent(coldrise, session, nbdkit, tmp_path):
    server = nbdkit()
    with server.connect(session["vda"]) as disk:
        disk.pwrite(content(1), 0)
        [mark] = wait_for_marks(coldrise, 1)
        disk.pwrite(content(2), 0)
        assert len(marks(coldrise)) <= 2
        published = coldrise.json("publish", mark["address"], "--name", "back")
        with server.connect("live/back/vda") as back:
            assert bytes(back.pread(BLOCK, 0)) == content(1)
            back.pwrite(content(3), 0)
            assert bytes(disk.pread(BLOCK, 0)) == content(2)
        # The same mark again is the same point; as an export it is read-only.
        assert coldrise.json("seal", mark["address"])["address"] == published["address"]
        with server.connect(f"{mark['address']}/vda") as export:
            assert export.is_read_only() and bytes(export.pread(BLOCK, 0)) == content(1)
        differing = coldrise.json("diff", f"{mark['address']}/vda", "live/trial/vda")
        assert differing["disks"][0]["differing_bytes"] > 0
    # The marked state is a point like any other: neither the end of its session nor gc changes it.
    coldrise.json("unpublish", "trial", "--discard")
    coldrise.json("fold")
    coldrise.json("gc")
    assert images(coldrise, published["address"], tmp_path)[0][:BLOCK] == content(1)
    assert coldrise.run("verify").returncode == 0


def test_fold_leaves_the_layers_to_whose_marks_a_session_can_go_back(coldrise, session, nbdkit, tmp_path):
    server = nbdkit()
    with server.connect(session["vda"]) as disk:
        disk.pwrite(content(1), 0)
        [mark] = wait_for_marks(coldrise, 1)
        disk.pwrite(content(2), 0)
        sealed = coldrise.json("seal", "trial")["address"]
        left = coldrise.json("fold")
        assert (left["points"], left["left_for_marks"]) == ([], 1)
        coldrise.json("gc")
        assert mark in marks(coldrise)
        # Named, it is folded: then its marks are gone.
        assert [point["address"] for point in coldrise.json("fold", sealed)["points"]] == [sealed]
        assert mark not in marks(coldrise)
        assert bytes(disk.pread(BLOCK, 0)) == content(2)


def test_a_time_without_a_mark_is_refused_with_the_nearest(coldrise, session, nbdkit):
    server = nbdkit()
    early = coldrise.run("publish", "live/trial@-5m")
    assert early.returncode == 1 and "session trial has no mark -5m: it has none" in early.stderr
    with server.connect(session["vda"]) as disk:
        disk.pwrite(content(1), 0)
        [mark] = wait_for_marks(coldrise, 1)
        late = coldrise.run("seal", "live/trial@20991231T235959Z")
        assert late.returncode == 1 and f"the last one is {mark['address']}" in late.stderr
        before = coldrise.run("seal", "live/trial@last-good-20200101T000000Z")
        assert before.returncode == 1 and f"the oldest is {mark['address']}" in before.stderr
        assert coldrise.json("seal", "live/trial@last-good-20991231T235959Z")["session"] == "trial"
        refused(server, "live/trial@20991231T235959Z/vda")
        assert mark["address"] in server.messages()
    for address in ["live/trial@yesterday", "live/trial@", "live/trial@-5x", "web01@-90s/latest"]:
        assert coldrise.run("publish", address).returncode == 2, address
    assert coldrise.run("seal", "live/trial@-90s/vda").returncode == 2


def test_marks_are_off_on_request(coldrise, point, nbdkit):
    coldrise.json("publish", point, "--name", "plain", "--marks", "off")
    coldrise.publish(point, "marked")
    server = nbdkit()
    with server.connect("live/plain/vda") as plain, server.connect("live/marked/vda") as marked:
        plain.pwrite(content(1), 0)
        marked.pwrite(content(1), 0)
        wait_until(lambda: marks(coldrise, "marked"), "a mark of the other session")
        found = coldrise.json("marks", "plain")
    assert (found["rule"], found["marks"]) == ("off", [])
    wrong = coldrise.run("publish", point, "--marks", "1m=1s")
    assert wrong.returncode == 2 and "1s=10m,10s=1h,1m=1d" in wrong.stderr


def test_marks_end_with_their_age_and_give_their_blocks_back(coldrise, session, nbdkit):
    coldrise.json("publish", "web01/latest", "--name", "short", "--marks", "1s=3s")
    server = nbdkit()
    writer = NumberedWrites(server, ["live/short/vda", "live/short/vdb"])
    writer.start()

    def oldest():
        found = marks(coldrise, "short")
        return found[0]["marked_at_ms"] if found else None
    try:
        first = wait_until(oldest, "a mark")
        # Ten of its lives later, and after the sync that frees its blocks.
        wait_until(lambda: oldest() > first + 6000, "the first marks to end")
        found = coldrise.json("marks", "short")
    finally:
        server.kill()
        writer.end()
    assert len(found["marks"]) <= 5 + 10  # The rule is applied after each ten marks.
    # Each mark needs at most all blocks of both disks.
    assert found["held_bytes"] <= (5 + 10) * 2 * BLOCKS * BLOCK
    assert coldrise.run("verify").returncode == 0


def test_on_a_small_drive_marks_become_fewer_and_writes_succeed(tmp_path, template):
    drive = tmp_path / "drive"
    drive.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "small", drive], check=True)
    try:
        coldrise = Coldrise.copied(template, drive / "repository")
        disks = {}
        for name in ["vda", "vdb"]:
            disks[name] = tmp_path / f"{name}.raw"
            disks[name].write_bytes(bytes(DISK_BYTES))
        exports = coldrise.publish(coldrise.backup("web01", **disks), "trial")
        with Nbdkit(coldrise, tmp_path / "nbdkit") as server:
            writer = NumberedWrites(server, list(exports.values()))
            writer.start()
            try:
                # A tenth of the drive: less than five states of both disks.
                found = wait_until(lambda: coarse(coldrise), "longer intervals")
            finally:
                writer.end()
        assert found["held_bytes_limit"] <= (64 << 20) // 10
        assert not math.isinf(writer.writes[-1][1]), "a write failed"
        for mark in marks(coldrise):
            writer.check(mark, images(coldrise, mark["address"], tmp_path))
        assert coldrise.run("verify").returncode == 0
    finally:
        subprocess.run(["umount", "--lazy", drive], check=True)


def coarse(coldrise):
    found = coldrise.json("marks", "trial")
    return found if "reduced_rule" in found else None


def test_verify_names_damage_to_blocks_that_only_marks_need(coldrise, session, nbdkit):
    server = nbdkit()
    with server.connect(session["vda"]) as disk:
        disk.pwrite(content(1), 0)
        disk.flush()
        [first] = wait_for_marks(coldrise, 1)
        disk.pwrite(content(2), 0)
        disk.flush()
        wait_for_marks(coldrise, 2)
    server.stop()
    assert coldrise.run("verify").returncode == 0
    # Both disks have the marks; only this one has blocks.
    layer = max((coldrise.repository / "layers").iterdir(), key=lambda path: len(path.read_bytes().rstrip(b"\0")))
    named = []
    for slot in range(4):
        # The first slots of the first segment: both blocks, and the marks. See docs/on-disk-format.md.
        with open(layer, "r+b") as file:
            for _ in range(2):  # Damages it, and later mends it.
                file.seek((64 << 10) + (64 << 10) + slot * BLOCK + 20)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 0xff]))
                file.flush()
                found = coldrise.run("--json", "verify")
                named += [text["what"] for text in json.loads(found.stdout.splitlines()[-1])["damaged_layers"]]
    layer_of = "a layer of live/trial/vda"
    assert sorted(named) == [f"1 block of time marks in {layer_of}", f"1 captured block in {layer_of}", layer_of]
    assert coldrise.run("verify").returncode == 0 and first in marks(coldrise)
