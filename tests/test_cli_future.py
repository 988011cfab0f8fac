"""Restore points that are dated in the future: a clock was wrong once."""

import datetime
import os

from support.sources import tool

FUTURE = "20990101T000000Z"


def named(point):
    return datetime.datetime.strptime(point.partition("/")[2], "%Y%m%dT%H%M%SZ")


def test_latest_skips_a_point_from_the_future(coldrise, point, mount, tmp_path):
    raw = f"vda=raw:{tmp_path / 'vda.raw'}"
    future = coldrise.json("backup", "web01", raw, "--time", FUTURE)
    assert any(FUTURE in warning for warning in future["warnings"])
    # It was stored last: nothing newer is known, and a clock that is wrong now may be ours.
    assert coldrise.json("show", "web01/latest")["address"] == future["address"]
    published = coldrise.run("publish", "web01/latest", "--name", "early")
    assert f"published web01/{FUTURE}" in published.stdout and FUTURE in published.stderr

    mounted = mount()
    assert os.readlink(mounted / "web01/latest") == FUTURE
    newest = coldrise.json("backup", "web01", raw)
    # Open readers see it immediately.
    assert os.readlink(mounted / "web01/latest") == newest["point"]
    assert any(FUTURE in warning for warning in newest["warnings"])
    assert newest["point"] < FUTURE
    for address, meant in (("latest", newest["address"]), ("latest~1", point)):
        assert coldrise.json("show", f"web01/{address}")["address"] == meant
    published = coldrise.run("publish", "web01/latest", "--name", "now")
    assert published.returncode == 0
    assert f"published {newest['address']}" in published.stdout and FUTURE in published.stderr

    listed = coldrise.run("--json", "list", "web01")
    assert FUTURE in listed.stderr
    points = coldrise.json("list", "web01")["machines"][0]["points"]
    assert [(entry["point"] == FUTURE, entry["is_in_future"], entry["is_passed_over"])
            for entry in points] == [(False,) * 3, (False,) * 3, (True,) * 3]
    findings = coldrise.json("doctor")["findings"]
    assert [found["status"] for found in findings
            if found["check"] == "clock" and FUTURE in found["message"]] == ["warn"]

    coldrise.json("unpublish", "early")
    coldrise.json("forget", future["address"])
    assert FUTURE not in coldrise.run("list").stderr
    assert "clock" not in [found["check"] for found in coldrise.json("doctor")["findings"]]


def test_an_old_image_that_is_stored_last_is_not_latest(coldrise, point, tmp_path):
    raw = f"vda=raw:{tmp_path / 'vda.raw'}"
    old = coldrise.json("backup", "web01", raw, "--time", "20010101T000000Z")
    assert old["warnings"] == []
    assert coldrise.json("show", "web01/latest")["address"] == point


def test_a_backup_with_a_clock_slightly_ahead(coldrise, point, tmp_path):
    raw = f"vda=raw:{tmp_path / 'vda.raw'}"
    ahead = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=120)
    first = coldrise.json("backup", "web01", raw, "--time", f"{ahead:%Y%m%dT%H%M%SZ}")
    second = coldrise.json("backup", "web01", raw)
    assert named(second["address"]) - named(first["address"]) == datetime.timedelta(seconds=1)
    assert any(second["point"] in warning for warning in second["warnings"])
    assert coldrise.json("show", "web01/latest")["address"] == second["address"]


def test_a_bitmap_is_used_despite_a_point_from_the_future(coldrise, tmp_path):
    image = tmp_path / "disk.qcow2"
    tool("qemu-img", "create", "-q", "-f", "qcow2", image, "4M")
    coldrise.json("backup", "web01", f"vda={image}", "--time", FUTURE)
    tool("qemu-img", "bitmap", "--add", image, "daily")
    coldrise.json("backup", "web01", f"vda={image}")
    again = coldrise.json("backup", "web01", f"vda={image}", "--bitmap", "daily")
    assert again["disks"][0]["is_incremental"]
