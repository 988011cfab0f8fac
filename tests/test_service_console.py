"""Machines that the service boots: screen, serial port, keys, power, and who may use them.

The machine of most tests is one boot record. It says "small login: ", echoes the input of its serial
port and its keyboard to its serial port, writes a sector at "w" and switches itself off at "!".
"""

import os
import pathlib
import signal
import struct
import subprocess
import threading
import time

import pytest

from support.nbdserver import wait_until
from support.ports import free_port
from support.service import Coldrised
from support.websocket import CONTINUATION, PING, TEXT, Closed, Refused

MIB = 1 << 20
PASSWORD = "correct horse battery"

# 16-bit code at 0x7c00. next: in al,0x3fd; a byte from 0x3f8: "!" goes to off, "w" to write, others to put;
# else a key from int 0x16 goes to put; else hlt until an interrupt, of the serial port, too; jmp next.
# write: int 0x13 writes the second sector, print "written ". off: APM's interface, as in test_cli_boot.
# put waits for the port.
CODE = bytes.fromhex(
    "31c08ed88ec08ed0bc007cc7063000b47ca33200baf903b001eebafc03b00beee42124efe621fbbebb7ce87c00"
    "bafd03eca8017411baf803ec3c21743e3c777424e85600ebe7b401cd167510fabafd03eca8017504fbf4ebd4fb"
    "ebd130e4cd16e83700ebc8b80103bb007cb90200ba8000cd13bec97ce83000ebb2b8015331dbcd15b80e5331db"
    "b90201cd15b80753bb0100b90300cd15f4ebfd50bafd03eca82074fb58baf803eec3ac84c07405e8e9ffebf6c3"
    "50b020e62058cf"
) + b"small login: \0written \0"
SECTOR = CODE.ljust(510, b"\0") + b"\x55\xaa"


@pytest.fixture
def service(coldrise, tmp_path):
    disk = tmp_path / "disk.raw"
    disk.write_bytes(SECTOR.ljust(MIB, b"\0"))
    coldrise.backup("web01", vda=disk)
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        try:
            yield service
        finally:
            end_machines(service)


def end_machines(service):
    """Ends what a test has left running, also after it has failed."""
    if service.process.poll() is not None:
        service.start()
    for run in service.get("runs?state=running")["runs"]:
        service.call("POST", f"runs/{run['id']}/cancel", {})
    wait_until(lambda: not service.get("runs?state=running")["runs"], "the machines end")


def boot(service, session="trial", address="web01/latest", **more):
    """Boots a machine, waits for its console, and returns its run."""
    new = {"kind": "boot", "address": address, "memory_mib": 64, "cpus": 1, **more}
    if session:
        new["session"] = session
    run = service.post("runs", new, expected=[202])["run"]
    wait_until(lambda: is_up(service, run), f"machine {run} runs")
    return run


def is_up(service, run):
    found = service.call("GET", f"runs/{run}")
    if found.status == 404:
        return False
    assert found.json["state"] == "running", service.call("GET", f"runs/{run}/log").body
    machine = found.json["machine"]
    return machine and service.get(f"sessions/{machine['session']}")["running"]["state"] == "running"


def ended(service, run):
    wait_until(lambda: service.get(f"runs/{run}")["state"] != "running", f"{run} ends")
    return service.get(f"runs/{run}")


