"""coldrise backup: formats, bitmaps, sources that lie or vanish, cancelling."""

import json
import os
import signal
import subprocess

import pytest

from support.image import Image
from support.sources import RunningBackup, convert, is_same_disk, slow_server, tool

MIB = 1 << 20
CHUNK = 16 << 10


@pytest.fixture
def raw(image, tmp_path):
    return image.save(tmp_path / "source.raw")


def points(coldrise):
    return [point["address"] for machine in coldrise.json("list")["machines"]
            for point in machine["points"]]


def restored(coldrise, address, tmp_path):
    target = tmp_path / "restored.raw"
    coldrise.json("restore", address, target, "--force")
    return target.read_bytes()


def test_a_backup_reports_its_numbers(coldrise, image, raw):
    first = coldrise.json("backup", "web01", f"vda=raw:{raw}")
    assert first["address"] == f"{first['machine']}/{first['point']}"
    disk = first["disks"][0]
    assert (first["machine"], disk["disk"], disk["size_bytes"]) == ("web01", "vda", len(image))
    # 2 MiB of random bytes in whole chunks, and the short one at the end.
    assert disk["new_chunks"] == 2 * MIB // CHUNK + 1
    assert disk["known_chunks"] == 0
    assert 2 * MIB <= disk["read_bytes"] < 3 * MIB
    assert 2 * MIB <= disk["stored_bytes"] < 2.2 * MIB
    assert first["elapsed_ms"] > 0 and first["warnings"] == []

    again = coldrise.json("backup", "web01", f"vda=raw:{raw}")
    assert again["point"] > first["point"]
    disk = again["disks"][0]
    assert (disk["new_chunks"], disk["stored_bytes"]) == (0, 0)
    assert disk["known_chunks"] == 2 * MIB // CHUNK + 1


def test_several_disks_form_one_point(coldrise, tmp_path):
    disks = {}
    for name in ("vda", "vdb"):
        disks[name] = Image(MIB)
        disks[name].fill(0, MIB, name)
    address = coldrise.backup("db01", **{n: d.save(tmp_path / n) for n, d in disks.items()})
    assert points(coldrise) == [address]
    for name, disk in disks.items():
        assert restored(coldrise, f"{address}/{name}", tmp_path) == bytes(disk.content)
    done = coldrise.run("restore", address, tmp_path / "x.raw")
    assert done.returncode == 2 and "vda, vdb" in done.stderr


@pytest.mark.parametrize("word, driver, options", [
    ("qcow2", "qcow2", ["cluster_size=64k"]),
    ("vmdk", "vmdk", ["subformat=monolithicSparse"]),
    ("vhd", "vpc", ["subformat=dynamic,force_size=on"]),
    ("vhdx", "vhdx", ["subformat=dynamic"]),
])
def test_formats_by_word_and_by_extension(coldrise, image, raw, tmp_path, word, driver, options):
    path = convert(raw, tmp_path / f"disk.{word}", driver, *options)
    named = coldrise.json("backup", "web01", f"vda={word}:{path}")
    by_extension = coldrise.json("backup", "web01", f"vda={path}")
    assert by_extension["disks"][0]["new_chunks"] == 0
    content = restored(coldrise, f"{named['address']}/vda", tmp_path)
    assert content[: len(image)] == bytes(image.content)
    assert not any(content[len(image):])


def test_the_format_is_never_guessed(coldrise, raw, tmp_path):
    """A guest that writes a qcow2 header into its raw disk gets no file opened."""
    trap = tmp_path / "trap.qcow2"
    tool("qemu-img", "create", "-f", "qcow2", "-b", raw, "-F", "raw", trap)
    disguised = tmp_path / "disguised.raw"
    disguised.write_bytes(trap.read_bytes())
    address = coldrise.backup("web01", vda=disguised)
    assert restored(coldrise, f"{address}/vda", tmp_path) == disguised.read_bytes()
    refused = coldrise.run("backup", "web01", f"vda={tmp_path / 'disk'}")
    assert refused.returncode == 2 and "raw:" in refused.stderr


def test_backing_files_are_followed_only_on_request(coldrise, image, raw, tmp_path):
    overlay = tmp_path / "overlay.qcow2"
    tool("qemu-img", "create", "-f", "qcow2", "-b", raw, "-F", "raw", overlay)
    refused = coldrise.run("backup", "web01", f"vda={overlay}")
    assert refused.returncode != 0 and "--follow-backing" in refused.stderr
    assert points(coldrise) == []
    made = coldrise.json("backup", "web01", f"vda={overlay}", "--follow-backing")
    content = restored(coldrise, f"{made['address']}/vda", tmp_path)
    assert content[: len(image)] == bytes(image.content)


