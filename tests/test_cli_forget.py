"""coldrise forget, protect and unprotect: points are removed, or stay."""

import json
import os
import shutil

import pytest

from support.image import Image
from support.nbdserver import read_all, refused
from support.sources import tool

MIB = 1 << 20

# Exit codes.
FAILED, USAGE, BUSY = 1, 2, 11

TIMES = ["20261101T100000Z", "20261102T100000Z", "20261103T100000Z"]


@pytest.fixture
def history(coldrise, tmp_path):
    """Three points of web01 and one of db01; the content of each disk."""
    disk = Image(8 * MIB)
    contents = {}
    for number, time in enumerate(TIMES):
        disk.fill(number * MIB, 2 * MIB, f"day {number}")
        path = disk.save(tmp_path / "vda.raw")
        coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", time)
        contents[f"web01/{time}"] = bytes(disk.content)
    coldrise.json("backup", "db01", f"vda=raw:{path}", "--time", TIMES[0])
    return contents


def points(coldrise, machine=None):
    listed = coldrise.json("list", *([machine] if machine else []))["machines"]
    return [point["address"] for machine in listed for point in machine["points"]]


def failure(coldrise, code, *arguments):
    done = coldrise.run("--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["error"]["message"]


def test_a_forgotten_point_is_gone_and_others_are_unchanged(coldrise, history, tmp_path):
    first, second, third = history
    done = coldrise.json("forget", second)
    assert done["points"] == [second] and not done["is_dry_run"]
    assert points(coldrise) == [f"db01/{TIMES[0]}", first, third]
    for command in (["show", second], ["publish", second], ["restore", f"{second}/vda", tmp_path / "no.raw"],
                    ["diff", first, second], ["forget", second]):  # fmt: skip
        assert "web01" in failure(coldrise, FAILED, *command)
    for point in (first, third):
        target = tmp_path / "restored.raw"
        coldrise.json("restore", f"{point}/vda", target)
        assert target.read_bytes() == history[point]
        target.unlink()
    assert coldrise.json("verify")["is_clean"]


def test_a_machine_is_removed_with_its_last_point_and_can_return(coldrise, history, tmp_path):
    assert "--all" in failure(coldrise, USAGE, "forget", "web01")
    assert "one restore point" in failure(coldrise, USAGE, "forget", "--all", "web01/latest")
    coldrise.json("forget", "web01/latest", "web01/latest~1", f"web01/{TIMES[2]}")
    assert points(coldrise, "web01") == [f"web01/{TIMES[0]}"]
    done = coldrise.json("forget", "web01", "--all")
    assert done["points"] == [f"web01/{TIMES[0]}"]
    assert [machine["machine"] for machine in coldrise.json("list")["machines"]] == ["db01"]
    assert "no machine web01" in failure(coldrise, FAILED, "list", "web01")
    again = coldrise.backup("web01", vda=tmp_path / "vda.raw")
    assert points(coldrise, "web01") == [again]


def test_forget_is_all_or_nothing(coldrise, history):
    first, second, third = history
    coldrise.json("protect", second)
    before = points(coldrise)
    assert f"unprotect {second}" in failure(coldrise, BUSY, "forget", first, second, third)
    assert "unprotect" in failure(coldrise, BUSY, "forget", "web01", "--all")
    missing = f"web01/{TIMES[0].replace('2026', '2025')}"
    assert missing.split("/")[1] in failure(coldrise, FAILED, "forget", first, missing)
    assert points(coldrise) == before


def test_protection_is_shown_and_can_be_removed(coldrise, history):
    first, _, third = history
    assert coldrise.json("protect", third, first)["points"] == [first, third]
    # A repetition is not an error.
    coldrise.json("protect", first)
    listed = coldrise.json("list", "web01")["machines"][0]["points"]
    assert [point["is_protected"] for point in listed] == [True, False, True]
    assert coldrise.json("show", first)["is_protected"]
    assert "neither forget nor prune" in coldrise.run("show", first).stdout
    line = [line for line in coldrise.run("list").stdout.splitlines() if first in line]
    assert line[0].endswith("yes")
    assert coldrise.json("unprotect", first)["is_protected"] is False
    assert not coldrise.json("show", first)["is_protected"]
    coldrise.json("forget", first)
    assert failure(coldrise, FAILED, "protect", first)
    # It protects only the point: everything else is unchanged.
    assert coldrise.json("verify")["is_clean"]


def test_a_published_point_is_refused_until_its_session_ends(coldrise, history):
    first = next(iter(history))
    coldrise.publish(first, "trial")
    message = failure(coldrise, BUSY, "forget", first)
    assert "session trial" in message and "coldrise unpublish trial" in message
    assert "trial" in failure(coldrise, BUSY, "forget", "--dry-run", first)
    coldrise.json("unpublish", "trial", "--discard")
    coldrise.json("forget", first)


def test_a_session_continues_without_the_points_that_it_sealed(coldrise, history, nbdkit, tmp_path):
    """Also where they wait in its document, and no writer has entered them yet."""
    first = next(iter(history))
    coldrise.publish(first, "trial")
    expected = bytearray(history[first])
    names = []
    with nbdkit() as server, server.connect("live/trial/vda") as handle:
        for number in range(3):
            handle.pwrite(bytes([number + 1]) * 64, number * MIB)
            expected[number * MIB : number * MIB + 64] = bytes([number + 1]) * 64
            sealed = coldrise.json("seal", "trial")["address"]
            names.append(sealed)
            if number < 2:
                coldrise.json("protect", sealed)
                assert "unprotect" in failure(coldrise, BUSY, "forget", sealed)
                coldrise.json("unprotect", sealed)
                coldrise.json("forget", sealed)
                assert sealed not in points(coldrise)
        assert read_all(handle) == expected
    # A name is never given again: who knows it knows one content.
    assert names == [f"{first}+{number}" for number in (1, 2, 3)]
    target = tmp_path / "restored.raw"
    coldrise.json("restore", f"{sealed}/vda", target)
    assert target.read_bytes() == expected
    coldrise.json("unpublish", "trial")
    coldrise.json("forget", sealed)
    # Neither by another session.
    coldrise.publish(first, "other")
    assert coldrise.json("seal", "other")["address"] == f"{first}+4"
    assert coldrise.json("verify")["is_clean"]


def test_a_dry_run_changes_nothing_and_reports_the_space(coldrise, history):
    before = points(coldrise)
    first, second, third = history
    said = coldrise.json("forget", "--dry-run", first, second, third)
    assert said["is_dry_run"] and said["points"] == [first, second, third]
    # All of web01 but what it has in common with db01.
    assert said["reclaimable_bytes"] < 4 * MIB
    whole = coldrise.json("forget", "-n", "--all", "web01", "db01")
    assert whole["points"] == before
    assert whole["reclaimable_bytes"] >= 4 * MIB
    assert points(coldrise) == before
    text = coldrise.run("forget", "-n", first).stdout
    assert first in text and "1 restore point; coldrise gc would return about" in text


def test_a_running_server_and_mount_see_it_and_readers_continue(coldrise, history, nbdkit, mount):
    """Nothing is restarted: names vanish, and open files stay readable."""
    first, second, third = history
    mounted = mount()
    with nbdkit() as server, server.connect(f"{first}/vda") as handle:
        listed = nbd_names(server)
        assert f"{second}/vda" in listed
        file = os.open(mounted / first / "vda.raw", os.O_RDONLY)
        assert sorted(os.listdir(mounted / "web01")) == [*TIMES, "latest"]
        coldrise.json("forget", first, second)
        assert sorted(os.listdir(mounted / "web01")) == [TIMES[2], "latest"]
        assert not (mounted / second).exists()
        listed = nbd_names(server)
        assert f"{second}/vda" not in listed and f"{third}/vda" in listed
        refused(server, f"{second}/vda")
        refused(server, "web01/latest~1/vda")
        assert read_all(handle) == history[first]
        assert os.pread(file, 8 * MIB, 0) == history[first]
        os.close(file)
        coldrise.json("forget", "web01", "--all")
        assert sorted(os.listdir(mounted.folder)) == ["db01", "live"]
        assert all(name.startswith("db01/") for name in nbd_names(server))
    with nbdkit() as server:
        refused(server, f"{first}/vda")


def nbd_names(server):
    found = tool("nbdinfo", "--list", "--json", f"nbd+unix:///?socket={server.socket}")
    return [export["export-name"] for export in json.loads(found)["exports"]]


def test_a_bitmap_is_not_used_with_an_older_backup(coldrise, tmp_path):
    """The changes between it and the forgotten one would be missing."""
    image = tmp_path / "vda.qcow2"
    tool("qemu-img", "create", "-f", "qcow2", image, "8M")
    write = ["qemu-io", "-f", "qcow2", "-c"]
    tool(*write, "write -P 1 0 1M", image)
    coldrise.json("backup", "web01", f"vda=qcow2:{image}")
    tool(*write, "write -P 2 1M 1M", image)
    newest = coldrise.json("backup", "web01", f"vda=qcow2:{image}")["address"]
    tool("qemu-img", "bitmap", "--add", image, "daily")
    tool(*write, "write -P 3 2M 1M", image)
    coldrise.json("forget", newest)
    message = failure(coldrise, FAILED, "backup", "web01", f"vda=qcow2:{image}", "--bitmap", "daily")
    assert newest.split("/")[1] in message and "without --bitmap" in message
    # An old image that is imported afterwards is not a base either.
    coldrise.json("backup", "web01", f"vda=qcow2:{image}", "--time", "20200101T000000Z")
    failure(coldrise, FAILED, "backup", "web01", f"vda=qcow2:{image}", "--bitmap", "daily")
    coldrise.json("backup", "web01", f"vda=qcow2:{image}")
    made = coldrise.json("backup", "web01", f"vda=qcow2:{image}", "--bitmap", "daily")
    assert made["disks"][0]["is_incremental"]
    coldrise.json("restore", f"{made['address']}/vda", tmp_path / "restored.raw")
    expected = b"".join(bytes([fill]) * MIB for fill in (1, 2, 3)) + bytes(5 * MIB)
    assert (tmp_path / "restored.raw").read_bytes() == expected


def newest_marker(coldrise):
    markers = (path for path in (coldrise.repository / "markers").rglob("*") if path.is_file())
    return max(markers, key=lambda path: path.stat().st_mtime_ns)


def test_a_bitmap_is_not_used_across_a_lost_point(coldrise, tmp_path):
    """An older database was restored: the last backup is lost, and the record of it too."""
    image = tmp_path / "vda.qcow2"
    tool("qemu-img", "create", "-f", "qcow2", image, "8M")
    tool("qemu-img", "bitmap", "--add", "-g", "65536", image, "daily")
    write = ["qemu-io", "-f", "qcow2", "-c"]
    coldrise.json("backup", "web01", f"vda=qcow2:{image}")

    def change(fill, at):
        tool("qemu-img", "bitmap", "--clear", image, "daily")
        tool(*write, f"write -P {fill} {at}M 64k", image)

    change(1, 1)
    database = coldrise.repository / "db"
    shutil.copytree(database, tmp_path / "before")
    lost = coldrise.json("backup", "web01", f"vda=qcow2:{image}", "--bitmap", "daily")["address"]
    shutil.rmtree(database)
    shutil.copytree(tmp_path / "before", database)
    assert "coldrise repair" in failure(coldrise, FAILED, "forget", lost)
    # Its document is restored from the marker, its content is not.
    assert coldrise.run("repair").returncode == FAILED
    change(2, 2)
    backup = ("backup", "web01", f"vda=qcow2:{image}")
    message = failure(coldrise, FAILED, *backup, "--bitmap", "daily")
    assert "without --bitmap" in message
    # Forgetting it makes no older backup the last one.
    assert coldrise.json("forget", lost)["points"] == [lost]
    assert "without --bitmap" in failure(coldrise, FAILED, *backup, "--bitmap", "daily")
    coldrise.json(*backup)
    change(3, 3)
    made = coldrise.json(*backup, "--bitmap", "daily")
    assert made["disks"][0]["is_incremental"]
    coldrise.json("restore", f"{made['address']}/vda", tmp_path / "restored.raw")
    restored = (tmp_path / "restored.raw").read_bytes()
    assert [restored[at * MIB] for at in range(4)] == [0, 1, 2, 3]


def cut_log(coldrise):
    (log,) = [path for path in (coldrise.repository / "db").glob("*.log") if path.stat().st_size]
    log.write_bytes(log.read_bytes()[:-5])


def test_protection_survives_a_truncated_log(coldrise, point):
    coldrise.json("protect", point)
    cut_log(coldrise)
    (machine,) = coldrise.json("list")["machines"]
    assert machine["points"][0]["is_protected"]
    assert "coldrise repair" in failure(coldrise, FAILED, "forget", point)
    coldrise.json("repair")
    assert "is protected" in failure(coldrise, BUSY, "forget", point)
    coldrise.json("unprotect", point)
    (machine,) = coldrise.json("list")["machines"]
    assert not machine["points"][0]["is_protected"]
    coldrise.json("forget", point)


def test_a_quarantined_point_stays_quarantined(coldrise, point):
    coldrise.json("quarantine", point)
    cut_log(coldrise)
    (machine,) = coldrise.json("list")["machines"]
    assert machine["points"][0]["quarantine"] == "chosen"
    coldrise.json("repair")
    (machine,) = coldrise.json("list")["machines"]
    assert machine["points"][0]["quarantine"] == "chosen"
    coldrise.json("release", point)
    (machine,) = coldrise.json("list")["machines"]
    assert machine["points"][0].get("quarantine") is None


def test_lost_points_are_named_where_points_are_chosen(coldrise, image, point, tmp_path):
    """A user who boots an older point because the newest is lost gets a warning."""
    lost = coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    cut_log(coldrise)
    assert coldrise.json("list")["lost"] == [lost]
    assert "coldrise repair restores it" in coldrise.run("list").stderr
    for command in (("publish", "web01/latest"), ("restore", "web01/latest/vda", tmp_path / "out.raw")):
        done = coldrise.run(*command)
        assert done.returncode == 0 and f"{point.split('/')[1]} is older" in done.stderr
        assert lost in done.stderr
    message = failure(coldrise, FAILED, "show", lost)
    assert "missing" in message and "coldrise repair restores it" in message
    coldrise.json("repair")
    assert coldrise.json("list")["lost"] == []
    assert lost in [entry["address"] for entry in coldrise.json("list")["machines"][0]["points"]]
    assert coldrise.run("publish", "web01/latest").stderr == ""