def test_a_machine_boots_and_is_used_over_the_api(service, coldrise):
    run = boot(service)
    shown = service.get("sessions/trial")
    machine = shown["running"]
    assert shown["machine"] == "web01"
    assert shown["is_served"] and shown["session"] == "trial"
    assert machine["run"] == run and machine["explanation"] is None and machine["has_screen"]
    assert (machine["memory_mib"], machine["cpus"], machine["network"]) == (64, 1, "isolated")
    assert abs(machine["since"] / 1000 - time.time()) < 120
    assert service.get(f"runs/{run}")["machine"]["session"] == "trial"
    with service.websocket("sessions/trial/serial") as serial:
        serial.read_until(b"small login: ")
        serial.send(b"admin")
        assert serial.read_until(b"admin") == b"admin"
        # A second client sees the past, too.
        with service.websocket("sessions/trial/serial") as other:
            assert other.read_until(b"admin") == b"small login: admin"
        # A live machine's writes become a point.
        serial.send(b"w")
        serial.read_until(b"written ")
        sealed = service.post("runs", {"kind": "seal", "session": "trial"})["run"]
        wait_until(lambda: service.call("GET", f"runs/{sealed}").status == 200, "the seal begins")
        assert ended(service, sealed)["state"] == "ok", service.call("GET", f"runs/{sealed}/log").body
        assert len(coldrise.json("list")["machines"][0]["points"]) == 2
        # The session cannot go while the machine uses it.
        refused = service.post("runs", {"kind": "unpublish", "session": "trial", "discard": True})["run"]
        wait_until(lambda: service.call("GET", f"runs/{refused}").status == 200, "the run begins")
        error = ended(service, refused)["result"]["error"]
        assert error["kind"] == "busy" and "trial" in error["message"]
        again = service.call("POST", "runs", {"kind": "boot", "address": "live/trial"})
        assert again.status == 409 and "in use" in again.json["detail"]
        # It switches itself off: a good end.
        serial.send(b"!")
        end = serial.closed()
        assert (end.code, end.reason) == (1000, "the machine is off")
    result = ended(service, run)
    assert result["state"] == "ok" and result["machine"] is None, result
    shown = service.get("sessions/trial")
    assert shown["running"] is None and not shown["is_served"]
    assert service.call("GET", "sessions/trial/serial").status == 404
    folder = service.runs / run
    assert not (folder / "machine").exists() and not (folder / "machine.json").exists()
    # The session boots again.
    boot(service, session=None, address="live/trial")
    with service.websocket("sessions/trial/serial") as serial:
        serial.read_until(b"small login: ")


def test_a_console_opened_too_early_or_too_late_is_refused(service, coldrise):
    """Browsers show a close frame to their page, but not a refusal of the upgrade."""
    coldrise.publish("web01/latest", "trial")
    with service.websocket("sessions/trial/screen") as screen:
        end = screen.closed()
        assert (end.code, end.reason) == (1000, "no machine runs on this session")
    with service.websocket("sessions/none/serial") as serial:
        assert serial.closed().code == 1000
    run = service.post("runs", {"kind": "boot", "address": "live/trial", "memory_mib": 64, "cpus": 1})["run"]
    wait_until(lambda: service.get("sessions/trial")["running"], "the run says that it has a machine")
    # QEMU may not be there yet: it is waited for.
    with service.websocket("sessions/trial/screen") as screen:
        screen.read_until(b"RFB ")
        os.kill(service.get(f"runs/{run}")["plan"]["who"]["pid"], signal.SIGKILL)
        assert screen.closed().code == 1000
    with service.websocket("sessions/trial/screen") as screen:
        assert screen.closed().code == 1000


def test_the_screen(service):
    boot(service)
    with service.websocket("sessions/trial/serial") as serial:
        serial.read_until(b"small login: ")

    def size():
        return struct.unpack("!II", service.call("GET", "sessions/trial/screenshot.png").body[16:24])

    # The firmware has chosen the text mode before; QEMU draws at intervals.
    wait_until(lambda: size() == (720, 400), "the screen of the machine")
    for _ in range(2):
        picture = service.call("GET", "sessions/trial/screenshot.png")
        assert picture.status == 200, picture.body
        assert picture.headers["Content-Type"] == "image/png"
        assert picture.headers["X-Content-Type-Options"] == "nosniff"
        assert picture.body.startswith(b"\x89PNG\r\n\x1a\n")
    with service.websocket("sessions/trial/screen") as screen, service.websocket("sessions/trial/screen") as other:
        for client in (screen, other):
            assert client.read_until(b"RFB 003.008\n") == b"RFB 003.008\n"
            client.send(b"RFB 003.008\n")
            # One kind of security: none. The websocket has authenticated the user.
            assert client.read_until(b"\x01\x01") == b"\x01\x01"
            client.send(b"\x01")
            client.read_until(b"\0\0\0\0")
            client.send(b"\x01")
        # The size of the screen, as in the picture.
        head = other.read_until(b"QEMU")
        assert struct.unpack("!HH", head[:4]) == (720, 400)
    audit = [(entry["action"], entry["subject"]) for entry in service.get("audit")]
    assert audit.count(("open screen", "live/trial")) == 2
    assert audit.count(("read screen", "live/trial")) == 1, "once an hour"


