"""Verify, gc and boot checks as jobs of the service: their results, and the alarms of what they find."""

import random

import pytest

from support.nbdserver import wait_until
from test_check_boot import HALT, LOGIN, boot_record
from test_cli_repair import damage
from test_service_jobs import ended, idle, job, start, wait_for

pytestmark = pytest.mark.usefixtures("clock")

MIB = 1 << 20
GOOD, BAD, SILENT = boot_record(LOGIN), b"", boot_record(HALT)


def disk(tmp_path, record, machine="web01"):
    """Another content of the machine's disk, which begins with this boot record."""
    path = tmp_path / f"{machine}.img"
    number = int(path.read_bytes()[-4:].hex(), 16) + 1 if path.exists() else 1
    path.write_bytes(record.ljust(MIB - 4, b"\0") + number.to_bytes(4, "big"))
    return path


def run(service, name):
    """Starts a job, and waits for its runs and for those that follow them."""
    runs = start(service, name)
    wait_for(lambda: idle(service), f"the runs of {name}")
    return runs


def by_schedule(service, new):
    """Lets a job run once or more by its schedule; returns its runs."""
    service.post("jobs", {**new, "schedule": ["*:*:*"]})
    wait_for(lambda: service.get(f"jobs/{new['name']}")["outcomes"], "a run by schedule")
    assert service.call("PUT", f"jobs/{new['name']}", new).status == 200
    wait_for(lambda: idle(service), "the last run")
    found = ended(service, job=new["name"], requested_by=None)
    assert {run["state"] for run in found} <= {"ok", "cancelled"}
    return [run for run in found if run["state"] == "ok"]


def outcome(service, name, kind, machine=None):
    found = service.get(f"jobs/{name}")["outcomes"]
    return next(o for o in found if (o["kind"], o.get("machine")) == (kind, machine))


def seen(service, verdict):
    """The machine web01, when the service has seen this result of its newest point; None: no check."""
    def shown():
        answer = service.call("GET", "machines/web01")
        if answer.status != 200:
            return None
        found = answer.json
        badge = found.get("boot") or {}
        is_latest = badge.get("address") in (None, found["latest"]["address"])
        return found if is_latest and badge.get("verdict") == verdict else None

    return wait_for(shown, f"the boot check {verdict}")