def test_a_descriptor_opens_no_other_files(coldrise, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * MIB)
    descriptor = tmp_path / "evil.vmdk"
    descriptor.write_text(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n"
        f'createType="monolithicFlat"\nRW 2048 FLAT "{secret}" 0\n'
        'ddb.adapterType = "ide"\nddb.geometry.cylinders = "2"\n', encoding="utf-8")
    refused = coldrise.run("backup", "web01", f"vda={descriptor}")
    assert refused.returncode != 0
    assert points(coldrise) == []


def test_truncated_and_inconsistent_images(coldrise, raw, tmp_path):
    whole = convert(raw, tmp_path / "whole.qcow2", "qcow2").read_bytes()
    for name, content in {
        "empty": b"",
        "short": whole[: len(whole) // 2],
        "noise": os.urandom(100_000),
        "header": whole[:512],
    }.items():
        path = tmp_path / f"{name}.qcow2"
        path.write_bytes(content)
        done = coldrise.run("--json", "backup", "web01", f"vda={path}")
        assert done.returncode in (1, 3), f"{name}: {done.stdout}{done.stderr}"
        assert "vda" in done.stderr or str(path) in done.stderr
    assert points(coldrise) == []
    coldrise.backup("web01", vda=raw)


def test_missing_sources(coldrise, raw, tmp_path):
    absent = tmp_path / "absent.raw"
    done = coldrise.run("--json", "backup", "web01", f"vda={raw}", f"vdb={absent}")
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["error"]["kind"] == "not_found"
    assert str(absent) in done.stderr
    nowhere = coldrise.run("backup", "web01", f"vda=nbd+unix:///?socket={tmp_path / 'nowhere'}")
    assert nowhere.returncode == 1 and "nowhere" in nowhere.stderr
    assert points(coldrise) == []


def test_configuration_is_stored(coldrise, raw, tmp_path):
    path = tmp_path / "web01.json"
    text = '{"cpus": 4, "memory_mib": 512}'
    path.write_text(text, encoding="utf-8")
    made = coldrise.json("backup", "web01", f"vda={raw}", "--config", path)
    shown = coldrise.json("show", made["address"])
    assert shown["configuration"] == {"format": "coldrise-json", "text": text}
    wrong = tmp_path / "web01.txt"
    wrong.write_text("x", encoding="utf-8")
    assert coldrise.run("backup", "web01", f"vda={raw}", "--config", wrong).returncode == 2
    assert len(points(coldrise)) == 1


def test_bitmap_reads_only_changes(coldrise, tmp_path):
    image = Image(32 * MIB)
    image.fill(0, 32 * MIB, "content")
    path = convert(image.save(tmp_path / "disk.raw"), tmp_path / "disk.qcow2", "qcow2")
    tool("qemu-img", "bitmap", "--add", "-g", "65536", path, "since")

    # A bitmap counts from a backup: there has to be one.
    early = coldrise.run("backup", "web01", f"vda={path}", "--bitmap", "since")
    assert early.returncode == 1 and "without --bitmap" in early.stderr

    full = coldrise.json("backup", "web01", f"vda={path}")
    assert not full["disks"][0]["is_incremental"]
    image.fill(3 * MIB, 65536, "changed")
    (tmp_path / "changed").write_bytes(image.read(3 * MIB, 65536))
    tool("qemu-io", "-f", "qcow2", "-c", f"write -s {tmp_path / 'changed'} 3M 64k", path)

    part = coldrise.json("backup", "web01", f"vda={path}", "--bitmap", "since")
    disk = part["disks"][0]
    assert disk["is_incremental"] and disk["base"] == full["point"]
    assert disk["read_bytes"] == 65536 and disk["new_chunks"] == 65536 // CHUNK
    assert restored(coldrise, f"{part['address']}/vda", tmp_path) == bytes(image.content)

    unknown = coldrise.run("backup", "web01", f"vda={path}", "--bitmap", "absent")
    assert unknown.returncode == 1 and "absent" in unknown.stderr
    no_bitmap = coldrise.run("backup", "web01", f"vda={tmp_path / 'disk.raw'}", "--bitmap", "since")
    assert no_bitmap.returncode != 0
    assert len(points(coldrise)) == 2


def random_disk(tmp_path, size):
    image = Image(size)
    image.fill(0, size, "random")
    return image.save(tmp_path / "random.raw")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cancelled_run_can_be_repeated(coldrise, tmp_path, number):
    disk = random_disk(tmp_path, 24 * MIB)
    with slow_server(disk) as (uri, _server):
        running = RunningBackup(coldrise, "web01", f"vda={uri}")
        code, last, messages = running.end(number)
    assert code == 130
    assert last["error"]["kind"] == "interrupted"
    assert "no restore point was made" in messages
    assert points(coldrise) == []
    address = coldrise.backup("web01", vda=disk)
    assert points(coldrise) == [address]
    # Nothing is listed twice.
    assert coldrise.json("stats")["chunks"] == 24 * MIB // CHUNK
    assert restored(coldrise, f"{address}/vda", tmp_path) == disk.read_bytes()


def test_killed_and_run_again(coldrise, tmp_path):
    disk = random_disk(tmp_path, 24 * MIB)
    with slow_server(disk) as (uri, _server):
        running = RunningBackup(coldrise, "web01", f"vda={uri}")
        running.process.kill()
        running.process.communicate(timeout=30)
    assert points(coldrise) == []
    address = coldrise.backup("web01", vda=disk)
    assert coldrise.json("stats")["chunks"] == 24 * MIB // CHUNK
    assert restored(coldrise, f"{address}/vda", tmp_path) == disk.read_bytes()


def test_a_vanished_source_is_reported(coldrise, tmp_path):
    disk = random_disk(tmp_path, 24 * MIB)
    with slow_server(disk) as (uri, server):
        running = RunningBackup(coldrise, "web01", f"vda={uri}")
        server.kill()
        code, last, messages = running.end()
    assert code == 1
    assert last["error"]["kind"] in ("io", "tool_failed", "not_found"), last
    assert "vda" in messages
    assert points(coldrise) == []
    coldrise.backup("web01", vda=disk)


def test_commands_during_a_backup(coldrise, point, tmp_path):
    # It takes longer than all the other commands, whose starts may take seconds each.
    disk = random_disk(tmp_path, 96 * MIB)
    with slow_server(disk) as (uri, _server):
        running = RunningBackup(coldrise, "db01", f"vda={uri}")
        second = coldrise.run("--json", "backup", "db01", f"vda=raw:{disk}")
        assert second.returncode == 11
        assert json.loads(second.stdout.splitlines()[-1])["error"]["kind"] == "busy"
        # All other commands work meanwhile.
        assert points(coldrise) == [point]
        coldrise.publish(point, "trial")
        sealed = coldrise.json("seal", "trial")["address"]
        coldrise.json("unpublish", "trial")
        assert points(coldrise) == [point, sealed]
        code, _last, _messages = running.end(signal.SIGINT)
        assert code == 130


def test_progress_is_printed_at_a_limited_rate(coldrise, tmp_path):
    disk = random_disk(tmp_path, 24 * MIB)
    with slow_server(disk, megabytes_per_second=8) as (uri, _server):
        running = RunningBackup(coldrise, "web01", f"vda={uri}")
        code, last, messages = running.end()
    assert code == 0 and "address" in last and messages == ""
    events = running.lines[:-1]
    assert all(line["event"] == "progress" for line in events)
    storing = [line for line in events if line["phase"] == "storing"]
    assert storing and len(events) <= 4 * last["elapsed_ms"] / 1000 + 4
    assert all(line["total_bytes"] == 24 * MIB for line in storing)
    done = [line["done_bytes"] for line in storing]
    assert done == sorted(done)


def test_quiet_prints_nothing(coldrise, raw):
    done = coldrise.run("-q", "backup", "web01", f"vda={raw}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert coldrise.run("-q", "list").stdout.count("web01/") == 1


def test_backups_within_a_second_do_not_collide(coldrise, raw):
    for _ in range(3):
        coldrise.backup("web01", vda=raw)
    assert len(set(points(coldrise))) == 3


def test_no_passphrase_in_arguments(coldrise, tmp_path):
    """What is on the command lines of a backup and its children, while they run."""
    disk = random_disk(tmp_path, 24 * MIB)
    qcow2 = convert(disk, tmp_path / "disk.qcow2", "qcow2")
    with slow_server(disk) as (uri, _server):
        running = RunningBackup(coldrise, "web01", f"vda={qcow2}", f"vdb={uri}")
        lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        running.end(signal.SIGINT)
    assert "qemu-nbd" in lines.stdout or "coldrise" in lines.stdout
    assert "correct horse" not in lines.stdout


def test_restored_images_compare_equal(coldrise, raw, tmp_path):
    qcow2 = convert(raw, tmp_path / "disk.qcow2", "qcow2")
    made = coldrise.json("backup", "web01", f"vda={qcow2}")
    target = tmp_path / "out.raw"
    coldrise.json("restore", f"{made['address']}/vda", target)
    assert is_same_disk(target, "raw", qcow2, "qcow2")
