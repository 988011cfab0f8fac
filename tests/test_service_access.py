"""Permissions at the service: first start, users, tokens, logins, roles, the audit log."""

import base64
import contextlib
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.nbdserver import wait_until
from support.service import Coldrised
from support.wallclock import BothClocks

PASSWORD = "correct horse battery"


@pytest.fixture
def service(tmp_path):
    with Coldrised(tmp_path) as service:
        yield service


def set_up(service, user="admin"):
    """Makes the first administrator and returns the cookie's header."""
    body = {"secret": service.setup_secret(), "user": user, "password": PASSWORD}
    answer = service.call("POST", "setup", body, over="https")
    assert answer.status == 200, answer.body
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith("__Host-coldrise=")
    for attribute in ("Secure", "HttpOnly", "SameSite=Strict", "Path=/"):
        assert attribute in cookie
    return {"Cookie": cookie.split(";")[0], "Sec-Fetch-Site": "same-origin"}


def test_the_one_time_link_works_once(service):
    secret = service.setup_secret()
    body = {"secret": "0" * 64, "user": "stranger", "password": PASSWORD}
    assert service.call("POST", "setup", body, over="https").status == 400
    login = set_up(service)
    assert service.call("GET", "me", headers=login, over="https").json["role"] == "admin"
    body = {"secret": secret, "user": "stranger", "password": PASSWORD}
    assert service.call("POST", "setup", body, over="https").status == 400
    assert [user["name"] for user in service.get("users")] == ["admin"]


def test_requests_without_a_proof_get_no_answer(service):
    document = service.get("openapi.json")
    for path, operations in document["paths"].items():
        for method in operations:
            if method not in ("get", "post", "patch", "put", "delete"):
                continue
            public = path in ("/", "/healthz", "/api/v1/setup") or (path, method) == ("/api/v1/login", "post")
            if public:
                continue
            path = path.replace("{", "").replace("}", "")
            answer = service.call(method.upper(), path, {} if method != "get" else None, over="https")
            assert answer.status == 401, (method, path, answer.status, answer.body)
            assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_wrong_proofs_are_refused(service):
    for token in ("", "x", "cr_0_0", "cr_" + "0" * 16 + "_" + "0" * 64, "\xff"):
        assert service.call("GET", "me", token=token, over="https").status == 401, token
    for cookie in ("__Host-coldrise=", "__Host-coldrise=" + "0" * 64, "other=1"):
        assert service.call("GET", "me", headers={"Cookie": cookie}, over="https").status == 401


def test_cookie_requests_from_other_origins_are_refused(service):
    login = set_up(service)
    cookie = {"Cookie": login["Cookie"]}
    new = {"name": "ci", "role": "viewer"}
    here = f"https://127.0.0.1:{service.port}"
    for headers, expected in [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        # Cookies know no ports, and SameSite neither.
        ({"Origin": "https://127.0.0.1:1"}, 403),
        ({"Origin": here.replace("https", "http")}, 403),
        ({}, 403),
        ({"Origin": here}, 201),
        ({"Sec-Fetch-Site": "same-origin"}, 201),
    ]:
        answer = service.call("POST", "tokens", new, headers={**cookie, **headers}, over="https")
        assert answer.status == expected, headers
    # A form of another site cannot send JSON.
    answer = service.call("POST", "tokens", b'{"name":"ci","role":"viewer"}', over="https",
                          headers={**login, "Content-Type": "text/plain"})
    assert answer.status == 415


def test_logins_end(service):
    login = set_up(service)
    listed = service.get("logins")
    assert [entry["user"] for entry in listed] == ["admin"]
    assert service.call("DELETE", f"logins/{listed[0]['id']}").status == 204
    assert service.call("GET", "me", headers=login, over="https").status == 401


def test_a_new_password_ends_logins_and_needs_the_old_one(service):
    login = set_up(service)
    for own in (None, "wrong password"):
        change = {"password": "another password", **({"own_password": own} if own else {})}
        assert service.call("PATCH", "users/admin", change, headers=login, over="https").status == 403
    change = {"password": "another password", "own_password": PASSWORD}
    assert service.call("PATCH", "users/admin", change, headers=login, over="https").status == 200
    assert service.call("GET", "me", headers=login, over="https").status == 401
    body = {"user": "admin", "password": "another password"}
    assert service.call("POST", "login", body, over="https").status == 200