def test_keys_are_typed(service):
    boot(service)
    with service.websocket("sessions/trial/serial") as serial:
        serial.read_until(b"small login: ")
        text = "Geheim-42: \\|{[(@~`\"'<>?/,.;"
        answer = service.call("POST", "sessions/trial/keys", {"text": text})
        assert answer.status == 204, answer.body
        assert serial.read_until(text.encode()) == text.encode()
        service.call("POST", "sessions/trial/keys", {"text": "a\n"})
        assert serial.read_until(b"\r") == b"a\r"
        for keys in ({"text": "pässword"}, {"text": ""}, {"text": "a" * 257}, {"keys": ["quit"]}, {"keys": []}, {},
                     {"text": "a", "keys": ["a"]}):
            refused = service.call("POST", "sessions/trial/keys", keys)
            assert refused.status == 400, (keys, refused.body)
        assert "'ä'" in service.call("POST", "sessions/trial/keys", {"text": "ä"}).json["detail"]
        assert service.call("POST", "sessions/trial/keys", {"keys": ["ctrl", "alt", "delete"]}).status == 204
        serial.read_until(b"small login: ")
    # Typed text may be a password.
    entries = [entry for entry in service.get("audit") if entry["action"].endswith("/keys")]
    assert entries and not any("Geheim" in str(entry) or "text" in entry["subject"] for entry in entries)


def test_the_power_switch(service):
    run = boot(service)
    with service.websocket("sessions/trial/serial") as serial:
        serial.read_until(b"small login: ")
        assert service.call("POST", "sessions/trial/power", {"action": "reset"}).status == 202
        serial.read_until(b"small login: ")
        # No operating system listens to the button.
        assert service.call("POST", "sessions/trial/power", {"action": "shutdown"}).status == 202
        assert service.call("POST", "sessions/trial/power", {"action": "explode"}).status == 400
        assert service.call("POST", "sessions/trial/power", {"action": "off"}).status == 202
        assert serial.closed().code == 1000
    assert ended(service, run)["state"] == "ok"
    assert service.get("sessions/trial")["running"] is None
    refused = service.call("POST", "sessions/trial/power", {"action": "off"})
    assert refused.status == 404 and "no machine runs on session trial" in refused.json["detail"]


def test_the_session_is_discarded_on_request(service, coldrise):
    run = boot(service, at_end="discard")
    assert service.call("POST", f"runs/{run}/cancel", {}).status == 202
    # A cancelled machine keeps its session, regardless of the request.
    assert ended(service, run)["state"] == "cancelled"
    assert [session["session"] for session in service.get("sessions")["sessions"]] == ["trial"]
    run = boot(service, session="gone", at_end="discard")
    service.call("POST", "sessions/gone/power", {"action": "off"})
    assert ended(service, run)["state"] == "ok"
    assert [session["session"] for session in service.get("sessions")["sessions"]] == ["trial"]


def test_a_machine_outlives_the_service(service):
    run = boot(service)
    with service.websocket("sessions/trial/serial") as serial:
        serial.read_until(b"small login: ")
        serial.send(b"before")
        serial.read_until(b"before")
        service.kill()
        with pytest.raises(Closed):
            serial.receive()
    service.start()
    assert service.get(f"runs/{run}")["state"] == "running"
    with service.websocket("sessions/trial/serial") as serial:
        serial.read_until(b"small login: before")
        serial.send(b"after")
        serial.read_until(b"after")
    # A stop in good order tells the clients.
    with service.websocket("sessions/trial/screen") as screen:
        screen.read_until(b"RFB ")
        service.stop()
        end = screen.closed()
        assert end.code == 1001 and "the machine keeps running" in end.reason
    service.start()
    with service.websocket("sessions/trial/serial") as serial:
        serial.read_until(b"after")


def test_a_killed_run_is_not_listed_as_a_machine(service):
    run = boot(service)
    process = service.get(f"runs/{run}")["plan"]["who"]["pid"]
    with service.websocket("sessions/trial/screen") as screen:
        screen.read_until(b"RFB ")
        os.kill(process, signal.SIGKILL)
        assert screen.closed().code == 1000
    assert ended(service, run)["state"] == "lost"
    wait_until(lambda: service.get("sessions/trial")["running"] is None, "the machine is gone")
    # The server of its disk ends with the command, a moment later.
    wait_until(lambda: not service.get("sessions/trial")["is_served"], "nothing serves the disk")
    # Its leftovers do not disturb the next one.
    boot(service, session=None, address="live/trial")


# ---------------------------------------------------------------------- who may


def login(service):
    secret = service.call("POST", "setup", {"secret": service.setup_secret(), "user": "admin", "password": PASSWORD},
                          over="https")
    assert secret.status == 200, secret.body
    return {"Cookie": secret.headers["Set-Cookie"].split(";")[0]}


