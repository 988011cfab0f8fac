"""Jobs and the queue of the service: schedules, limits, retries, kills; with real backups."""

import fcntl
import subprocess
import contextlib
import json
import random
import sqlite3
import time

import pytest

from support.nbdserver import DEADLINE_S
from support.service import Coldrised
from support.wallclock import BothClocks

KIB = 1 << 10


def images(folder, *machines):
    for machine in machines:
        (folder / f"{machine}.img").write_bytes(random.Random(machine).randbytes(256 * KIB))


def job(folder, name, machines, **more):
    disks = {"vda": f"raw:{folder}/{{machine}}.img"}
    return {"name": name, "kind": "backup", "machines": machines, "disks": disks, **more}


def wait_for(condition, what, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def ended(service, **wanted):
    """The ended runs of which the plan has these values."""
    runs = service.get("runs?count=1000")["runs"]
    return [run for run in runs if run["state"] != "running"
            and all((run["plan"] or {}).get(key) == value for key, value in wanted.items())]


def idle(service):
    return not service.get("queue")["runs"]


def start(service, name, machines=None):
    body = {} if machines is None else {"machines": machines}
    return service.post(f"jobs/{name}/start", body, expected=(202,))["runs"]


def test_a_schedule_creates_points(service, tmp_path):
    images(tmp_path, "web01", "web02")
    made = service.post("jobs", job(tmp_path, "often", ["web01", "web02"], schedule=["*:*:*"],
                                    retention={"keep_last": 2}))
    assert len(made["next_ms"]) == 5
    assert [b - a for a, b in zip(made["next_ms"], made["next_ms"][1:])] == [1000] * 4

    def succeeded():
        outcomes = service.get("jobs/often")["outcomes"]
        good = {(o["machine"], o["kind"]) for o in outcomes if o["state"] == "ok"}
        return good == {(m, k) for m in ("web01", "web02") for k in ("backup", "prune")}

    wait_for(succeeded, "both machines have a backup and a prune")
    wait_for(lambda: len(ended(service, job="often", command="backup", machine="web01")) >= 2,
             "the second backup")
    assert service.call("DELETE", "jobs/often").status == 204
    wait_for(lambda: idle(service), "the queue is empty")
    history = ended(service, job="often")
    assert [run for run in history if run["state"] not in ("ok", "cancelled")] == []
    # The schedule of another job comes round twice.
    service.post("jobs", job(tmp_path, "witness", ["web01"], schedule=["*:*:*"]))
    wait_for(lambda: len(ended(service, job="witness", command="backup")) >= 2, "the other job's backups")
    assert service.call("DELETE", "jobs/witness").status == 204
    assert len(ended(service, job="often")) == len(history), "a deleted job starts nothing"
    assert service.get("uncovered") == ["web01", "web02"]


def test_two_jobs_on_one_machine_queue_up(service, tmp_path):
    images(tmp_path, "web01")
    for name in ("first", "second"):
        service.post("jobs", job(tmp_path, name, ["web01"]))
    runs = [run for _ in range(3) for name in ("first", "second") for run in start(service, name)]
    wait_for(lambda: idle(service), "all runs end")
    states = {run: service.get(f"runs/{run}")["state"] for run in runs}
    assert set(states.values()) == {"ok"}, states
    assert len(states) == 6


def test_a_failing_source_is_retried(service, tmp_path):
    service.post("jobs", job(tmp_path, "late", ["web01"], retries=5, retry_seconds=1))
    [first] = start(service, "late")
    waiting = wait_for(lambda: [row for row in service.get("queue")["runs"] if row["attempt"] == 2],
                       "the second attempt")
    assert waiting[0]["run"] != first and "web01.img" in waiting[0]["reason"]
    assert service.get("alarms?active=true") == [], "an attempt is left"
    images(tmp_path, "web01")
    wait_for(lambda: idle(service), "the retry ends")
    [outcome] = service.get("jobs/late")["outcomes"]
    assert (outcome["state"], outcome["failures"]) == ("ok", 0)
    assert service.get(f"runs/{first}")["state"] == "failed"


def test_a_failure_without_retries_is_an_alarm(service, tmp_path):
    service.post("jobs", job(tmp_path, "bad", ["web01"], retries=0))
    start(service, "bad")
    [alarm] = wait_for(lambda: service.get("alarms?active=true"), "an alarm")
    assert alarm["key"] == "job:bad:backup:web01" and alarm["machine"] == "web01"
    assert alarm["severity"] == "fail" and "web01" in alarm["summary"]
    images(tmp_path, "web01")
    start(service, "bad")
    wait_for(lambda: not service.get("alarms?active=true"), "the alarm ends")


def test_missed_runs_are_made_up_once(service, tmp_path):
    images(tmp_path, "web01")
    # None of its runs may begin before the stop: it would outlive the service.
    service.post("jobs", job(tmp_path, "often", ["web01"], schedule=["yearly"]))
    service.stop()
    with sqlite3.connect(service.state / "coldrised.db") as database:
        # It was due a day ago, and is so again in a year at most.
        database.execute("UPDATE jobs SET next_due_ms = ?", (int((time.time() - 86400) * 1000),))
    service.start()
    wait_for(lambda: len(ended(service, job="often")) == 1 and idle(service), "one backup")
    assert service.get("jobs/often")["next_ms"][0] > (time.time() + 3600) * 1000


def test_a_window_holds_runs_of_the_schedule(service, tmp_path):
    images(tmp_path, "web01")
    hour = time.localtime().tm_hour
    window = f"{(hour + 3) % 24:02}:00-{(hour + 4) % 24:02}:00"
    service.post("jobs", job(tmp_path, "night", ["web01"], schedule=["*:*:*"], window=window))
    held = wait_for(lambda: [row for row in service.get("queue")["runs"] if row["reason"]], "a held run")
    assert "window" in held[0]["reason"] and held[0]["state"] == "waiting"
    assert ended(service) == []
    # A manual start is immediate.
    [run] = start(service, "night")
    wait_for(lambda: any(r["id"] == run for r in ended(service)), "the run by hand")
    # Cancelled, it does not vanish.
    held = next(row["run"] for row in service.get("queue")["runs"] if row["state"] == "waiting")
    assert service.call("DELETE", f"queue/{held}").status == 202
    wait_for(lambda: any(r["id"] == held and r["state"] == "cancelled" for r in ended(service)),
             "the cancelled run")


def test_50_concurrent_jobs_respect_the_limit(service, tmp_path):
    machines = [f"m{number:02}" for number in range(50)]
    images(tmp_path, *machines)
    assert service.call("PATCH", "queue", {"parallel": 3}).status == 204
    for machine in machines:
        service.post("jobs", job(tmp_path, machine, [machine]))
    at = int(time.time() * 1000) + 200
    with sqlite3.connect(service.state / "coldrised.db", timeout=30) as database:
        database.execute("UPDATE jobs SET next_due_ms = ?", (at,))
    service.post("jobs", job(tmp_path, "wake", ["m00"], enabled=False))
    most = 0

    def done():
        nonlocal most
        runs = service.get("runs?count=1000")["runs"]
        most = max(most, sum(run["state"] == "running" for run in runs))
        return len(runs) >= 50 and idle(service)

    wait_for(done, "50 runs", timeout_s=240)
    runs = ended(service)
    # A run that failed is tried again, so that its job has two.
    assert [run for run in runs if run["state"] != "ok"] == []
    assert sorted(run["plan"]["job"] for run in runs) == machines
    assert most <= 3


def test_events_arrive_immediately(service, tmp_path):
    images(tmp_path, "web01")
    service.post("jobs", job(tmp_path, "one", ["web01"]))
    with contextlib.closing(service.connection(timeout_s=60)) as stream:
        stream.request("GET", "/api/v1/events")
        response = stream.getresponse()
        [run] = start(service, "one")
        found, deadline = [], time.monotonic() + 60
        while not any(state in ("ok", "failed") for state in found):
            # The stream itself stays alive: it sends comments.
            assert time.monotonic() < deadline, found
            line = response.readline().decode()
            if line.startswith("data:"):
                event = json.loads(line[5:])
                if event.get("type") == "run" and event["id"] == run:
                    found.append(event["state"])
        assert found[-1] == "ok"


def test_permissions_of_each_role(service, tmp_path):
    images(tmp_path, "web01", "db01")
    service.post("jobs", job(tmp_path, "all", ["web01", "db01"]))
    service.post("jobs", {"name": "clean", "kind": "gc"})
    backup = service.token("backup", ["web*"])
    runs = service.post("jobs/all/start", {}, token=backup, over="https")["runs"]
    wait_for(lambda: idle(service), "the backup")
    assert [service.get(f"runs/{run}")["plan"]["machine"] for run in runs] == ["web01"]
    assert service.call("POST", "jobs/clean/start", {}, token=backup, over="https").status == 403
    viewer = service.token("viewer")
    assert len(service.get("jobs", token=viewer, over="https")) == 2
    for method, path, body in [("POST", "jobs", job(tmp_path, "x", ["x"])), ("DELETE", "jobs/all", None),
                               ("POST", "jobs/all/start", {}), ("PATCH", "queue", {"parallel": 1})]:
        assert service.call(method, path, body, token=viewer, over="https").status == 403, path
    secret = {**job(tmp_path, "x", ["x"]), "disks": {"vda": "nbd://u:hunter2@host/x"}}
    refused = service.call("POST", "jobs", secret)
    assert refused.status == 400 and b"hunter2" not in refused.body
    assert service.call("GET", "schedule/preview?calendar=never").status == 400
    assert len(service.get("schedule/preview?calendar=daily&count=3")["next_ms"]) == 3
    for bounds in ["", "x", "1", "2,1", "1,1", "0,1296000001", "-1,1", "100000000000000,100000000000001", ",".join(map(str, range(17)))]:
        refused = service.call("GET", f"schedule/days?bounds={bounds}")
        assert refused.status == 400 and b"bounds: give 2 to 16" in refused.body, bounds
    assert service.get("schedule/days?bounds=0,1,1296000000") == [{"start_ms": 0, "jobs": []}, {"start_ms": 1, "jobs": []}]


# Records, in the service's own transactions, the outcome of each occurrence of the job "often".
NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
PROBE = f"""
CREATE TABLE probe (what, run, machine, at_ms, old_ms, new_ms);
CREATE TRIGGER probe_queued AFTER INSERT ON queue WHEN NEW.job = 'often'
BEGIN INSERT INTO probe VALUES ('queued', NEW.run, NEW.machine, {NOW}, NULL, NULL); END;
CREATE TRIGGER probe_joined AFTER UPDATE OF due_ms ON queue
WHEN NEW.job = 'often' AND OLD.state = 'waiting' AND NEW.state = 'waiting'
BEGIN INSERT INTO probe VALUES ('joined', NEW.run, NEW.machine, {NOW}, NULL, NULL); END;
CREATE TRIGGER probe_moved AFTER UPDATE OF next_due_ms ON jobs WHEN NEW.name = 'often'
BEGIN INSERT INTO probe VALUES ('moved', NULL, NULL, {NOW}, OLD.next_due_ms, NEW.next_due_ms); END;
"""


def check_occurrences(database, machines, every_ms, downtimes, of_job):
    """Each occurrence was queued once per machine, or joined a run that still waited; those of a downtime
    are one. `downtimes` are the times from a kill to the next start, `of_job` the ended runs of the job. Returns
    the numbers of occurrences, of those that were made up for, and of joined ones."""
    log = database.execute("SELECT * FROM probe ORDER BY rowid").fetchall()
    queued, entries, due_ms, made_up, joined, moves = set(), [], None, 0, 0, 0
    for what, run, machine, at_ms, old_ms, new_ms in log:
        if what != "moved":
            entries.append(machine)
            joined += what == "joined"
            assert what == "joined" or run not in queued, "queued twice"
            queued.add(run)
            continue
        if new_ms is None:
            # Disabled.
            assert entries == []
            continue
        assert due_ms in (None, old_ms), "no occurrence is left out between two"
        assert sorted(entries) == sorted(machines), (entries, at_ms)
        assert old_ms <= at_ms + 1 and old_ms % every_ms == 0, "not before its time"
        assert new_ms == (at_ms // every_ms + 1) * every_ms, "the next one is the next"
        missed = (new_ms - old_ms) // every_ms - 1
        # At the start the service first checks the running processes.
        was_down = any(begin - every_ms <= at_ms and old_ms <= end + every_ms for begin, end in downtimes)
        assert missed == 0 or was_down, f"{missed} left out at {at_ms} though the service ran"
        made_up += missed
        due_ms, entries, moves = new_ms, [], moves + 1
    assert entries == [] and queued == of_job, "each queued run ended, and no other is of the job"
    return moves, made_up, joined


def test_kills_do_not_lose_runs(tmp_path, coldrise, request):
    """kill -9 of the service at random moments while a schedule and callers start backups."""
    kills = request.config.getoption("--service-kills")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    machines = [f"m{number}" for number in range(6)]
    images(tmp_path, *machines)
    service = Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file)
    accepted, downtimes = set(), []
    with service:
        with sqlite3.connect(service.state / "coldrised.db", timeout=30) as database:
            database.executescript(PROBE)
        service.post("jobs", job(tmp_path, "often", machines[:2], schedule=["*:*:0/3"]))
        service.post("jobs", job(tmp_path, "asked", machines[2:]))
        for number in range(kills):
            until = time.monotonic() + moments.uniform(0, 0.6)
            # Accepted means durable.
            accepted.update(start(service, "asked", [moments.choice(machines[2:])]))
            while time.monotonic() < until:
                time.sleep(0.002)
            killed_ms = time.time() * 1000
            service.kill()
            if number % 50 == 10:
                # Over two occurrences, which are made up for once.
                time.sleep(2 * 3.0)
            service.start()
            downtimes.append((killed_ms, time.time() * 1000))
        last = service.get("jobs/often")["next_ms"][0]
        wait_for(lambda: service.get("jobs/often")["next_ms"][0] > last, "the schedule goes on")
        stopped = {**job(tmp_path, "often", machines[:2]), "enabled": False}
        assert service.call("PUT", "jobs/often", stopped).status == 200
        # A run that was cancelled before its start has left the list of the queue, not yet the queue, when its record is written.
        with sqlite3.connect(service.state / "coldrised.db", timeout=30) as database:
            wait_for(lambda: database.execute("SELECT count(*) FROM queue").fetchone() == (0,), "all runs end", timeout_s=300)
        runs = service.get("runs?count=1000")["runs"]
        states = {run["id"]: run["state"] for run in runs}
        assert len(states) == len(runs), "none is listed twice"
        assert accepted <= set(states), "none is lost"
        bad = {run: state for run, state in states.items() if state not in ("ok", "cancelled")}
        assert not bad, [(service.get(f"runs/{run}"), service.call("GET", f"runs/{run}/log").body) for run in bad]
        assert all(states[run] == "ok" for run in accepted)
        # Each run made its own point: none ran twice.
        points = [run["result"]["counts"]["address"] for run in runs if run["state"] == "ok"]
        assert len(set(points)) == len(points)
        outcomes = service.get("jobs/often")["outcomes"]
        assert {outcome["machine"] for outcome in outcomes} == set(machines[:2])
        of_job = {run["id"] for run in runs if run["plan"]["job"] == "often"}
        with sqlite3.connect(service.state / "coldrised.db", timeout=30) as database:
            figures = check_occurrences(database, machines[:2], 3000, downtimes, of_job)
        print(f"{kills} kills, {len(runs)} runs; {figures[0]} times queued for an occurrence, "
              f"{figures[1]} more made up for, {figures[2]} joined")
        assert figures[0] >= 3 and figures[1] >= kills // 50
    # A kill while a plan was prepared leaves a folder .ID.new, which the history removes.
    assert [path.name for path in service.runs.glob(".*.planned")] == []
    with sqlite3.connect(service.state / "coldrised.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("SELECT count(*) FROM queue").fetchone() == (0,)


def test_a_backup_waits_for_a_short_write_of_another_command(coldrise, tmp_path):
    """The prune that follows another machine's backup holds the writer for a moment."""
    images(tmp_path, "web01")
    coldrise.json("backup", "web01", f"vda=raw:{tmp_path / 'web01.img'}")
    with open(coldrise.repository / "writer.lock", "r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        process = coldrise.start("backup", "web01", f"vda=raw:{tmp_path / 'web01.img'}")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        fcntl.flock(writer, fcntl.LOCK_UN)
        assert process.wait(timeout=DEADLINE_S) == 0
        fcntl.flock(writer, fcntl.LOCK_EX)
        clock = BothClocks(tmp_path)
        with clock.of(coldrise):
            busy = coldrise.start("backup", "web01", f"vda=raw:{tmp_path / 'web01.img'}")
        assert clock.end_of(busy) == 11
