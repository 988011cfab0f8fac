"""Who is told what: alarms, mail, webhooks; targets that answer badly; restarts."""

import contextlib
import email
import email.policy
import json
import os
import queue
import socket
import sqlite3
import ssl
import stat
import subprocess
import time

import pytest

from support.certificates import run
from support.cli import PROGRAM, Coldrise
from support.service import Coldrised
from support.sinks import MailSink, WebSink


@pytest.fixture
def service(tmp_path, coldrise):
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        yield service


@pytest.fixture
def web():
    with WebSink() as sink:
        yield sink


def webhook(url, template="generic", **more):
    way = {"type": "webhook", "url": url, "template": template}
    return {"name": f"to {url[:30]} {template}", "way": way, **more}


def smtp(port, **more):
    way = {"type": "smtp", "host": "127.0.0.1", "port": port, "encryption": "none",
           "from": "Coldrise <coldrise@example.org>", "to": ["ops@example.org"], **more}
    return {"name": f"mail {port}", "way": way}


def add(service, settings):
    return service.post("notifications/targets", settings)


def change(service, target, **more):
    settings = {"name": target["name"], "way": target["way"], **more}
    answer = service.call("PUT", f"notifications/targets/{target['id']}", settings)
    assert answer.status == 200, answer.body
    return answer.json


def trial(service, target):
    return service.post(f"notifications/targets/{target['id']}/test", {}, expected=(200,))


