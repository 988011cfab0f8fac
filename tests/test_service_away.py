"""The service loses a resource for a while, under load: the repository, the lock, free space."""

import os
import random
import signal
import sqlite3
import subprocess
import time

import pytest

from support.cli import Coldrise
from support.full_drive import fill
from support.service import Coldrised
from support.sources import tool
from test_service_jobs import ended, idle, images, job, start, wait_for

pytestmark = pytest.mark.usefixtures("clock")

MIB = 1 << 20


def skip(service, seconds):
    """A change wakes the queue."""
    service.clock.skip(seconds)
    assert service.call("PATCH", "queue", {"parallel": 4}).status == 204


def test_a_run_waits_for_a_command_on_the_terminal(service, inbox, tmp_path, coldrise):
    """Exit code 11: it counts as no failure, and is tried again until it succeeds."""
    source = tmp_path / "web01.img"
    source.write_bytes(random.Random(1).randbytes(64 * MIB))
    service.post("jobs", job(tmp_path, "nightly", ["web01"], retries=0))
    by_hand = coldrise.start("--json", "backup", "web01", f"vda=raw:{source}", "--rate", "1M",
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert any('"storing"' in line for line in iter(by_hand.stdout.readline, "")), "it has the machine"
        [first] = start(service, "nightly")
        wait_for(lambda: ended(service, job="nightly"), "the first attempt")
        assert service.get(f"runs/{first}")["result"]["exit_code"] == 11
        [row] = wait_for(lambda: [r for r in service.get("queue")["runs"] if r["state"] == "waiting"], "it waits")
        assert (row["attempt"], row["job"], row["machine"]) == (1, "nightly", "web01")
        assert "web01" in row["reason"] and row["busy_since_ms"] and row["run"] != first
        assert 14_000 <= row["due_ms"] - row["created_ms"] <= 16_000
        assert service.get("alarms") == [] and service.get("jobs/nightly")["outcomes"] == []
    finally:
        by_hand.send_signal(signal.SIGINT)
        assert by_hand.wait(timeout=30) == 130
        by_hand.communicate()
    skip(service, 16)
    wait_for(lambda: idle(service), "the next attempt")
    [outcome] = service.get("jobs/nightly")["outcomes"]
    assert (outcome["state"], outcome["failures"], outcome["run"]) == ("ok", 0, row["run"])
    assert inbox.messages(1) == []


def test_retries_wait_longer_each_time(service, inbox, tmp_path):
    service.post("jobs", job(tmp_path, "late", ["web01"], retries=3, retry_seconds=1))
    start(service, "late")
    pauses = {}

    def gather():
        for row in service.get("queue")["runs"]:
            if row["attempt"] > 1:
                pauses[row["attempt"]] = (row["due_ms"] - row["created_ms"]) / 1000
                skip(service, 1)
        return idle(service)

    wait_for(gather, "all attempts")
    assert sorted(pauses) == [2, 3, 4]
    assert [int(pauses[attempt]) for attempt in (2, 3)] == [1, 2] and 4 <= pauses[4] <= 5
    runs = ended(service, job="late")
    assert sorted(run["plan"]["attempt"] for run in runs) == [1, 2, 3, 4]
    # One alarm, after the last; the source returns, and it is cleared.
    raised = inbox.message()
    assert (raised["key"], raised["run"]) == ("job:late:backup:web01", runs[0]["id"])
    images(tmp_path, "web01")
    start(service, "late")
    assert inbox.message()["occasion"] == "cleared"
    assert inbox.messages(1) == []


def failures(service):
    return len([run for run in ended(service, job="often") if run["state"] == "failed"])


def test_the_repository_disappears_under_load_and_returns(service, inbox, tmp_path, coldrise):
    machines = ["web01", "web02", "web03"]
    images(tmp_path, *machines)
    service.post("jobs", job(tmp_path, "often", machines, schedule=["*:*:*"], retries=20, retry_seconds=1))
    wait_for(lambda: len(ended(service, job="often")) >= 3, "the first backups")
    away = coldrise.repository.with_name("away")
    for is_unmounted in (False, True):
        coldrise.repository.rename(away)
        if is_unmounted:
            # An empty mount point.
            coldrise.repository.mkdir()
        already = failures(service)
        try:
            wait_for(lambda: failures(service) >= already + 3
                     and service.call("GET", "machines").status == 503, "runs fail")
            assert service.call("GET", "/healthz").status == 200
            assert service.call("GET", "queue").status == 200
        finally:
            if is_unmounted:
                assert os.listdir(coldrise.repository) == [], "a run left something there"
                coldrise.repository.rmdir()
            away.rename(coldrise.repository)
        back_ms = time.time() * 1000

        def recovered(back_ms=back_ms):
            found = service.get("jobs/often")["outcomes"]
            return len(found) == 3 and all(o["state"] == "ok" and o["ended_ms"] > back_ms for o in found)

        wait_for(recovered, "each machine has a new backup", timeout_s=60)
    stopped = {**job(tmp_path, "often", machines), "enabled": False}
    assert service.call("PUT", "jobs/often", stopped).status == 200
    wait_for(lambda: idle(service), "the last runs")
    runs = ended(service, job="often")
    assert {run["state"] for run in runs} <= {"ok", "failed", "cancelled"}, "none is lost"
    made = {run["result"]["counts"]["address"] for run in runs if run["state"] == "ok"}
    wait_for(lambda: {p["address"] for m in service.get("points")["machines"] for p in m["points"]} == made,
             "every point that was made is there")
    wait_for(lambda: all(alarm["key"].startswith("uncovered") for alarm in service.get("alarms")), "alarms to clear")
    assert coldrise.json("verify")["is_clean"]


def test_a_full_drive_under_the_state_folder_is_reported(tmp_path, coldrise):
    """Reads work, changes are refused with a message, and once there is space the schedule continues by itself."""
    images(tmp_path, "web01")
    service = Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file)
    service.state.mkdir(mode=0o700)
    tool("mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", service.state)
    try:
        with service:
            service.post("jobs", job(tmp_path, "often", ["web01"], schedule=["*:*:*"], retries=20, retry_seconds=1))
            wait_for(lambda: len(ended(service, job="often")) >= 2, "the first backups")
            fill(service.state / "ballast")
            wait_for(lambda: service.call("POST", "jobs", job(tmp_path, "more", ["web02"])).status == 507,
                     "a change is refused")
            refused = service.call("POST", "jobs", job(tmp_path, "more", ["web02"]))
            assert refused.status == 507 and "full" in refused.json["detail"], refused.body
            before = time.monotonic()
            # For some seconds, and some occurrences.
            while time.monotonic() < before + 4:
                for path in ("machines", "jobs", "queue", "runs", "alarms", "/healthz"):
                    assert service.call("GET", path).status == 200, path
                time.sleep(0.2)
            (service.state / "ballast").unlink()
            room_ms = time.time() * 1000
            wait_for(lambda: [r for r in ended(service, job="often") if r["state"] == "ok"
                              and r["plan"]["started_at_ms"] > room_ms], "the schedule goes on", timeout_s=60)
            stopped = {**job(tmp_path, "often", ["web01"]), "enabled": False}
            wait_for(lambda: service.call("PUT", "jobs/often", stopped).status == 200, "changes are taken")
            wait_for(lambda: idle(service), "the last runs")
            # Runs that could not write their result are lost, never ok; and no run stays in the queue.
            made = {run["result"]["counts"]["address"] for run in ended(service, job="often") if run["state"] == "ok"}
            wait_for(lambda: {p["address"] for m in service.get("points")["machines"] for p in m["points"]} >= made,
                     "every point that was made is there")
            service.stop()
            with sqlite3.connect(service.state / "coldrised.db") as database:
                assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    finally:
        tool("umount", "--lazy", service.state)


