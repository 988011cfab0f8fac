"""Targets of messages: mail and webhooks, servers that answer badly, secrets."""

import email
import email.policy
import functools
import json
import pathlib
import socket
import ssl
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.certificates import certificate
from support.messages import add, smtp, trial, webhook
from support.service import Coldrised
from support.sinks import MailSink, WebSink


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
def test_invalid_answers_of_a_web_server_are_reported(service, behaviour, said):
    with WebSink(behaviour) as sink:
        result = trial(service, add(service, webhook(sink.url)))
        assert not result["is_ok"] and said in result["text"] and len(result["text"]) < 1000
        assert sink.requests.qsize() == 1, "nothing is followed or repeated"


def test_hanging_servers_and_closed_ports(service):
    with WebSink("hang") as sink, MailSink("hang") as mail, socket.socket() as closed:
        # The port is taken, and has no listener.
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        started = time.monotonic()
        targets = [add(service, settings) for settings in (webhook(sink.url), smtp(mail.port), smtp(port))]
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(functools.partial(trial, service), targets))
        assert [result["is_ok"] for result in results] == [False] * 3
        assert "timeout" in results[0]["text"] and "refused" in results[2]["text"]
        assert time.monotonic() - started < 30


def test_a_mail_contains_advice(service, jobs):
    with MailSink() as sink:
        add(service, smtp(sink.port))
        service.call("PUT", "notifications/settings", {"public_url": "https://backup.example/"})
        jobs.add("nightly", ["web01"])
        jobs.run("nightly")
        # The job's alarm may arrive first.
        subject = "[Coldrise] fail: backup of web01 failed (job nightly)"
        mails = (email.message_from_bytes(sink.mails.get(timeout=30), policy=email.policy.default) for _ in range(2))
        mail = next(mail for mail in mails if mail["Subject"] == subject)
        assert (mail["From"], mail["To"]) == ("Coldrise <coldrise@example.org>", "ops@example.org")
        text = mail.get_content()
        for part in (str(jobs.disk("web01")), "Machine: web01", "Command: coldrise", "https://backup.example/#/runs/"):
            assert part in text, part


def peak_bytes(service):
    """The most memory that the service has ever taken."""
    status = pathlib.Path(f"/proc/{service.process.pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


@pytest.mark.parametrize("behaviour", ["refuse", "garbage", "endless", "line"])
def test_invalid_answers_of_a_mail_server_are_reported(service, behaviour):
    with MailSink(behaviour) as sink:
        before = peak_bytes(service)
        started = time.monotonic()
        result = trial(service, add(service, smtp(sink.port)))
        assert not result["is_ok"] and f"127.0.0.1:{sink.port}" in result["text"]
        assert sink.mails.empty()
        assert time.monotonic() - started < 20 and peak_bytes(service) - before < 16 << 20


def test_passwords_are_sent_over_tls_only(tmp_path, coldrise):
    certificate(tmp_path, "ca")
    certificate(tmp_path, "server", "DNS:localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server-cert.pem", tmp_path / "server-key.pem")
    trusting = {"SSL_CERT_FILE": str(tmp_path / "ca-cert.pem")}
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
        # An unknown certificate is refused.
        address = {**smtp(sink.port, **login), "name": "by address"}
        address["way"]["host"] = "127.0.0.1"
        assert "certificate" in trial(service, add(service, address))["text"]


def test_sendmail_gets_separate_arguments(tmp_path):
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


def test_secrets_are_never_returned_and_bound_to_their_server(service):
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
        webhook("https://u:p@hooks.example/"), webhook("https://hooks.example:99999/"), webhook("https://hooks.example:0/"),
        webhook("https:///path"), webhook("hooks.example"), webhook("https://300.1.1.1/"),
        smtp(99999), smtp(-1), smtp("25"), smtp(25, host="127.0.0.1:25"), smtp(25, host=""),
        smtp(0), smtp(25, host="mail.example"), smtp(25, to=[]), smtp(25, to=["nobody"]),
        smtp(25, **{"from": "a@example.org\r\nBcc: b@example.org"}), smtp(25, user="u", password_file="../../passphrase"),
        smtp(25, user="u", password_file="/etc/shadow"), smtp(25, password="without user"),
    ]
    for settings in bad:
        answer = service.call("POST", "notifications/targets", settings)
        assert answer.status == 400, (settings, answer.body)
        if settings["way"].get("port") in (0, 99999, -1, "25") or ":99999" in str(settings):
            assert "65535" in answer.json["detail"]
    assert service.get("notifications/targets") == []
    add(service, good)
    assert service.call("POST", "notifications/targets", good).status == 409
    for method, path in [("DELETE", ""), ("POST", "/test")]:
        assert service.call(method, f"notifications/targets/none{path}", {}).status == 404
    for url in ("x", "javascript:alert(1)", "https://a b"):
        assert service.call("PUT", "notifications/settings", {"public_url": url}).status == 400