def wait_for(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
    return found


def count_looks(service):
    """The service has looked at the runs and at the drive at least once."""
    with contextlib.closing(sqlite3.connect(service.state / "coldrised.db")) as database:
        return database.execute("SELECT count(*) FROM space_samples").fetchone()[0]


class Jobs:
    """Backup jobs of the service, whose disks are files that exist or not."""

    def __init__(self, service, folder):
        self.service, self.folder = service, folder
        # What was there before the first look of the service is not told.
        wait_for(lambda: service.call("GET", "machines").status == 200)
        wait_for(lambda: count_looks(service) > 0)

    def disk(self, machine):
        return self.folder / f"{machine}.raw"

    def add(self, name, machines, **more):
        job = {"name": name, "kind": "backup", "machines": machines, "retries": 0,
               "disks": {"vda": f"raw:{self.folder}/{{machine}}.raw"}, **more}
        self.service.post("jobs", job)

    def run(self, name):
        """Starts a job, and waits for its runs."""
        started = self.service.post(f"jobs/{name}/start", {})["runs"]
        wait_for(lambda: all(self.state(run) not in (None, "running") for run in started))
        return started

    def state(self, run):
        answer = self.service.call("GET", f"runs/{run}")
        return answer.json["state"] if answer.status == 200 else None


@pytest.fixture
def jobs(service, tmp_path):
    return Jobs(service, tmp_path)


def ask(service, coldrise, number, *arguments):
    """Runs a command as the service does for a user of the API; returns the run's id."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    name = f"{stamp}-{0x9000 + number:04x}-{arguments[0]}"
    planned = service.runs / f".{name}.planned"
    planned.mkdir(mode=0o700, parents=True)
    words = ["--repo", str(coldrise.repository)]
    if coldrise.passphrase_file is not None:
        words += ["--passphrase-file", str(coldrise.passphrase_file)]
    request = {"arguments": words + list(arguments), "requested_by": "anna"}
    (planned / "request.json").write_text(json.dumps(request))
    (planned / "lock").touch()
    environment = {**os.environ, "COLDRISE_RUNS": str(service.runs)}
    subprocess.run([PROGRAM, "run", name], env=environment, capture_output=True, timeout=120, check=False)
    assert (service.runs / name / "result.json").exists()
    return name


def active(service):
    return [(alarm["key"], alarm["severity"]) for alarm in service.get("alarms?active=true")]


def test_an_alarm_of_a_job_is_told_once_and_cleared_by_a_success(service, jobs, web):
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
    told = {(m["key"], m["occasion"]) for m in web.messages(4)}
    assert told == {("uncovered:web01", "cleared"), ("age:web01", "raised")}
    jobs.disk("web01").write_bytes(os.urandom(1 << 20))
    jobs.run("nightly")
    cleared = web.message()
    assert (cleared["key"], cleared["occasion"]) == ("age:web01", "cleared")


def test_runs_of_the_api_are_told_and_those_of_a_terminal_only_when_lost(service, jobs, web, coldrise):
    add(service, webhook(web.url, topics=["run_failed", "run_lost", "run_succeeded"]))
    asked = ask(service, coldrise, 1, "verify")
    failed = ask(service, coldrise, 2, "backup", "web01", "vda=raw:/missing")
    by_hand = Coldrise(coldrise.repository, coldrise.passphrase_file, runs=service.runs)
    assert by_hand.run("backup", "web01", "vda=raw:/missing").returncode != 0
    plan = json.loads((service.runs / failed / "plan.json").read_text())
    lost = service.runs / failed.replace("-9002-", "-0001-")
    lost.mkdir(mode=0o700)
    (lost / "lock").touch()
    (lost / "plan.json").write_text(json.dumps({**plan, "requested_by": None}))
    told = {}
    while len(told) < 3:
        message = web.message()
        told[message["run"]] = (message["topic"], message["occasion"])
    assert told == {asked: ("run_succeeded", "event"), failed: ("run_failed", "event"), lost.name: ("run_lost", "event")}
    assert web.messages(1) == []
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


def test_a_target_that_refuses_is_tried_again_and_others_are_not_held_up(service, jobs, web):
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
        # A change of the target sends at once what waits.
        broken.behaviour = "ok"
        change(service, target)
        assert broken.message()["topic"] == "run_failed"


def test_many_messages_become_one_and_switching_off_drops_them(service, jobs):
    with WebSink(500) as sink:
        target = add(service, webhook(sink.url))
        jobs.add("nightly", [f"web{number}" for number in range(8)])
        jobs.run("nightly")
        wait_for(lambda: service.get("notifications/targets")[0]["waiting"] == 8)
        assert sink.requests.qsize() < 8, "a target that is not well is left alone"
        while not sink.requests.empty():
            sink.requests.get()
        sink.behaviour = "ok"
        change(service, target)
        digest = sink.message()
        assert digest["subject"] == "[Coldrise] fail: 8 messages" and len(digest["messages"]) == 8
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
    assert [message["machine"] for message in web.messages(3)] == ["db01"]


def test_each_template(service, web):
    tokens = {"generic": "Authorization", "ntfy": "Authorization", "gotify": "X-Gotify-Key"}
    for template in ("generic", "slack", "ntfy", "gotify"):
        settings = webhook(web.url, template)
        settings["way"]["token"] = "t0ken"
        assert trial(service, add(service, settings)) | {"at_ms": 0} == {"at_ms": 0, "is_ok": True, "text": "sent"}
        _, headers, body = web.requests.get(timeout=10)
        if template in tokens:
            assert "t0ken" in headers[tokens[template]]
        if template == "ntfy":
            assert headers["Title"].startswith("[Coldrise]") and b"this is a test" in body
        else:
            text = json.loads(body)[{"gotify": "message"}.get(template, "text")]
            assert "this is a test" in text


@pytest.mark.parametrize("behaviour, said", [
    (500, "answered 500: said no"), (404, "answered 404"), ("redirect", "redirects are not followed"),
    ("large", "answered 500: xxx"),
])
def test_a_web_server_that_answers_badly(service, behaviour, said):
    with WebSink(behaviour) as sink:
        result = trial(service, add(service, webhook(sink.url)))
        assert not result["is_ok"] and said in result["text"] and len(result["text"]) < 1000
        assert sink.requests.qsize() == 1, "nothing is followed or repeated"


def test_servers_that_hang_and_ports_that_are_closed(service):
    with WebSink("hang") as sink, MailSink("hang") as mail, socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        started = time.monotonic()
        targets = [add(service, settings) for settings in (webhook(sink.url), smtp(mail.port), smtp(port))]
        results = [trial(service, target) for target in targets]
        assert [result["is_ok"] for result in results] == [False] * 3
        assert "timeout" in results[0]["text"] and "refused" in results[2]["text"]
        assert time.monotonic() - started < 30


def test_a_mail_says_what_to_do(service, jobs):
    with MailSink() as sink:
        add(service, smtp(sink.port))
        service.call("PUT", "notifications/settings", {"public_url": "https://backup.example/"})
        jobs.add("nightly", ["web01"])
        jobs.run("nightly")
        mail = email.message_from_bytes(sink.mails.get(timeout=30), policy=email.policy.default)
        assert mail["Subject"] == "[Coldrise] fail: backup of web01 failed (job nightly)"
        assert (mail["From"], mail["To"]) == ("Coldrise <coldrise@example.org>", "ops@example.org")
        text = mail.get_content()
        for part in (str(jobs.disk("web01")), "Machine: web01", "Command: coldrise", "https://backup.example/#/runs/"):
            assert part in text, part


@pytest.mark.parametrize("behaviour", ["refuse", "garbage", "endless"])
def test_a_mail_server_that_answers_badly(service, behaviour):
    with MailSink(behaviour) as sink:
        result = trial(service, add(service, smtp(sink.port)))
        assert not result["is_ok"] and f"127.0.0.1:{sink.port}" in result["text"]
        assert sink.mails.empty()


def test_a_password_goes_over_tls_only(tmp_path, coldrise):
    run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout", tmp_path / "ca.key", "-x509",
        "-out", tmp_path / "ca.pem", "-subj", "/CN=authority")
    run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout", tmp_path / "key.pem",
        "-out", tmp_path / "csr", "-subj", "/CN=localhost")
    names = tmp_path / "names"
    names.write_text("subjectAltName=DNS:localhost")
    run("openssl", "x509", "-req", "-in", tmp_path / "csr", "-out", tmp_path / "cert.pem", "-CAcreateserial",
        "-CA", tmp_path / "ca.pem", "-CAkey", tmp_path / "ca.key", "-extfile", names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    trusting = {"SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    with Coldrised(tmp_path, environment=trusting) as service, MailSink("starttls", context, "pw") as sink, \
            MailSink("plain", password="pw") as plain:
        secrets = service.state / "secrets"
        secrets.mkdir(mode=0o700)
        (secrets / "mail").write_text("pa55word\n")
        login = {"host": "localhost", "encryption": "starttls", "user": "u", "password_file": "mail"}
        assert trial(service, add(service, smtp(sink.port, **login)))["is_ok"]
        assert sink.log.index("STARTTLS") < next(n for n, line in enumerate(sink.log) if line.startswith("AUTH"))
        # A server without STARTTLS gets neither mail nor password.
        refused = trial(service, add(service, smtp(plain.port, **login)))
        assert not refused["is_ok"] and not any("AUTH" in line for line in plain.log)
        # A certificate that nobody knows is refused.
        address = {**smtp(sink.port, **login), "name": "by address"}
        address["way"]["host"] = "127.0.0.1"
        assert "certificate" in trial(service, add(service, address))["text"]


def test_sendmail_gets_its_words_one_by_one(tmp_path):
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\ncat > {tmp_path}/mail\n'
                       f'[ ! -e {tmp_path}/broken ] || {{ echo "no queue" >&2; exit 75; }}\n')
    program.chmod(0o755)
    with Coldrised(tmp_path, environment={"COLDRISE_SENDMAIL": str(program)}) as service:
        way = {"type": "sendmail", "from": "coldrise@example.org", "to": ["-oQ/tmp@example.org", "b@example.org"]}
        target = add(service, {"name": "local", "way": way})
        assert trial(service, target)["is_ok"]
        assert (tmp_path / "words").read_text().split() == [
            "-i", "-f", "coldrise@example.org", "--", "-oQ/tmp@example.org", "b@example.org"]
        assert b"this is a test" in (tmp_path / "mail").read_bytes()
        (tmp_path / "broken").touch()
        result = trial(service, target)
        assert not result["is_ok"] and "no queue" in result["text"]


def test_secrets_are_never_returned_and_stay_with_their_server(service):
    settings = webhook("https://hooks.example.org/T/B/secretpath", "slack")
    settings["way"]["token"] = "secrettoken"
    made = add(service, settings)
    mail = add(service, smtp(25, user="u", password="secretpassword"))
    answers = service.call("GET", "notifications/targets").body + json.dumps([made, mail]).encode()
    for secret in (b"secretpath", b"secrettoken", b"secretpassword"):
        assert secret not in answers
    assert made["way"]["url"] == "https://hooks.example.org/***"
    assert stat.S_IMODE((service.state / "coldrised.db").stat().st_mode) == 0o600
    assert "secret" not in service.log


def test_bad_targets_are_refused(service):
    good = webhook("https://hooks.example/")
    bad = [
        {**good, "name": ""}, {**good, "machines": []}, {**good, "machines": ["WEB"]}, {**good, "topics": ["x"]},
        {**good, "unknown": 1}, webhook("http://hooks.example/"), webhook("file:///etc/passwd"), webhook("x" * 3000),
        webhook("https://u:p@hooks.example/"),
        smtp(0), smtp(25, host="mail.example"), smtp(25, to=[]), smtp(25, to=["nobody"]),
        smtp(25, **{"from": "a@example.org\r\nBcc: b@example.org"}), smtp(25, user="u", password_file="../../passphrase"),
        smtp(25, user="u", password_file="/etc/shadow"), smtp(25, password="without user"),
    ]
    for settings in bad:
        answer = service.call("POST", "notifications/targets", settings)
        assert answer.status == 400, (settings, answer.body)
    assert service.get("notifications/targets") == []
    add(service, good)
    assert service.call("POST", "notifications/targets", good).status == 409
    for method, path in [("DELETE", ""), ("POST", "/test")]:
        assert service.call(method, f"notifications/targets/none{path}", {}).status == 404
    for url in ("x", "javascript:alert(1)", "https://a b"):
        assert service.call("PUT", "notifications/settings", {"public_url": url}).status == 400


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


def test_a_repository_that_is_away_is_an_alarm_until_it_is_back(service, coldrise):
    away = coldrise.repository.with_name("away")
    coldrise.repository.rename(away)
    [(key, _)] = wait_for(lambda: active(service), timeout_s=90)
    assert key == "repository"
    away.rename(coldrise.repository)
    wait_for(lambda: not active(service), timeout_s=60)


def test_the_watchdog_is_told_while_the_service_answers(tmp_path):
    service = Coldrised(tmp_path)
    notify = tmp_path / "n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, (tmp_path / "log").open("wb") as log:
        told.bind(str(notify))
        told.settimeout(30)
        started = os.fstat(log.fileno())
        command = ["sh", "-c", 'WATCHDOG_PID=$$ exec "$@"', "sh", *service.command()]
        environment = {**os.environ, "NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": "900000",
                       "JOURNAL_STREAM": f"{started.st_dev}:{started.st_ino}"}
        process = subprocess.Popen(command, env=environment, stderr=log, stdin=subprocess.DEVNULL)
        try:
            words = queue.Queue()
            for _ in range(12):
                words.put(told.recv(4096).decode())
            found = "".join(words.queue)
            assert "READY=1" in found and found.count("WATCHDOG=1") >= 3
            assert "STATUS=0 runs, 0 failures, 0 warnings" in found
            # A stopped process tells nothing: systemd would restart it.
            process.send_signal(19)
            told.settimeout(1)
            with pytest.raises(TimeoutError):
                while True:
                    told.recv(4096)
            process.send_signal(18)
        finally:
            process.terminate()
            process.wait(timeout=30)
        lines = (tmp_path / "log").read_text().splitlines()
        assert lines and all(line.startswith(("<3>", "<4>", "<6>")) for line in lines), lines
