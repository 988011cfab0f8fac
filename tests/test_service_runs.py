"""Runs over the API: visibility in lists, and the leftovers of killed runs."""

import json
import pathlib
import shutil
import subprocess
import tempfile

import pytest

from support.nbdserver import wait_until
from support.service import Coldrised
from test_check_boot import HALT, SAY, boot_record

MIB = 1 << 20


def old_run(service, number, machine):
    """A run of some months ago that has ended."""
    run = service.runs / f"20260101T01{number // 60:02d}{number % 60:02d}Z-0001-backup"
    run.mkdir(mode=0o700, parents=True)
    who = {"uid": 0, "user": "root", "pid": 1, "host": "h", "boot_id": "b"}
    plan = {"command": "backup", "arguments": [], "repository": None, "machine": machine, "point": None,
            "who": who, "started_at_ms": number, "job": None, "requested_by": None, "attempt": 0}
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "lock").touch()
    result = {"exit_code": 0, "error": None, "counts": None, "ended_at_ms": number}
    (run / "result.json").write_text(json.dumps(result))


def test_a_filter_finds_runs_beyond_the_first_page(service):
    old_run(service, 0, "db01")
    old_run(service, 1, "db01")
    for number in range(2, 130):
        old_run(service, number, "web01")
    listed = service.get("runs?machine=db01")
    assert len(listed["runs"]) == 2 and listed["has_more"] is False
    listed = service.get("runs?machine=db01&count=1")
    assert len(listed["runs"]) == 1 and listed["has_more"] is True
    assert listed["runs"][0]["plan"]["started_at_ms"] == 1
    listed = service.get("runs")
    assert len(listed["runs"]) == 100 and listed["has_more"] is True
    # A caller who sees one machine learns nothing of the others, not even how many there are.
    seen = service.get("runs", token=service.token("viewer", ["db*"]), over="https")
    assert [run["plan"]["machine"] for run in seen["runs"]] == ["db01"] * 2
    assert seen["has_more"] is False and set(seen) == {"runs", "has_more"}


@pytest.mark.encrypted
@pytest.mark.parametrize("own", ["passphrase", "key", "folder", "configuration"])
def test_a_source_replaced_by_a_link_to_service_files_is_refused(tmp_path, coldrise, own):
    """Its name was checked when the job was made; its owner has changed it since."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "web01.raw").write_bytes(b"x" * 4096)
    (tmp_path / "web01.xml").write_text("<domain/>")
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        service.post("jobs", {"name": "job", "kind": "backup", "machines": ["web01"],
                              "disks": {"vda": f"raw:{folder}/web01.raw"}, "config": f"{tmp_path}/web01.xml",
                              "retries": 0})
        changed = tmp_path / "web01.xml" if own == "configuration" else folder / "web01.raw"
        changed.unlink()
        if own == "folder":
            folder.rmdir()
            folder.symlink_to(service.state / "tls")
            (service.state / "tls" / "web01.raw").write_bytes(b"y" * 4096)
        else:
            target = service.state / "tls" / "key.pem" if own == "key" else coldrise.passphrase_file
            changed.symlink_to(target)
        service.post("jobs/job/start", {})
        wait_until(lambda: [run for run in service.get("runs")["runs"] if run["state"] != "running"], "the end of the run")
        [run] = service.get("runs")["runs"]
        assert run["state"] == "failed" and "a file of the service itself" in run["result"]["error"]["message"]
        assert service.get("machines") == []


def test_a_run_that_cannot_start_names_its_machine(tmp_path, coldrise):
    program = tmp_path / "coldrise"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    program.chmod(0o755)
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file,
                   options=["--program", program]) as service:
        disk = tmp_path / "disk"
        disk.write_bytes(b"x" * 4096)
        started = service.post("runs", {"kind": "backup", "machine": "web01", "disks": {"vda": f"raw:{disk}"}})
        run_id = started["run"]

        def ended():
            answer = service.call("GET", f"runs/{run_id}")
            return answer.status == 200 and answer.json["state"] == "failed"

        wait_until(ended, "the failed run")
        assert service.get(f"runs/{run_id}")["plan"]["machine"] == "web01"
        scoped = service.token("viewer", ["web*"])
        assert service.get(f"runs/{run_id}", token=scoped, over="https")["state"] == "failed"


def test_the_service_removes_leftovers_of_a_killed_check(tmp_path, coldrise, monkeypatch):
    temporary = pathlib.Path(tempfile.mkdtemp(prefix="own-"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    disk = tmp_path / "disk"
    disk.write_bytes(boot_record(SAY + HALT).ljust(MIB, b"\0"))
    address = coldrise.backup("web01", vda=disk)
    process = coldrise.start("check-boot", address, "--memory", "64M", stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE)
    try:
        assert any("firmware" in line for line in process.stderr)
        with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
            # The check is alive: its files are not touched.
            wait_until(lambda: service.get("sessions")["sessions"], "the session of the check")
            assert process.poll() is None and not service.get("runs")["runs"]
        process.kill()
        process.wait(timeout=60)
        wait_until(lambda: not coldrise.json("sessions")["sessions"][0]["is_served"], "the end of its servers")
        with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
            wait_until(lambda: not service.get("sessions")["sessions"], "the end of the session")
            wait_until(lambda: not list(temporary.iterdir()), "the end of its folders")
            [run] = service.get("runs")["runs"]
            assert run["plan"]["requested_by"] == "coldrised" and run["plan"]["machine"] == "web01"
    finally:
        process.kill()
        shutil.rmtree(temporary)