def test_guessing_is_slow(service):
    set_up(service)
    wrong = {"user": "admin", "password": "wrong password"}
    started = time.monotonic()
    assert service.call("POST", "login", wrong, over="https").status == 401
    assert time.monotonic() - started >= 1.0
    unknown = {"user": "nobody", "password": "wrong password"}
    first = service.call("POST", "login", unknown, over="https")
    # The answer does not reveal which users exist.
    assert (first.status, first.json["detail"]) == (401, "user or password is wrong")
    statuses = []
    with_connections = [service.connection("https") for _ in range(12)]
    for connection in with_connections:
        connection.request("POST", "/api/v1/login", body=b'{"user":"admin","password":"wrong password"}',
                           headers={"Content-Type": "application/json"})
    for connection in with_connections:
        statuses.append(connection.getresponse().status)
        connection.close()
    assert 429 in statuses, statuses


def test_roles_limit_tokens(service):
    may = {"viewer": set(), "operator": set(), "backup": set(), "metrics": set(),
           "admin": {"users", "tokens", "audit"}}
    for role, allowed in may.items():
        token = service.token(role)
        assert service.get("me", token=token)["role"] == role
        for path in ("users", "tokens", "audit"):
            status = service.call("GET", path, token=token, over="https").status
            assert status == (200 if path in allowed else 403), (role, path)
        new = {"name": "more", "role": "admin"}
        status = service.call("POST", "tokens", new, token=token, over="https").status
        assert status == (201 if role == "admin" else 403), role


def test_a_token_ends_when_it_is_revoked_or_expires(service):
    made = service.post("tokens", {"name": "ci", "role": "viewer"})
    assert service.call("GET", "me", token=made["text"], over="https").status == 200
    assert service.get("tokens")[0]["last_used_ms"] is not None
    assert service.call("DELETE", f"tokens/{made['id']}").status == 204
    assert service.call("GET", "me", token=made["text"], over="https").status == 401
    now_ms = int(time.time() * 1000)
    soon = service.post("tokens", {"name": "ci", "role": "viewer", "expires_ms": now_ms + 3000})
    deadline = time.monotonic() + 10
    while service.call("GET", "me", token=soon["text"], over="https").status != 401:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    past = {"name": "ci", "role": "viewer", "expires_ms": now_ms - 1}
    assert service.call("POST", "tokens", past).status == 400


def test_no_secret_is_stored(service):
    login = set_up(service)
    made = service.post("tokens", {"name": "ci", "role": "viewer"})
    secrets = [PASSWORD, made["text"].split("_")[2], login["Cookie"].split("=")[1]]
    stored = b"".join(path.read_bytes() for path in service.state.glob("coldrised.db*"))
    for secret in secrets:
        assert secret.encode() not in stored
        assert secret not in service.log


def test_changes_are_in_the_audit_log_and_the_chain_shows_damage(service):
    login = set_up(service)
    service.call("POST", "tokens", {"name": "ci", "role": "viewer"}, headers=login, over="https")
    service.call("POST", "tokens", {"name": "", "role": "viewer"}, headers=login, over="https")
    service.call("POST", "login", {"user": "stranger", "password": PASSWORD}, over="https")
    entries = [(entry["who"], entry["action"], entry["subject"], entry["result"])
               for entry in reversed(service.get("audit"))]
    assert entries == [
        ("nobody", "setup", "admin", "ok"),
        ("admin", "POST /api/v1/tokens", '{"name":"ci","role":"viewer"}', "ok"),
        ("admin", "POST /api/v1/tokens", '{"name":"","role":"viewer"}', "400"),
        ("nobody", "login", "stranger", "refused"),
    ]
    chain = service.get("audit/chain")
    assert (chain["entries"], chain["broken_at"]) == (4, None)
    with sqlite3.connect(service.state / "coldrised.db") as database:
        database.execute("UPDATE audit SET result = 'ok' WHERE number = 3")
    assert service.get("audit/chain")["broken_at"] == 3


def test_a_request_with_an_idempotency_key_runs_once(service):
    new = {"name": "viewer", "role": "viewer", "password": PASSWORD}
    key = {"Idempotency-Key": "double click"}
    first = service.call("POST", "users", new, headers=key)
    again = service.call("POST", "users", new, headers=key)
    assert (first.status, again.status) == (201, 201)
    assert again.headers["Idempotency-Replayed"] == "true" and again.json == first.json
    other = service.call("POST", "users", {**new, "name": "other"}, headers=key)
    assert other.status == 422
    assert service.call("POST", "users", new).status == 409
    # A problem is not kept: the request may be sent again, mended.
    key = {"Idempotency-Key": "mended"}
    assert service.call("POST", "users", {**new, "password": "short"}, headers=key).status == 400


