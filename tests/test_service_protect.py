"""Jobs of the service that follow machines which run elsewhere, with a real QEMU."""

import contextlib
import os
import pathlib
import re
import signal

import pytest

from support.numbered_writes import publish_empty_disks
from support.running import Machine, assert_same_as_now
from test_service_jobs import ended, wait_for

SESSION = "web01-1"
ALARM = "lag:always:web01"
LAG = re.compile(r'^coldrise_session_lag_seconds\{session="web01-1",machine="web01"\} (\S+)$', re.MULTILINE)


@pytest.fixture
def machine(service, tmp_path):
    """Starts the machine, each time with the same monitor; it is ended."""
    link = pathlib.Path(service.short.name) / "web01.qmp"
    with contextlib.ExitStack() as stack:
        def start():
            running = Machine(tmp_path)
            stack.callback(running.close)
            link.unlink(missing_ok=True)
            link.symlink_to(running.monitor)
            return running

        yield start


def job(service, **more):
    return {"name": "always", "kind": "protect-live", "machines": ["web01"],
            "from": f"qmp:{service.short.name}/{{machine}}.qmp", "every_seconds": 1, "lag_limit_seconds": 5,
            "retry_seconds": 1, **more}


def marks(coldrise):
    """The marks of the session; none before it exists."""
    shown = coldrise.run("--json", "marks", SESSION)
    return coldrise.json("marks", SESSION)["marks"] if shown.returncode == 0 else []


def follower(service):
    """The run that follows the machine, once its process has begun."""
    found = [row["run"] for row in service.get("queue")["runs"] if row["kind"] == "protect-live"]
    assert len(found) <= 1
    return next((run for run in found if service.call("GET", f"runs/{run}").status == 200), None)


def alarm(service):
    return next((one for one in service.get("alarms?active=true") if one["key"] == ALARM), None)


def captured(coldrise, running, command):
    """Writes, and returns the mark that has it."""
    before = len(marks(coldrise))
    running.write("vda", command)
    return wait_for(lambda: len(found := marks(coldrise)) > before and found[-1]["address"], "the next mark")


def test_a_machine_is_followed_whatever_is_killed(service, coldrise, machine, tmp_path):
    running = machine()
    running.write("vda", "write -P 5 0 1M")
    service.post("jobs", job(service))
    wait_for(lambda: marks(coldrise), "the first mark")
    assert_same_as_now(coldrise, captured(coldrise, running, "write -P 6 1M 64k"), running, tmp_path)
    assert LAG.search(service.call("GET", "/metrics").body.decode()), "the metric of the lag"
    assert service.get("uncovered") == [] and service.get("alarms?active=true") == []
    # The service is killed: its run is adopted. The run is killed: another one follows.
    first = follower(service)
    service.kill()
    service.start()
    assert wait_for(lambda: follower(service), "the run of before") == first
    os.kill(service.get(f"runs/{first}")["plan"]["who"]["pid"], signal.SIGKILL)
    wait_for(lambda: follower(service) not in (None, first), "another run")
    assert service.get(f"runs/{first}")["state"] == "lost"
    assert_same_as_now(coldrise, captured(coldrise, running, "write -P 7 2M 64k"), running, tmp_path)
    second = follower(service)
    # QEMU is killed, and comes back. No run has ended.
    running.process.kill()
    raised = wait_for(lambda: alarm(service), "the alarm")
    assert raised["machine"] == "web01" and raised["topic"] == "lag" and raised["severity"] == "fail"
    assert "behind" in raised["summary"] and raised["command"] == f"coldrise marks {SESSION}"
    running.close()
    running = machine()
    wait_for(lambda: alarm(service) is None, "the end of the alarm")
    assert follower(service) == second
    # A start makes a restore point of what is there.
    mark = captured(coldrise, running, "write -P 8 3M 64k")
    [run] = service.post("jobs/always/start", {})["runs"]
    [sealed] = wait_for(lambda: ended(service, command="seal"), "the seal")
    assert sealed["id"] == run and sealed["state"] == "ok", sealed
    assert_same_as_now(coldrise, sealed["result"]["counts"]["address"], running, tmp_path)
    assert_same_as_now(coldrise, mark, running, tmp_path)
    # Disabled: its run ends, and nothing starts.
    assert service.call("PUT", "jobs/always", job(service, enabled=False)).status == 200
    wait_for(lambda: not service.get("queue")["runs"], "the end of the run")
    assert service.get(f"runs/{second}")["state"] == "ok"
    assert not coldrise.json("marks", SESSION)["follows"]["is_running"]
    assert running.leftovers() == [] and coldrise.run("verify").returncode == 0


