"""Alarms, the messages to their targets, and restarts."""

import json
import os
import queue
import socket
import subprocess
import time

import pytest

from support.cli import PROGRAM, Coldrise
from support.messages import active, add, change, wait_for, webhook
from support.service import Coldrised
from support.sinks import WebSink
from support.wallclock import BothClocks


def ask(service, coldrise, number, *arguments):
    """Runs a command as the service does for a user of the API; returns the run's id."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    name = f"{stamp}-{0x9000 + number:04x}-{arguments[0]}"
    planned = service.runs / f".{name}.planned"
    planned.mkdir(mode=0o700, parents=True)
    words = ["--repo", str(coldrise.repository)]
    if coldrise.passphrase_file is not None:
        words += ["--passphrase-file", str(coldrise.passphrase_file)]
    request = {"arguments": words + list(arguments), "requested_by": "operator"}
    (planned / "request.json").write_text(json.dumps(request))
    (planned / "lock").touch()
    environment = {**os.environ, "COLDRISE_RUNS": str(service.runs)}
    subprocess.run([PROGRAM, "run", name], env=environment, capture_output=True, timeout=120, check=False)
    assert (service.runs / name / "result.json").exists()
    return name


def test_a_job_alarm_is_sent_once_and_cleared_by_a_success(service, jobs, web):
    add(service, webhook(web.url))
    jobs.add("nightly", ["web01"])
    [run_id] = jobs.run("nightly")
    raised = web.message()
    key = "job:nightly:backup:web01"
    assert (raised["topic"], raised["occasion"], raised["severity"]) == ("run_failed", "raised", "fail")
    assert (raised["machine"], raised["run"], raised["key"]) == ("web01", run_id, key)
    assert raised["subject"] == "[Coldrise] fail: backup of web01 failed (job nightly)"
    for part in (str(jobs.disk("web01")), "Exit code: ", "Machine: web01", run_id, "coldrise --repo", f"#/runs/{run_id}"):
        assert part in raised["text"], part
    # The next failure is the same alarm.
    jobs.run("nightly")
    wait_for(lambda: "failed 2 times" in service.get("alarms")[0]["details"])
    assert active(service) == [(key, "fail")] and web.requests.empty()
    jobs.disk("web01").write_bytes(os.urandom(1 << 20))
    jobs.run("nightly")
    cleared = web.message()
    assert (cleared["occasion"], cleared["key"]) == ("cleared", key)
    assert "To do" not in cleared["text"]
    wait_for(lambda: active(service) == [])
    assert web.messages(1) == []


def test_ages_and_machines_without_a_job(service, jobs, web, coldrise, tmp_path):
    add(service, webhook(web.url))
    disk = tmp_path / "disk.raw"
    disk.write_bytes(os.urandom(1 << 20))
    coldrise.json("backup", "web01", f"vda=raw:{disk}", "--time", "20240101T000000Z")
    raised = web.message()
    assert (raised["key"], raised["severity"]) == ("uncovered:web01", "warn")
    jobs.add("nightly", ["web01"], age_limit_hours=24)
    received = {(m["key"], m["occasion"]) for m in (web.message(), web.message())}
    assert received == {("uncovered:web01", "cleared"), ("age:web01", "raised")} and web.messages(2) == []
    jobs.disk("web01").write_bytes(os.urandom(1 << 20))
    jobs.run("nightly")
    cleared = web.message()
    assert (cleared["key"], cleared["occasion"]) == ("age:web01", "cleared")


def test_api_runs_are_reported_and_terminal_runs_only_if_lost(service, jobs, web, coldrise):
    add(service, webhook(web.url, topics=["run_failed", "run_lost", "run_succeeded"]))
    asked = ask(service, coldrise, 1, "verify")
    failed = ask(service, coldrise, 2, "backup", "web01", "vda=raw:/missing")
    by_hand = Coldrise(coldrise.repository, coldrise.passphrase_file, runs=service.runs)
    assert by_hand.run("backup", "web01", "vda=raw:/missing").returncode != 0
    plan = json.loads((service.runs / failed / "plan.json").read_text())
    lost = service.runs / failed.replace("-9002-", "-0001-")
    # Immediately: the service checks at any time.
    new = service.folder / "lost"
    new.mkdir(mode=0o700)
    (new / "lock").touch()
    (new / "plan.json").write_text(json.dumps({**plan, "requested_by": None}))
    new.rename(lost)
    received = {}
    while len(received) < 3:
        message = web.message()
        received[message["run"]] = (message["topic"], message["occasion"])
    assert received == {asked: ("run_succeeded", "event"), failed: ("run_failed", "event"), lost.name: ("run_lost", "event")}
    more = web.messages(1)
    assert more == [], [(message["run"], message["topic"], message["occasion"]) for message in more]
    assert active(service) == []


def test_a_message_survives_a_kill_in_the_middle_of_its_delivery(service, jobs):
    with WebSink("hang") as sink:
        add(service, webhook(sink.url))
        jobs.add("nightly", ["web01"])
        jobs.run("nightly")
        first = sink.message()
        service.kill()
        sink.behaviour = "ok"
        service.start()
        assert sink.message()["id"] == first["id"]
        target = wait_for(lambda: next((t for t in service.get("notifications/targets") if not t["waiting"]), None))
        assert target["last_result"]["is_ok"]
        assert active(service) == [("job:nightly:backup:web01", "fail")]
        # A further restart repeats nothing.
        service.stop()
        service.start()
        assert sink.messages(2) == []


def test_a_refusing_target_is_retried_without_delaying_others(service, jobs, web):
    with WebSink(500) as broken:
        target = add(service, webhook(broken.url))
        add(service, webhook(web.url, "gotify"))
        jobs.add("nightly", ["web01"])
        jobs.run("nightly")
        assert web.message()["title"].startswith("[Coldrise] fail")
        shown = wait_for(lambda: next((t for t in service.get("notifications/targets")
                                       if t["id"] == target["id"] and t["last_result"]), None))
        assert not shown["last_result"]["is_ok"] and "answered 500" in shown["last_result"]["text"]
        assert shown["waiting"] == 1
        broken.requests.get(timeout=5)
        # A change of the target sends waiting messages immediately.
        broken.behaviour = "ok"
        change(service, target)
        assert broken.message()["topic"] == "run_failed"


def test_many_messages_become_one_and_switching_off_drops_them(service, jobs):
    with WebSink(500) as sink:
        target = add(service, webhook(sink.url))
        jobs.add("nightly", [f"web{number}" for number in range(8)])
        jobs.run("nightly")
        wait_for(lambda: service.get("notifications/targets")[0]["waiting"] == 8)
        assert sink.requests.qsize() <= 8, "a new message is tried at once, and tries no other again"
        while not sink.requests.empty():
            sink.requests.get()
        sink.behaviour = "ok"
        change(service, target)
        # An attempt with the last message may have been under way.
        received = [sink.message()]
        received += [sink.message()] if "messages" not in received[0] else []
        count = len(received[-1]["messages"])
        assert count + len(received) == 9 and received[-1]["subject"] == f"[Coldrise] fail: {count} messages"
        wait_for(lambda: service.get("notifications/targets")[0]["waiting"] == 0)
        sink.behaviour = 500
        service.call("DELETE", "jobs/nightly")
        wait_for(lambda: service.get("notifications/targets")[0]["waiting"] == 8)
        assert change(service, target, is_enabled=False)["waiting"] == 0


def test_targets_choose_machines_topics_and_severity(service, jobs, web):
    add(service, webhook(web.url, machines=["db*"]))
    add(service, webhook(web.url, "slack", topics=["damage"]))
    add(service, webhook(web.url, "ntfy", is_enabled=False))
    jobs.add("nightly", ["web01", "db01"])
    jobs.run("nightly")
    assert web.message()["machine"] == "db01" and web.messages(3) == []


def test_only_administrators_see_targets_and_scopes_bound_alarms(service, jobs):
    jobs.add("nightly", ["web01", "db01"])
    jobs.run("nightly")
    wait_for(lambda: len(active(service)) == 2)
    for role in ("viewer", "operator", "backup", "metrics"):
        token = service.token(role)
        for method, path in [("GET", "notifications/targets"), ("GET", "notifications/settings")]:
            assert service.call(method, path, token=token, over="https").status == 403
        expected = 200 if role in ("viewer", "operator") else 403
        assert service.call("GET", "alarms", token=token, over="https").status == expected
    scoped = service.token("operator", ["db*"])
    seen = service.get("alarms", token=scoped, over="https")
    assert [alarm["machine"] for alarm in seen] == ["db01"]
    path = "alarms/job:nightly:backup:{}/acknowledge"
    assert service.call("POST", path.format("web01"), token=scoped, over="https").status == 404
    done = service.call("POST", path.format("db01"), token=scoped, over="https")
    assert done.status == 200 and done.json["acknowledged_by"].startswith("token:")
    viewer = service.token("viewer")
    assert service.call("POST", path.format("db01"), token=viewer, over="https").status == 403


def test_an_unreachable_repository_raises_an_alarm_until_it_returns(coldrise, tmp_path):
    clock = BothClocks(tmp_path)

    def seen():
        # The alarms are computed every 20 s.
        clock.skip(20)
        return active(service)

    with Coldrised(tmp_path, coldrise.repository, environment=clock.environment()) as service:
        wait_for(lambda: service.call("GET", "machines").status == 200)
        away = coldrise.repository.with_name("away")
        coldrise.repository.rename(away)
        [(key, _)] = wait_for(seen)
        assert key == "repository"
        away.rename(coldrise.repository)
        wait_for(lambda: not seen())


def test_the_watchdog_is_notified_while_the_service_answers(tmp_path):
    service = Coldrised(tmp_path)
    notify = tmp_path / "n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications, (tmp_path / "log").open("wb") as log:
        notifications.bind(str(notify))
        notifications.settimeout(30)
        started = os.fstat(log.fileno())
        command = ["sh", "-c", 'WATCHDOG_PID=$$ exec "$@"', "sh", *service.command()]
        environment = {**os.environ, "NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": "900000",
                       "JOURNAL_STREAM": f"{started.st_dev}:{started.st_ino}"}
        process = subprocess.Popen(command, env=environment, stderr=log, stdin=subprocess.DEVNULL)
        try:
            words = queue.Queue()
            for _ in range(12):
                words.put(notifications.recv(4096).decode())
            found = "".join(words.queue)
            assert "READY=1" in found and found.count("WATCHDOG=1") >= 3
            assert "STATUS=0 runs, 0 failures, 0 warnings" in found
            # A stopped process tells nothing: systemd would restart it.
            process.send_signal(19)
            notifications.settimeout(1)
            with pytest.raises(TimeoutError):
                while True:
                    notifications.recv(4096)
            process.send_signal(18)
        finally:
            process.terminate()
            process.wait(timeout=30)
        lines = (tmp_path / "log").read_text().splitlines()
        assert lines and all(line.startswith(("<3>", "<4>", "<6>")) for line in lines), lines
