"""list, show, stats, diff, doctor, completion, man and help."""

import json
import os
import signal
import subprocess

import pytest

from support.cli import PROGRAM, Coldrise
from support.image import Image

pytestmark = pytest.mark.encrypted

MIB = 1 << 20
CHUNK = 16 << 10


def test_an_empty_repository(coldrise):
    assert coldrise.json("list") == {"machines": [], "lost": []}
    assert coldrise.json("sessions") == {"sessions": []}
    stats = coldrise.json("stats")
    assert stats["by_machine"] == []
    assert stats["recoverable_bytes"] == 0 and stats["deduplication_percent"] == 0
    assert "coldrise backup" in coldrise.run("list").stdout


@pytest.mark.parametrize("words", [
    ("list",), ("show", "web01/latest"), ("sessions",), ("publish", "web01/latest"), ("seal", "trial"),
    ("key", "list"), ("doctor",),
])  # fmt: skip
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_work_begins_gets_an_answer(coldrise, tmp_path, words, number):
    """The passphrase comes from a pipe without a writer, so that the command waits."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [PROGRAM, "--repo", coldrise.repository, "--passphrase-file", pipe, "--json", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # Opens as soon as the command waits for the passphrase.
    with open(pipe, "w", encoding="utf-8"):
        process.send_signal(number)
        output, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(output.splitlines()[-1])["error"]["kind"] == "interrupted"
    assert "interrupted" in messages


def test_list_and_show(coldrise, image, point, tmp_path):
    second = coldrise.backup("db01", vda=tmp_path / "vda.raw", vdb=tmp_path / "vda.raw")
    machines = coldrise.json("list")["machines"]
    assert [machine["machine"] for machine in machines] == ["db01", "web01"]
    listed = machines[0]["points"][0]
    assert listed["address"] == second and listed["kind"] == "backup"
    assert listed["size_bytes"] == 2 * len(image)
    assert [disk["disk"] for disk in listed["disks"]] == ["vda", "vdb"]
    only = coldrise.json("list", "web01")["machines"]
    assert [machine["machine"] for machine in only] == ["web01"]
    shown = coldrise.json("show", "db01/latest/vdb")
    assert shown["address"] == second
    assert [disk["address"] for disk in shown["disks"]] == [f"{second}/vdb"]
    assert len(shown["sources"]) == 2
    assert point in coldrise.run("list").stdout


def test_stats_match_the_stored_data(coldrise, tmp_path):
    image = Image(8 * MIB)
    image.fill(0, MIB, "random")
    for offset in range(2 * MIB, 3 * MIB, CHUNK):
        image.write(offset, b"text" * (CHUNK // 4))
    path = image.save(tmp_path / "disk.raw")
    coldrise.backup("web01", vda=path)
    first = coldrise.json("stats")
    # 1 MiB of different chunks, and 64 times the same.
    assert first["chunks"] == 64 + 1
    assert first["virtual_bytes"] == 8 * MIB
    assert first["recoverable_bytes"] == 2 * MIB
    assert first["unique_bytes"] == 65 * CHUNK
    assert first["deduplication_percent"] == pytest.approx(100 * (1 - 65 / 128), abs=0.01)
    image.fill(6 * MIB, CHUNK, "new")
    image.write(0, bytes(CHUNK))
    coldrise.backup("web01", vda=image.save(path))
    second = coldrise.json("stats")
    # One chunk came, one went.
    assert second["recoverable_bytes"] == 4 * MIB
    assert second["chunks"] == 66 and second["points"] == 2
    assert second["stored_bytes"] < second["unique_bytes"]
    saved = 100 * (1 - second["stored_bytes"] / second["recoverable_bytes"])
    assert second["reduction_percent"] == pytest.approx(saved, abs=0.01)
    # A session costs nothing until it is written to.
    coldrise.publish("web01/latest", "trial")
    assert coldrise.json("stats")["recoverable_bytes"] == 4 * MIB


def differing(coldrise, first, second):
    answer = coldrise.json("diff", first, second)
    assert answer["is_equal"] == all(disk["is_equal"] for disk in answer["disks"])
    (disk,) = answer["disks"]
    assert disk["range_count"] == len(disk["ranges"])
    assert all(r["differing_bytes"] == r["length_bytes"] for r in disk["ranges"])
    ranges = [(r["offset_bytes"], r["length_bytes"]) for r in disk["ranges"]]
    assert disk["differing_bytes"] == sum(length for _, length in ranges)
    return answer["is_equal"], ranges


def test_diff_of_backups(coldrise, image, point, tmp_path):
    image.fill(3 * MIB, 4096, "changed")
    image.zero(5 * MIB, CHUNK)
    second = coldrise.backup("web01", vda=image.save(tmp_path / "second.raw"))
    expected = [(3 * MIB, CHUNK), (5 * MIB, CHUNK)]
    assert differing(coldrise, point, second) == (False, expected)
    assert differing(coldrise, second, point) == (False, expected)
    assert differing(coldrise, point, "web01/latest~1") == (True, [])
    assert "2" in coldrise.run("diff", point, second).stdout


def test_diff_of_sizes(coldrise, point, image, tmp_path):
    larger = Image(10 * MIB)
    larger.write(0, bytes(image.content))
    larger.stored = image.stored.copy()
    second = coldrise.backup("web01", vda=larger.save(tmp_path / "larger.raw"))
    answer = coldrise.json("diff", point, second)
    assert not answer["is_equal"]
    assert answer["disks"][0]["to_size_bytes"] == 10 * MIB


def test_diff_of_disks_that_only_one_has(coldrise, point, tmp_path):
    second = coldrise.backup("web01", vda=tmp_path / "vda.raw", vdb=tmp_path / "vda.raw")
    answer = coldrise.json("diff", point, second)
    assert answer["only_to"] == ["vdb"] and answer["only_from"] == [] and not answer["is_equal"]
    across = coldrise.json("diff", f"{second}/vda", f"{second}/vdb")
    assert across["is_equal"]


def test_diff_with_captured_writes(coldrise, image, point, nbdkit, tmp_path):
    """Contents count, not their location."""
    coldrise.publish(point, "trial")
    with nbdkit() as server:
        with server.connect("live/trial/vda") as client:
            client.pwrite(b"a" * 4096, 2 * MIB)
            client.zero(4096, 5 * MIB)
            # The same as was there before.
            client.pwrite(image.read(0, 8192), 0)
            client.flush()
            expected = [(2 * MIB, 4096), (5 * MIB, 4096)]
            assert differing(coldrise, point, "live/trial") == (False, expected)
            one = coldrise.json("seal", "trial")["address"]
            assert differing(coldrise, point, one) == (False, expected)
            assert differing(coldrise, one, "live/trial") == (True, [])
            client.pwrite(b"b" * 4096, 2 * MIB)
            client.pwrite(b"b" * 512, 7 * MIB + 512)
            client.flush()
            two = coldrise.json("seal", "trial")["address"]
    assert differing(coldrise, one, two) == (False, [(2 * MIB, 4096), (7 * MIB, 4096)])
    changed = [(2 * MIB, 4096), (5 * MIB, 4096), (7 * MIB, 4096)]
    assert differing(coldrise, two, point) == (False, changed)
    # The same content by another way: a backup of what the session became.
    target = tmp_path / "two.raw"
    coldrise.json("restore", f"{two}/vda", target)
    backed_up = coldrise.backup("web01", vda=target)
    assert differing(coldrise, two, backed_up) == (True, [])
    assert differing(coldrise, backed_up, one)[1] == [(2 * MIB, 4096), (7 * MIB, 4096)]


def test_doctor(coldrise, point, live):
    healthy = coldrise.json("doctor")
    assert healthy["is_healthy"]
    found = {finding["check"]: finding for finding in healthy["findings"]}
    for check in ("nbdkit", "nbdkit plugin", "repository", "restore points", "sessions", "leftovers"):
        assert found[check]["status"] == "ok", found[check]
    text = coldrise.run("doctor").stdout
    assert text.startswith("ok    nbdkit") and "FAIL" not in text


def test_doctor_reports_nfs_requirements(tmp_path):
    nowhere = Coldrise(tmp_path)
    checks = {"nfs-ganesha": "nfs-ganesha", "rpcbind": "rpcbind", "ip": "iproute2"}

    def findings(path):
        # On a network of its own: tests beside this one start rpcbind.
        done = subprocess.run(["/usr/bin/unshare", "-n", PROGRAM, "--json", "doctor"], capture_output=True, text=True,
                              env=nowhere.environment() | {"PATH": path}, timeout=60, check=False)
        answer = json.loads(done.stdout.splitlines()[-1])
        return {finding["check"]: finding for finding in answer["findings"]}

    there = findings(os.environ["PATH"])
    for check in (*checks, "nfs-ganesha FSAL", "QEMU's NFS driver"):
        assert there[check]["status"] == "ok", there[check]
    missing = findings(str(tmp_path))
    for check, package in checks.items():
        assert missing[check]["status"] == "warn", missing[check]
        assert f"apt install {package})" in missing[check]["message"]
    # Another version than the FSAL is built for.
    other = tmp_path / "ganesha.nfsd"
    other.write_text("#!/bin/sh\necho NFS-Ganesha Release = V5.1\n", encoding="utf-8")
    other.chmod(0o755)
    other = findings(f"{tmp_path}:{os.environ['PATH']}")["nfs-ganesha"]
    assert other["status"] == "warn" and "V5.1" in other["message"], other


def test_doctor_without_a_repository(tmp_path):
    nowhere = Coldrise(tmp_path / "nowhere")
    done = nowhere.run("--json", "doctor")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 10 and not answer["is_healthy"]
    (finding,) = [f for f in answer["findings"] if f["check"] == "repository"]
    assert finding["status"] == "fail" and "coldrise init" in finding["message"]


def test_doctor_with_a_wrong_passphrase(coldrise):
    done = Coldrise(coldrise.repository).run("doctor")
    assert done.returncode == 12 and "FAIL" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(coldrise, shell):
    script = coldrise.run("completion", shell).stdout
    assert "unpublish" in script and "passphrase-file" in script
    assert coldrise.json("completion", shell)["shell"] == shell


def test_man_pages(coldrise, tmp_path):
    pages = tmp_path / "man"
    coldrise.json("man", pages)
    names = sorted(path.name for path in pages.iterdir())
    for name in ("coldrise.1", "coldrise-backup.1", "coldrise-serve.1", "coldrise-serve-nbd.1"):
        assert name in names
    assert "coldrise-man.1" not in names
    text = (pages / "coldrise-backup.1").read_text(encoding="utf-8")
    assert "follow\\-backing" in text and "dirty bitmap" in text


def test_help_and_version(coldrise):
    text = coldrise.run("--help").stdout
    for word in ("backup", "publish", "restore", "COLDRISE_REPO", "Exit codes"):
        assert word in text
    assert str(coldrise.repository) not in text
    assert coldrise.run("help", "backup").stdout == coldrise.run("backup", "--help").stdout
    assert coldrise.run("--version").stdout.startswith("coldrise ")


def test_reserved_words_are_not_machine_names(coldrise, tmp_path):
    disk = tmp_path / "vda.raw"
    disk.write_bytes(b"x" * 4096)
    for word in ("latest", "live", "latest~1"):
        refused = coldrise.run("--json", "backup", word, f"vda=raw:{disk}")
        assert refused.returncode == 2
        error = json.loads(refused.stdout)["error"]
        assert error["kind"] == "invalid_input" and word in error["message"]