def test_a_console_requires_permission(service):
    boot(service)
    operator, foreign = service.token("operator", ["web*"]), service.token("operator", ["db*"])
    everything = [("GET", "screenshot.png", None), ("GET", "serial", None), ("GET", "screen", None),
                  ("POST", "keys", {"text": "a"}), ("POST", "power", {"action": "reset"})]
    roles = {role: service.token(role) for role in ("viewer", "backup", "metrics")}
    for method, path, body in everything:
        for role, token in roles.items():
            answer = service.call(method, f"sessions/trial/{path}", body, token=token)
            assert answer.status == 403, (path, role)
        answer = service.call(method, f"sessions/trial/{path}", body, token=foreign)
        assert answer.status == 404, path
        assert service.call(method, f"sessions/trial/{path}", body, over="https").status == 401, path
    # Seen by those who may see the session, without a console.
    assert service.get("sessions/trial", token=service.token("viewer"))["running"]["state"] == "running"
    with service.websocket("sessions/trial/serial", token=operator, over="https") as serial:
        serial.read_until(b"small login: ")
    with pytest.raises(Refused) as refused:
        service.websocket("sessions/trial/serial", token=service.token("viewer"), over="https")
    assert refused.value.status == 403
    # Without an upgrade.
    plain = service.call("GET", "sessions/trial/serial")
    assert plain.status == 426 and "websocket" in plain.json["detail"]


def test_a_page_of_another_origin_gets_no_websocket(service):
    boot(service)
    cookie = login(service)
    own = f"https://127.0.0.1:{service.port}"
    for origin in (None, "https://evil.example", f"http://127.0.0.1:{service.port}", "null", own + ".evil.example"):
        headers = {**cookie, **({"Origin": origin} if origin else {})}
        with pytest.raises(Refused) as refused:
            service.websocket("sessions/trial/screen", headers=headers, over="https")
        assert refused.value.status == 403, origin
    with service.websocket("sessions/trial/screen", headers={**cookie, "Origin": own}, over="https") as screen:
        screen.read_until(b"RFB ")
        # It ends with the login.
        out = {**cookie, "Sec-Fetch-Site": "same-origin"}
        assert service.call("DELETE", "login", headers=out, over="https").status == 204
        started = time.monotonic()
        assert screen.closed().code == 1008
        assert time.monotonic() - started < 15


def test_a_console_ends_with_its_token(service):
    boot(service)
    token = service.post("tokens", {"name": "ci", "role": "operator", "machines": ["web*"]})
    identity = token["text"].split("_")[1]
    with service.websocket("sessions/trial/serial", token=token["text"], over="https") as serial:
        serial.read_until(b"small login: ")
        assert service.call("DELETE", f"tokens/{identity}").status == 204
        end = serial.closed()
        assert end.code == 1008 and "token" in end.reason


def test_the_number_of_consoles_is_bounded(service):
    boot(service)
    clients = [service.websocket(f"sessions/trial/{'screen' if i % 2 else 'serial'}") for i in range(8)]
    for i, client in enumerate(clients):
        client.read_until(b"RFB " if i % 2 else b"small login: ")
    with service.websocket("sessions/trial/serial") as ninth:
        end = ninth.closed()
    assert end.code == 1013 and "8 consoles of this machine are open" in end.reason
    clients.pop().end()

    def is_free():
        with service.websocket("sessions/trial/serial") as client:
            try:
                return client.read_until(b"small login: ")
            except Closed:
                return False

    wait_until(is_free, "a place is free again")
    for client in clients:
        client.end()


def test_a_slow_client_stops_neither_machine_nor_service(service):
    """One client never reads; another one gets megabytes through the same port."""
    boot(service)
    with service.websocket("sessions/trial/serial") as slow, service.websocket("sessions/trial/serial") as serial:
        serial.read_until(b"small login: ")
        sent = bytes(range(ord("a"), ord("a") + 20)) * 50
        sending = threading.Thread(target=lambda: [serial.send(sent) for _ in range(100)])
        sending.start()
        for _ in range(100):
            serial.read_until(sent)
        sending.join()
        assert slow.read_until(b"small login: ")
        status = pathlib.Path(f"/proc/{service.process.pid}/status").read_text(encoding="utf-8")
    peak_kib = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
    assert peak_kib < 300 * 1024


