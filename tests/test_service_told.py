"""Who is told what: alarms, mail, webhooks; targets that answer badly; restarts."""

import email
import email.policy
import json
import os
import queue
import socket
import ssl
import stat
import subprocess
import time

import pytest

from support.certificates import run
from support.cli import PROGRAM
from support.service import COLDRISED, Coldrised
from support.sinks import MailSink, WebSink

EVENT = {"topics": ["run_lost", "run_failed", "run_succeeded"]}


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
    return {"name": f"to {url} {template}", "way": way, **more}


def smtp(port, **more):
    way = {"type": "smtp", "host": "127.0.0.1", "port": port, "encryption": "none",
           "from": "Coldrise <coldrise@example.org>", "to": ["ops@example.org"], **more}
    return {"name": f"mail {port}", "way": way}


def add(service, settings):
    return service.post("notifications/targets", settings)


def trial(service, target):
    return service.post(f"notifications/targets/{target['id']}/test", {}, expected=(200,))


class Runs:
    """Runs of the service's jobs: planned as it plans them."""

    def __init__(self, service, coldrise):
        self.service, self.coldrise = service, coldrise
        self.count = 0

    def run(self, *arguments, job=None, requested_by=None):
        """Runs a command to its end; returns the run's id."""
        self.count += 1
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{0x8000 + self.count:04x}-{arguments[0]}"
        planned = self.service.runs / f".{name}.planned"
        self.service.runs.mkdir(mode=0o700, exist_ok=True)
        planned.mkdir(mode=0o700)
        words = ["--repo", str(self.coldrise.repository)]
        if self.coldrise.passphrase_file is not None:
            words += ["--passphrase-file", str(self.coldrise.passphrase_file)]
        request = {"arguments": words + [str(word) for word in arguments], "job": job,
                   "requested_by": requested_by, "attempt": 1}
        (planned / "request.json").write_text(json.dumps(request))
        (planned / "lock").touch()
        for path in planned.iterdir():
            path.chmod(0o600)
        environment = {**os.environ, "COLDRISE_RUNS": str(self.service.runs)}
        subprocess.run([PROGRAM, "run", name], env=environment, capture_output=True, timeout=120, check=False)
        assert (self.service.runs / name / "result.json").exists()
        return name

    def look(self):
        """Makes the service look at the runs now."""
        settings = self.service.get("notifications/settings")
        assert self.service.call("PUT", "notifications/settings", settings).status == 200


@pytest.fixture
def runs(service, coldrise):
    runs = Runs(service, coldrise)
    # What was there before the first look of the service is not told.
    runs.look()
    wait_for(lambda: service.get("alarms") == [])
    return runs


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk.raw"
    path.write_bytes(os.urandom(1 << 20))
    return path


def wait_for(condition, timeout_s=40):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
    return found


def active(service):
    return [(alarm["key"], alarm["severity"]) for alarm in service.get("alarms?active=true")]


def test_an_alarm_of_a_job_is_told_once_and_cleared_by_a_success(service, runs, web, disk):
    add(service, webhook(web.url))
    missing = disk.with_name("missing.raw")
    run_id = runs.run("backup", "web01", f"vda=raw:{missing}", job="nightly")
    runs.look()
    raised = web.message()
    assert (raised["topic"], raised["occasion"], raised["severity"]) == ("run_failed", "raised", "fail")
    assert (raised["machine"], raised["run"], raised["key"]) == ("web01", run_id, "run:nightly:web01:backup")
    for part in (str(missing), "Exit code: 1", "web01", run_id, "coldrise --repo", f"#/runs/{run_id}"):
        assert part in raised["text"], part
    assert raised["subject"] == "[Coldrise] fail: backup of web01 failed (job nightly)"
    # The next failure is the same alarm.
    runs.run("backup", "web01", f"vda=raw:{missing}", job="nightly")
    runs.look()
    assert active(service) == [("run:nightly:web01:backup", "fail")]
    runs.run("backup", "web01", f"vda=raw:{disk}", job="nightly")
    runs.look()
    cleared = web.message()
    assert (cleared["occasion"], cleared["key"]) == ("cleared", raised["key"])
    assert "To do" not in cleared["text"]
    assert active(service) == []
    assert web.messages(0.5) == []


def test_runs_of_the_api_are_told_and_those_of_a_terminal_only_when_lost(service, runs, web, coldrise, disk):
    add(service, webhook(web.url, topics=["run_failed", "run_lost", "run_succeeded"]))
    asked = runs.run("verify", requested_by="anna")
    failed = runs.run("backup", "web01", "vda=raw:/missing", requested_by="anna")
    runs.run("backup", "web01", "vda=raw:/missing")
    folder = service.runs / failed.replace("backup", "verify").replace("-8", "-7")
    folder.mkdir(mode=0o700)
    plan = json.loads((service.runs / failed / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "requested_by": None, "machine": None}))
    (folder / "lock").touch()
    runs.look()
    told = {(m["topic"], m["run"], m["occasion"]) for m in web.messages(3)}
    assert told == {("run_succeeded", asked, "event"), ("run_failed", failed, "event"),
                    ("run_lost", folder.name, "event")}
    assert active(service) == []