def test_checks_run_by_schedule_and_by_hand(service, tmp_path, coldrise):
    coldrise.backup("web01", vda=disk(tmp_path, GOOD))
    coldrise.backup("db01", vda=disk(tmp_path, random.Random(1).randbytes(MIB // 2), "db01"))
    coldrise.json("forget", coldrise.backup("db01", vda=disk(tmp_path, random.Random(2).randbytes(MIB // 2), "db01")))
    wait_for(lambda: {m["machine"] for m in service.get("machines")} == {"db01", "web01"}, "the machines")
    # Each kind once by its schedule, once by hand.
    everything = {"name": "verify-all", "kind": "verify"}
    latest = {"name": "verify-web", "kind": "verify", "machines": ["web*"]}
    gc = {"name": "clean", "kind": "gc"}
    boots = {"name": "boots", "kind": "check-boot", "machines": ["web*"], "boot_check": {"until": "login"}}
    for new in (everything, latest, gc, boots):
        name, kind = new["name"], new["kind"]
        scheduled = by_schedule(service, new)
        [by_hand] = run(service, name)
        last = service.get(f"runs/{by_hand}")
        assert scheduled and last["state"] == "ok", last
        assert (last["plan"]["job"], last["plan"]["requested_by"]) == (name, "unix:root")
        machine = "web01" if new.get("machines") else None
        kept = outcome(service, name, kind, machine)
        assert (kept["run"], kept["state"], kept["failures"]) == (by_hand, "ok", 0)
        assert kept["last_success_ms"] == kept["ended_ms"] and not kept.get("message")
        counts = last["result"]["counts"]
        if kind == "verify":
            assert counts["is_clean"] and counts["chunks"] > 0
        elif kind == "gc":
            # The scheduled one removed the data of the forgotten point.
            first = scheduled[-1]["result"]["counts"]
            assert first["chunks_deleted"] >= 32 and counts["chunks_deleted"] == 0, (first, counts)
        else:
            assert (counts["verdict"], counts["rung"]) == ("ok", "login")
    assert seen(service, "ok")["boot"]["rung"] == "login"
    points = service.get("points")["machines"]
    verdicts = {machine["machine"]: machine["points"][-1].get("boot") for machine in points}
    assert verdicts == {"db01": None, "web01": "ok"}
    assert service.get("machines/db01").get("boot") is None
    assert {alarm["topic"] for alarm in service.get("alarms?active=true")} <= {"uncovered"}


def test_a_boot_check_follows_the_backup_and_raises_the_alarm(service, inbox, tmp_path, coldrise):
    disk(tmp_path, GOOD)
    backup = job(tmp_path, "nightly", ["web01"], boot_check={"when": "always"})
    service.post("jobs", backup)

    def checks():
        return [run["result"]["counts"] for run in reversed(ended(service, job="nightly", command="check-boot"))]

    run(service, "nightly")
    first = seen(service, "ok")["latest"]["address"]
    [check] = checks()
    assert (check["address"], check["verdict"]) == (first, "ok")
    # A check of today is enough for the day and the week.
    for when in ("daily", "weekly", "never"):
        changed = {**backup, "boot_check": {"when": when}}
        assert service.call("PUT", "jobs/nightly", changed).status == 200
        disk(tmp_path, GOOD)
        run(service, "nightly")
    assert len(checks()) == 1 and seen(service, None)["last_boot_check"]["address"] == first
    # A check on the terminal counts as well: it came less far than usual.
    coldrise.backup("web01", vda=disk(tmp_path, SILENT))
    silent = coldrise.run("check-boot", "web01/latest", "--time-limit", "3s", timeout_s=300)
    assert silent.returncode == 14 and "worse" in silent.stdout + silent.stderr
    worse = inbox.message()
    assert (worse["key"], worse["occasion"], worse["severity"]) == ("boot:web01", "raised", "warn")
    assert "reaches an earlier stage" in worse["summary"] and worse["machine"] == "web01"
    [point] = [p for p in service.get("machines/web01/points")["points"] if p.get("boot")][1:]
    assert (point["boot"], point["is_boot_worse"]) == ("not_proven", True)
    # One that fails is worse than that.
    assert service.call("PUT", "jobs/nightly", backup).status == 200
    disk(tmp_path, BAD)
    run(service, "nightly")
    bad = seen(service, "failed")
    assert bad["last_verified_boot"]["address"] == first
    failed = inbox.message()
    assert (failed["key"], failed["occasion"], failed["severity"]) == ("boot:web01", "raised", "fail")
    for part in (bad["latest"]["address"], first):
        assert part in failed["text"], failed["text"]
    kept = outcome(service, "nightly", "check-boot", "web01")
    assert (kept["state"], kept["failures"]) == ("failed", 1) and idle(service), "proven once is enough"
    # A newer, unchecked point proves nothing. One that boots clears the alarm.
    coldrise.backup("web01", vda=disk(tmp_path, GOOD))
    seen(service, None)
    assert inbox.messages(1) == []
    disk(tmp_path, GOOD)
    run(service, "nightly")
    cleared = inbox.message()
    assert (cleared["key"], cleared["occasion"]) == ("boot:web01", "cleared")
    assert seen(service, "ok")["last_verified_boot"]["address"] != first
    assert [check["verdict"] for check in checks()] == ["ok", "failed", "ok"]
    # Nothing else was reported: no second alarm of the failed run.
    assert inbox.messages(1) == [] and service.get("alarms?active=true") == []


def test_damage_is_reported_with_affected_points_until_healed(service, inbox, tmp_path, coldrise):
    content = random.Random(5).randbytes(8 * MIB)
    (tmp_path / "web01.img").write_bytes(content)
    service.post("jobs", job(tmp_path, "nightly", ["web01"]))
    # With retries: damage that is found is not looked for again.
    service.post("jobs", {"name": "check", "kind": "verify", "retries": 5, "retry_seconds": 1})
    run(service, "nightly")
    address = seen(service, None)["latest"]["address"]
    run(service, "check")
    assert outcome(service, "check", "verify")["state"] == "ok"
    damage(coldrise, 3)
    [found] = run(service, "check")
    result = service.get(f"runs/{found}")["result"]
    assert (result["exit_code"], result["counts"]["damaged_chunks"]) == (1, 3)
    raised = inbox.message()
    assert (raised["key"], raised["topic"], raised["occasion"]) == ("job:check:verify", "damage", "raised")
    assert (raised["severity"], raised["machine"], raised["run"]) == ("fail", "web01", found)
    assert "3 chunks" in raised["summary"] and "(job check)" in raised["summary"]
    assert f"affected: {address}/vda" in raised["text"] and "repair" in raised["text"]
    kept = outcome(service, "check", "verify")
    assert (kept["state"], kept["failures"]) == ("failed", 1) and "3 chunks" in kept["message"]
    # Repair records the chunks, and the service notices this.
    assert coldrise.run("repair").returncode == 1
    noted = inbox.message()
    assert (noted["key"], noted["topic"], noted["occasion"]) == ("damage", "damage", "raised")
    assert noted["summary"] == "3 chunks of the repository are damaged"
    assert service.get("repository/damage")["damaged_chunks"] == 3
    # The next backup reads the content from its source.
    run(service, "nightly")
    healed = inbox.message()
    assert (healed["key"], healed["occasion"]) == ("damage", "cleared")
    run(service, "check")
    good = inbox.message()
    assert (good["key"], good["occasion"]) == ("job:check:verify", "cleared")
    assert inbox.messages(1) == [] and service.get("alarms?active=true") == []


def test_damage_found_by_a_manual_verify_is_an_alarm_until_a_clean_verify(service, inbox, tmp_path, coldrise):
    (tmp_path / "web01.img").write_bytes(random.Random(6).randbytes(4 * MIB))
    service.post("jobs", job(tmp_path, "nightly", ["web01"]))
    run(service, "nightly")
    damage(coldrise, 1)
    service.post("runs", {"kind": "verify"}, expected=(202,))
    message = inbox.message()
    assert (message["topic"], message["occasion"]) == ("damage", "raised"), message
    assert "1 chunk" in message["summary"] and message["machine"] == "web01"
    assert inbox.messages(1) == []
    # A verify of one address does not change the state of the whole repository.
    address = seen(service, None)["latest"]["address"]
    service.post("runs", {"kind": "verify", "address": address}, expected=(202,))
    assert inbox.message()["key"] == f"damage:verify:{address}"
    assert coldrise.run("repair").returncode == 1

    def is_told():
        # The alarms are computed every 20 s; a request wakes the service.
        service.clock.skip(20)
        service.get("alarms")
        return not inbox.requests.empty()

    wait_until(is_told, "the alarm")
    assert inbox.message()["key"] == "damage"
    run(service, "nightly")
    assert (healed := inbox.message())["key"] == "damage" and healed["occasion"] == "cleared"
    service.post("runs", {"kind": "verify", "address": address}, expected=(202,))
    gone = inbox.message()
    assert (gone["key"], gone["occasion"]) == (f"damage:verify:{address}", "cleared")
    assert [alarm["key"] for alarm in service.get("alarms?active=true&machine=web01")] == ["damage:verify"]
    service.post("runs", {"kind": "verify"}, expected=(202,))
    gone = inbox.message()
    assert (gone["key"], gone["occasion"]) == ("damage:verify", "cleared")
    assert inbox.messages(1) == []