def test_every_change_has_an_audit_log_entry(tmp_path, coldrise):
    """One change is done before its entry turns out not to fit; it is kept, and later ones wait for it."""
    source = tmp_path / "web01.img"
    source.write_bytes(random.Random(1).randbytes(8 * MIB))
    service = Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file, options=["--runs", tmp_path / "runs"])
    service.state.mkdir(mode=0o700)
    tool("mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", service.state)
    try:
        with service:
            slow = {"kind": "backup", "machine": "web01", "disks": {"vda": f"raw:{source}"}, "rate_bytes_per_second": 65536}
            run = service.post("runs", slow)["run"]

            def is_running():
                found = service.call("GET", f"runs/{run}")
                return found.status == 200 and found.json["state"] == "running"

            def cancel(which):
                return service.call("POST", f"runs/{which}/cancel", {})

            def results():
                entries = [entry for entry in service.get("audit?count=1000") if entry["action"].endswith("/cancel")]
                return [entry["result"] for entry in reversed(entries)]

            wait_for(is_running, "the backup runs")
            fill(service.state / "ballast")
            # These change nothing but the audit log.
            answers = []
            while len(answers) < 1000 and 507 not in answers:
                answers.append(cancel("20261123T014500Z-8001-backup").status)
            done = len(answers) - 1
            assert answers == [404] * done + [507]
            assert results() == ["404"] * (done - 1), "the last one is in memory only"
            refused = cancel(run)
            assert refused.status == 507 and "full" in refused.json["detail"], refused.body
            assert is_running()
            (service.state / "ballast").unlink()
            wait_for(lambda: cancel(run).status == 202, "changes are taken")
            assert results() == ["404"] * done + ["ok"]
            assert service.get("audit/chain")["broken_at"] is None
            wait_for(lambda: not is_running(), "the backup ends")
    finally:
        tool("umount", "--lazy", service.state)


@pytest.mark.parametrize(("min_free", "severity"), [(10, "fail"), (40, "warn")])
def test_little_room_in_the_repository_is_an_alarm(tmp_path, min_free, severity):
    drive = tmp_path / "drive"
    drive.mkdir()
    tool("mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", drive)
    try:
        coldrise = Coldrise.encrypted(drive)
        coldrise.init()
        left = (1 if severity != "warn" else 16) << 20
        free = os.statvfs(drive)
        (drive / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize - left))
        service = Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file)
        service.min_free = min_free
        with service:
            wait_for(lambda: [(a["key"], a["severity"]) for a in service.get("alarms?active=true")]
                     == [("space", severity)], "the alarm")
    finally:
        tool("umount", "--lazy", drive)