def test_a_cancelled_run_stays_ended_until_the_job_is_started(service, coldrise, machine):
    running = machine()
    service.post("jobs", job(service, schedule=["*:*:*"]))
    wait_for(lambda: marks(coldrise), "the first mark")
    wait_for(lambda: any(one["kind"] == "seal" and one["state"] == "ok"
                           for one in service.get("jobs/always")["outcomes"]), "a restore point by the schedule")
    assert service.call("PUT", "jobs/always", job(service)).status == 200
    first = follower(service)
    assert service.call("POST", f"runs/{first}/cancel").status == 202
    assert "no process follows web01" == wait_for(lambda: alarm(service), "the alarm")["summary"]
    assert follower(service) is None
    [run] = service.post("jobs/always/start", {})["runs"]
    wait_for(lambda: alarm(service) is None, "the end of the alarm")
    assert follower(service) == run and captured(coldrise, running, "write -P 9 0 64k")
    # Changed: its run has the new interval.
    assert service.call("PUT", "jobs/always", job(service, every_seconds=2)).status == 200
    changed = wait_for(lambda: (found := follower(service)) not in (None, run) and found, "the changed run")
    arguments = service.get(f"runs/{changed}")["plan"]["arguments"]
    assert "--every=2s" in arguments, arguments
    assert service.call("DELETE", "jobs/always").status == 204
    wait_for(lambda: not service.get("queue")["runs"], "the end of the run")


def test_another_site_gets_the_marks_and_an_alarm_is_raised_if_it_is_behind(service, coldrise, far, machine, tmp_path):
    running = machine()
    answer = service.call("POST", "jobs", job(service, to="not a link"))
    assert answer.status == 400 and "to:" in answer.json["detail"]
    service.post("jobs", job(service, to="far", rate_bytes_per_second=10_000_000))
    wait_for(lambda: marks(far.program), "the first mark at the other site")
    mark = captured(coldrise, running, "write -P 6 1M 64k")
    wait_for(lambda: mark in {one["address"] for one in marks(far.program)}, "the mark at the other site")
    assert_same_as_now(far.program, mark, running, tmp_path)
    metric = 'coldrise_session_site_lag_seconds{session="web01-1",machine="web01",link="far"} '
    assert metric in service.call("GET", "/metrics").body.decode()
    [shown] = service.get(f"sessions/{SESSION}/marks")["sites"]
    assert shown["link"] == "far" and shown["is_running"] and shown["session"] == SESSION
    [row] = service.get("followed")
    assert row["state"] == "follows" and [site["link"] for site in row["sites"]] == ["far"]
    far.stop(signal.SIGKILL)
    key = f"{ALARM}:far"
    found = wait_for(lambda: [one for one in service.get("alarms?active=true") if one["key"] == key], "the alarm")
    assert "site far is" in found[0]["summary"] and found[0]["machine"] == "web01"
    # The machine itself is followed all the same.
    assert alarm(service) is None
    far.start()
    wait_for(lambda: not [one for one in service.get("alarms?active=true") if one["key"] == key], "the end of the alarm")


def test_a_job_sends_the_marks_of_a_machine_that_runs_from_coldrise(service, coldrise, far, nbdkit, tmp_path):
    device, _ = publish_empty_disks(coldrise, tmp_path, "trial").values()
    settings = {"name": "always", "kind": "protect-live", "machines": ["web01"], "from": "live", "to": "far", "retry_seconds": 1}
    assert "to:" in service.call("POST", "jobs", {**settings, "to": None}).json["detail"]
    assert "every_seconds:" in service.call("POST", "jobs", {**settings, "every_seconds": 1}).json["detail"]
    assert "to: there is no link nowhere" in service.call("POST", "jobs", {**settings, "to": "nowhere"}).json["detail"]
    assert "or live" in service.call("POST", "jobs", {**settings, "from": "Live"}).json["detail"]
    with nbdkit().connect(device) as nbd:
        nbd.pwrite(b"kept" * 1024, 0)
        nbd.flush()
        service.post("jobs", settings)
        first = wait_for(lambda: follower(service), "the run")
        assert service.get(f"runs/{first}")["plan"]["arguments"][-1] == "live/trial"
        wait_for(lambda: marks(far.program), "the mark at the other site")
        # A trial of the machine, served as well, does not take its place.
        newer = coldrise.publish("web01/latest", "trial2")["vda"]
        with nbdkit().connect(newer):
            [row] = service.get("followed")
            assert (row["session"], row["state"]) == ("trial", "follows") and row["follows"] is None
    assert coldrise.run("unpublish", "trial2", "--discard").returncode == 0
    # A killed run comes back.
    os.kill(service.get(f"runs/{first}")["plan"]["who"]["pid"], signal.SIGKILL)
    second = wait_for(lambda: (found := follower(service)) not in (None, first) and found, "the next run")
    wait_for(lambda: [site for site in service.get("sessions/trial/marks")["sites"] if site["is_running"]], "the connection")
    # The end of the session is the end of the run, and no failure.
    assert coldrise.run("unpublish", "trial", "--discard").returncode == 0
    wait_for(lambda: not service.get("queue")["runs"], "the end of the run")
    assert service.get(f"runs/{second}")["state"] == "ok"
    assert service.get("followed")[0]["state"] == "absent" and service.get("alarms?active=true") == []