def test_a_malformed_message_ends_its_own_websocket_with_a_reason(service):
    boot(service)
    bad = {
        "too long": lambda client: client.send(b"a" * (65 << 10)),
        "not UTF-8": lambda client: client.send(b"\xff", TEXT),
        "of an unknown kind": lambda client: client.send(b"a", 0x3),
        "the end of none": lambda client: client.send(b"a", CONTINUATION),
        "a long ping": lambda client: client.send(b"a" * 126, PING),
        "not masked": lambda client: client.socket.sendall(b"\x82\x01a"),
        "reserved bits": lambda client: client.socket.sendall(b"\xf2\x80\0\0\0\0"),
    }
    with service.websocket("sessions/trial/serial") as other:
        for what, send in bad.items():
            with service.websocket("sessions/trial/serial") as client:
                client.read_until(b"small login: ")
                send(client)
                end = client.closed()
            assert end.code == 1002 and "malformed" in end.reason and "64 KiB" in end.reason, (what, str(end))
        other.send(b"still there")
        other.read_until(b"still there")


# --------------------------------------------------------------------- refusals


def test_starts_that_cannot_succeed_are_refused(service):
    for new, status, word in [
        ({"address": "web01/latest", "memory_mib": 1}, 400, "memory_mib"),
        ({"address": "web01/latest", "cpus": 0}, 400, "cpus"),
        ({"address": "web01/latest", "network": "bridge"}, 400, "bridge"),
        ({"address": "web01/latest/vda"}, 400, "MACHINE/POINT"),
        ({"address": "live/none"}, 404, "no session"),
        ({"address": "live/none", "session": "x"}, 400, "session"),
        ({"address": "web01/latest", "session": "../x"}, 400, ""),
    ]:
        answer = service.call("POST", "runs", {"kind": "boot", **new})
        assert answer.status == status and word in answer.json["detail"], (new, answer.body)
    viewer = service.token("viewer")
    assert service.call("POST", "runs", {"kind": "boot", "address": "web01/latest"}, token=viewer).status == 403
    # More memory than there is.
    run = service.post("runs", {"kind": "boot", "address": "web01/latest", "memory_mib": 16 << 20})["run"]
    wait_until(lambda: service.call("GET", f"runs/{run}").status == 200, "the run begins")
    error = ended(service, run)["result"]["error"]
    assert error["kind"] == "incomplete" and "of memory" in error["message"], error
    assert service.get("sessions")["sessions"] == [], "nothing was published"


def test_servers_are_started_only_where_safe(service, tmp_path):
    operator, some = service.token("operator"), service.token("operator", ["web*"])
    for new, token, status in [
        ({"protocol": "nbd", "listen": "0.0.0.0:10999"}, operator, 403),
        ({"protocol": "nbd", "listen": "0.0.0.0:10999"}, None, 400),
        ({"protocol": "nfs", "listen": "0.0.0.0:2999"}, None, 400),
        ({"protocol": "nfs", "allow": ["everyone"]}, None, 400),
        ({"protocol": "nfs", "allow": ["10.0.0.0/33"]}, None, 400),
        ({"protocol": "nbd", "listen": "127.0.0.1:22"}, operator, 400),
        ({"protocol": "nbd", "listen": "[::1]:1023"}, None, 400),
        ({"protocol": "nfs", "mount_port": 111}, operator, 400),
        ({"protocol": "nbd", "tls_psk": "/etc/keys"}, operator, 403),
        ({"protocol": "nbd", "tls_psk": "keys"}, None, 400),
        ({"protocol": "nbd", "tls_psk": str(service.passphrase_file)}, None, 400),
        ({"protocol": "nbd"}, some, 403),
        ({"protocol": "ftp"}, None, 400),
    ]:
        answer = service.call("POST", "runs", {"kind": "serve", **new}, token=token)
        assert answer.status == status, (new, answer.body)
    port = free_port()
    new = {"kind": "serve", "protocol": "nbd", "listen": f"127.0.0.1:{port}", "read_only": True}
    run = service.post("runs", new, token=operator)["run"]

    def is_served():
        uri = f"nbd://127.0.0.1:{port}/web01/latest/vda"
        return subprocess.run(["nbdinfo", "--size", uri], capture_output=True, check=False).stdout == b"1048576\n"

    wait_until(is_served, "the disk is served")
    service.call("POST", f"runs/{run}/cancel", {})
    assert ended(service, run)["state"] in ("ok", "cancelled")