def test_a_message_survives_a_kill_in_the_middle_of_its_delivery(tmp_path, coldrise, disk):
    with WebSink("hang") as hanging, Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        runs = Runs(service, coldrise)
        runs.look()
        wait_for(lambda: service.get("alarms") == [])
        target = add(service, webhook(hanging.url))
        runs.run("backup", "web01", "vda=raw:/missing", job="nightly")
        runs.look()
        first = hanging.message()
        service.kill()
        hanging.behaviour = "ok"
        service.start()
        again = hanging.message()
        assert first["id"] == again["id"]
        wait_for(lambda: service.get("notifications/targets")[0]["waiting"] == 0)
        assert service.get("notifications/targets")[0]["last_result"]["is_ok"]
        assert active(service) == [("run:nightly:web01:backup", "fail")]
        # A further restart repeats nothing.
        service.stop()
        service.start()
        runs.look()
        assert hanging.messages(1) == []
        assert target["id"]


def test_a_target_that_refuses_is_tried_again_and_others_are_not_held_up(service, runs, web):
    with WebSink(500) as broken:
        target = add(service, webhook(broken.url))
        add(service, webhook(web.url, "gotify"))
        runs.run("backup", "web01", "vda=raw:/missing", job="nightly")
        runs.look()
        assert web.message()["title"].startswith("[Coldrise] fail")
        shown = wait_for(lambda: next(t for t in service.get("notifications/targets")
                                      if t["id"] == target["id"] and t["last_result"]))
        assert not shown["last_result"]["is_ok"] and "answered 500" in shown["last_result"]["text"]
        assert shown["waiting"] == 1
        broken.requests.get(timeout=5)
        # A change of the target sends at once what waits.
        broken.behaviour = "ok"
        settings = {key: shown[key] for key in ("name", "way")}
        assert service.call("PUT", f"notifications/targets/{target['id']}", settings).status == 200
        assert broken.message()["topic"] == "run_failed"


def test_many_messages_become_one(service, runs):
    with WebSink(500) as sink:
        target = add(service, webhook(sink.url))
        for number in range(8):
            runs.run("backup", f"web{number}", "vda=raw:/missing", job="nightly")
        runs.look()
        sink.requests.get(timeout=20)
        wait_for(lambda: service.get("notifications/targets")[0]["waiting"] == 8)
        sink.behaviour = "ok"
        settings = {key: target[key] for key in ("name", "way")}
        assert service.call("PUT", f"notifications/targets/{target['id']}", settings).status == 200
        digest = sink.message()
        assert digest["subject"] == "[Coldrise] fail: 8 messages" and len(digest["messages"]) == 8
        wait_for(lambda: service.get("notifications/targets")[0]["waiting"] == 0)


def test_targets_choose_machines_topics_and_severity(service, runs, web):
    add(service, {**webhook(web.url), "machines": ["db*"]})
    add(service, {**webhook(web.url, "slack"), "topics": ["damage"]})
    add(service, {**webhook(web.url, "ntfy"), "is_enabled": False})
    runs.run("backup", "web01", "vda=raw:/missing", job="nightly")
    runs.run("backup", "db01", "vda=raw:/missing", job="nightly")
    runs.look()
    assert [message["machine"] for message in web.messages(2)] == ["db01"]


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


def test_a_mail_says_what_to_do(service, runs):
    with MailSink() as sink:
        add(service, smtp(sink.port))
        service.call("PUT", "notifications/settings", {"public_url": "https://backup.example/"})
        runs.run("backup", "wéb", "vda=raw:/missing", job="nightly")
        runs.run("backup", "web01", "vda=raw:/missing", job="nightly")
        runs.look()
        mail = email.message_from_bytes(sink.mails.get(timeout=30), policy=email.policy.default)
        assert mail["Subject"] == "[Coldrise] fail: backup of web01 failed (job nightly)"
        assert (mail["From"], mail["To"]) == ("Coldrise <coldrise@example.org>", "ops@example.org")
        text = mail.get_content()
        for part in ("/missing", "Machine: web01", "Command: coldrise", "https://backup.example/#/runs/"):
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
    settings = webhook("https://hooks.example/T0/secretpath", "slack")
    settings["way"]["token"] = "secrettoken"
    made = add(service, settings)
    mail = add(service, smtp(25, user="u", password="secretpassword"))
    answers = service.call("GET", "notifications/targets").body + json.dumps([made, mail]).encode()
    for secret in (b"secretpath", b"secrettoken", b"secretpassword"):
        assert secret not in answers
    assert made["way"]["url"] == "https://hooks.example/***"
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


def test_only_administrators_see_targets_and_scopes_bound_alarms(service, runs):
    runs.run("backup", "web01", "vda=raw:/missing", job="nightly")
    runs.run("backup", "db01", "vda=raw:/missing", job="nightly")
    runs.look()
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
    path = "alarms/run:nightly:{}:backup/acknowledge"
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
    assert COLDRISED.exists()