def test_an_idempotency_key_of_a_killed_request_is_answered(service):
    """The request may be done or not: this is reported, and nothing is done twice."""
    new = {"name": "cut", "role": "viewer", "password": PASSWORD}
    key = {"Idempotency-Key": "cut off"}
    assert service.call("POST", "users", new, headers=key).status == 201
    service.kill()
    with contextlib.closing(sqlite3.connect(service.state / "coldrised.db")) as database:
        assert database.execute("UPDATE answers SET status = 0, body = ''").rowcount == 1
        database.commit()
    service.start()
    for _ in range(2):
        answer = service.call("POST", "users", new, headers=key)
        assert answer.status == 500 and "another key" in answer.json["detail"], answer.body
    assert [user["name"] for user in service.get("users")].count("cut") == 1


def test_the_audit_log_records_requests_without_secrets(service):
    service.post("users", {"name": "viewer", "role": "viewer", "password": PASSWORD})
    service.call("POST", "runs", {"kind": "forget", "addresses": ["web01/latest"]})
    # A read request with a body is not a change.
    service.call("POST", "retention/preview", {"rules": {"keep_last": 1}})
    subjects = [entry["subject"] for entry in reversed(service.get("audit"))]
    assert subjects == ['{"name":"viewer","password":"***","role":"viewer"}',
                        '{"addresses":["web01/latest"],"kind":"forget"}']


def test_a_mistake_does_not_consume_the_link(service):
    body = {"secret": service.setup_secret(), "user": "admin", "password": "short"}
    assert service.call("POST", "setup", body, over="https").status == 400
    set_up(service)


def test_basic_authentication_takes_a_token_as_password(service):
    token = service.token("viewer")
    basic = base64.b64encode(f"any:{token}".encode()).decode()
    answer = service.call("GET", "me", headers={"Authorization": f"Basic {basic}"}, over="https")
    assert (answer.status, answer.json["role"]) == (200, "viewer")
    for wrong in ("", "x", base64.b64encode(b"any:wrong").decode()):
        answer = service.call("GET", "me", headers={"Authorization": f"Basic {wrong}"}, over="https")
        assert answer.status == 401


def test_a_stream_ends_when_its_token_is_revoked(service):
    made = service.post("tokens", {"name": "ci", "role": "viewer"})
    with contextlib.closing(service.connection("https", timeout_s=30)) as connection:
        connection.request("GET", "/api/v1/events", headers={"Authorization": f"Bearer {made['text']}"})
        stream = connection.getresponse()
        assert stream.status == 200
        assert service.call("DELETE", f"tokens/{made['id']}").status == 204
        # Ends, instead of running into the connection's time limit.
        stream.read()


def test_a_slow_request_body_times_out(tmp_path):
    clock = BothClocks(tmp_path)
    with (Coldrised(tmp_path, environment=clock.environment()) as service,
          contextlib.closing(service.connection("https", timeout_s=60)) as connection):
        connection.putrequest("POST", "/api/v1/login")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"{")

        with ThreadPoolExecutor() as pool:
            answer = pool.submit(connection.getresponse)
            # A request wakes the service.
            wait_until(lambda: clock.skip(10) or service.get("me") and answer.done(), "the end of its patience")
        assert answer.result().status == 408


@pytest.mark.parametrize("what", ["port", "certificate", "socket is a file", "socket in use"])
def test_a_failed_start_reports_its_cause(service, tmp_path, what):
    folder = tmp_path / "other"
    (folder / "state" / "tls").mkdir(parents=True)
    other, kept = Coldrised(folder), None
    if what == "port":
        other.port, reason = service.port, "in use"
    elif what == "certificate":
        (other.state / "tls" / "cert.pem").write_text("x")
        reason = "in PEM format"
    elif what == "socket is a file":
        kept, reason = other.socket, "not a socket"
        kept.write_bytes(b"precious")
    else:
        other.socket, reason = service.socket, "another process listens"
    with pytest.raises(AssertionError, match=reason):
        other.start(timeout_s=20)
    assert other.process.wait(timeout=10) != 0
    assert kept is None or kept.read_bytes() == b"precious"
    # The first service is as before.
    assert service.get("me")["role"] == "admin"


def test_a_second_service_is_refused(service, tmp_path):
    second = Coldrised(tmp_path)
    with pytest.raises(AssertionError, match="another coldrised uses"):
        second.start()
    assert second.process.wait(timeout=10) == 11
