"""Jobs that copy: by hand, after backups, after each point; their state, alarms and metrics. With a second site over a link."""

import contextlib
import json
import os
import random
import signal
import time

import pytest

from support.far_site import FarSite
from support.nbdserver import wait_until
from support.s3 import S3Server
from support.service import Coldrised
from support.wallclock import BothClocks, WallClock

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def far(coldrise, tmp_path):
    site = FarSite(tmp_path)
    site.put_gate()
    site.pair(coldrise)
    yield site
    site.close()


def clocked(folder, coldrise):
    """The service with a wall clock that can be set."""
    clock = WallClock(folder)
    service = Coldrised(folder, coldrise.repository, coldrise.passphrase_file, environment=clock.environment())
    service.clock = clock
    return service


def later(service):
    """Skips the pause between two copies of a machine that follow points."""
    service.clock.set(service.clock.offset_s + 15)


@pytest.fixture
def service(coldrise, tmp_path):
    with clocked(tmp_path, coldrise) as service:
        wait_until(lambda: service.call("GET", "copies").status == 200, "the repository")
        yield service


def back_up(coldrise, folder, machine, seed=0, size=MIB, *arguments):
    path = folder / f"{machine}.img"
    path.write_bytes(random.Random(f"{machine} {seed}").randbytes(size))
    return coldrise.json("backup", machine, f"vda=raw:{path}", *arguments)["address"]


def copy_job(name="offsite", **more):
    return {"name": name, "kind": "copy", "to": "far", "retries": 0, "retry_seconds": 1, **more}


def printed(program, *arguments):
    done = program.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def points(site, machine="web01"):
    listed = {found["machine"]: found["points"] for found in site.program.json("list")["machines"]}
    return {point["point"] for point in listed.get(machine, [])}


def target(service, name="far"):
    return next((found for found in service.get("copies") if found["target"] == name), None)


def outcomes(service, name="offsite", kind="copy"):
    return {found["machine"]: found for found in service.get(f"jobs/{name}")["outcomes"] if found["kind"] == kind}


def reaches(service, state, name="far"):
    return wait_until(lambda: (found := target(service, name)) and found["state"] == state and found, f"{name} is {state}")


def metrics(service, **keywords):
    answer = service.call("GET", "/metrics", **keywords)
    assert answer.status == 200, answer.body
    found = {}
    for line in answer.body.decode().splitlines():
        if line.startswith(("coldrise_copy_", "coldrise_coming_")):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def test_a_job_copies_all_machines_and_reports_where_they_are(coldrise, service, far, tmp_path):
    for machine in ("web01", "db01"):
        back_up(coldrise, tmp_path, machine)
    assert reaches(service, "never")["machines"] == []
    service.post("jobs", copy_job(rate_bytes_per_second=64 * MIB))
    runs = service.post("jobs/offsite/start", {}, expected=(202,))["runs"]
    # One run for all machines: one line.
    assert len(runs) == 1
    current = reaches(service, "current")
    assert {m["machine"]: m["points_there"] for m in current["machines"]} == {"web01": 1, "db01": 1}
    wait_until(lambda: outcomes(service).get(None, {}).get("state") == "ok", "the end of the run")
    assert points(far) and points(far, "db01")
    found = metrics(service)
    labels = '{target="far",machine="web01",far_machine="web01"}'
    assert found[f"coldrise_copy_points_behind{labels}"] == 0 == found[f"coldrise_copy_failing{labels}"]
    assert found[f"coldrise_copy_sent_bytes{labels}"] > MIB
    assert found[f'coldrise_copy_saved_bytes{labels[:-1]},by="base"}}'] == 0
    assert abs(found[f"coldrise_copy_last_cut_timestamp_seconds{labels}"] - time.time()) < 600
    # The service reports it also when no copy runs.
    back_up(coldrise, tmp_path, "web01", 1)
    behind = reaches(service, "behind")
    assert (behind["points_behind"], behind["bytes_behind"]) == (1, MIB)
    assert metrics(service)[f"coldrise_copy_points_behind{labels}"] == 1
    # It is what the command line says.
    (same,) = coldrise.json("copies")["targets"]
    assert same == behind
    # A token for web01 sees neither db01 nor totals that include it.
    seen = service.call("GET", "copies", token=service.token("viewer", ["db*"])).json
    assert [m["machine"] for m in seen[0]["machines"]] == ["db01"] and seen[0]["points_behind"] == 0
    assert service.call("GET", "copies/history?target=far", token=service.token("viewer", ["db*"])).status == 403
    days = service.get("copies/history?target=far")["days"]
    assert all(day["points"] >= 0 for day in days)
    assert service.call("GET", "copies/history?target=none").status == 404


def test_events_announce_changed_copies(coldrise, service, far, tmp_path):
    back_up(coldrise, tmp_path, "web01")
    with contextlib.closing(service.connection(timeout_s=60)) as stream:
        stream.request("GET", "/api/v1/events")
        response = stream.getresponse()
        coldrise.json("copy", "--to", "far")
        found, deadline = None, time.monotonic() + 60
        while not found:
            # The stream itself stays alive: it sends comments.
            assert time.monotonic() < deadline
            line = response.readline().decode()
            if line.startswith("data:"):
                event = json.loads(line[5:])
                found = event if event.get("type") == "copies" else None
        assert found["target"] == "far"


def test_copies_follow_backups(coldrise, service, far, tmp_path):
    for machine in ("web01", "db01"):
        (tmp_path / f"{machine}.img").write_bytes(os.urandom(256 * KIB))
    service.post("jobs", copy_job(machines=["web*"], follows="backups"))
    service.post("jobs", {"name": "nightly", "kind": "backup", "machines": ["web01", "db01"],
                          "disks": {"vda": f"raw:{tmp_path}/{{machine}}.img"}})
    service.post("jobs/nightly/start", {}, expected=(202,))
    wait_until(lambda: points(far), "the copy")
    wait_until(lambda: not service.get("queue")["runs"], "the end of all runs")
    assert outcomes(service).keys() == {"web01"} and points(far, "db01") == set()
    # A point that no job made is not copied by this.
    back_up(coldrise, tmp_path, "web01", 2)
    reaches(service, "behind")
    assert service.get("queue")["runs"] == []


def test_copies_follow_points_over_restarts_and_failures(coldrise, service, far, tmp_path):
    first = back_up(coldrise, tmp_path, "web01")
    service.post("jobs", copy_job(follows="points", retries=20, behind_limit_minutes=1))
    wait_until(lambda: points(far) == {first.split("/")[1]}, "the first point")
    back_up(coldrise, tmp_path, "web01", 1)
    later(service)
    wait_until(lambda: len(points(far)) == 2, "the second point")
    reaches(service, "current")
    # Events while the service is off are not lost.
    service.stop()
    back_up(coldrise, tmp_path, "web01", 2)
    later(service)
    service.start()
    wait_until(lambda: len(points(far)) == 3, "the point of before the start")
    # The other site is away: it is tried again until it is back.
    far.stop()
    back_up(coldrise, tmp_path, "web01", 3)
    later(service)
    wait_until(lambda: outcomes(service)["web01"]["failures"] > 0, "a failure")
    assert reaches(service, "failing")["failure"]["message"]
    far.start()
    wait_until(lambda: len(points(far)) == 4, "the point of meanwhile")
    reaches(service, "current")
    assert outcomes(service).keys() == {"web01"}


def alarms(service, topic):
    return {alarm["key"]: alarm for alarm in service.get("alarms?active=true") if alarm["topic"] == topic}


def test_an_alarm_reports_late_copies_until_they_arrive(coldrise, service, far, tmp_path):
    service.post("jobs", copy_job(machines=["web01"], behind_limit_minutes=1))
    back_up(coldrise, tmp_path, "web01")
    back_up(coldrise, tmp_path, "db01")
    reaches(service, "never")
    assert alarms(service, "copies") == {}
    # The minute of the limit. Alarms are looked for when something changes, else every 20 s.
    service.clock.set(70)
    back_up(coldrise, tmp_path, "db01", 1)
    found = wait_until(lambda: alarms(service, "copies"), "the alarm")
    (key, alarm), = found.items()
    assert (key, alarm["machine"], alarm["severity"]) == ("copies:offsite:web01", "web01", "fail")
    assert "never copied to far" in alarm["summary"] and "1 min" in alarm["details"]
    service.post("jobs/offsite/start", {}, expected=(202,))
    wait_until(lambda: alarms(service, "copies") == {}, "the end of the alarm")


def test_a_machine_that_cannot_be_copied_fails_its_job_with_the_reason(coldrise, service, far, tmp_path):
    time_option = ("--time", "20261101T100000Z")
    back_up(coldrise, tmp_path, "web01", 0, MIB, *time_option)
    back_up(far.program, tmp_path, "web01", 1, MIB, *time_option)
    service.post("jobs", copy_job())
    service.post("jobs/offsite/start", {}, expected=(202,))
    failed = wait_until(lambda: outcomes(service).get(None), "the end of the run")
    assert failed["state"] == "failed" and "web01: " in failed["message"] and "another point" in failed["message"]
    (alarm,) = wait_until(lambda: alarms(service, "run_failed"), "the alarm").values()
    assert "another point" in alarm["details"]


@pytest.mark.encrypted
def test_a_local_repository_can_be_a_copy_target(coldrise, service, tmp_path):
    other = tmp_path / "second"
    coldrise.json("--repo", other, "init")
    back_up(coldrise, tmp_path, "web01")
    service.post("jobs", copy_job(to=str(other), follows="points", prefix="site-a-"))
    current = reaches(service, "current", str(other))
    (machine,) = current["machines"]
    assert (current["is_link"], machine["far_machine"], machine["total"]["points"]) == (False, "site-a-web01", 1)
    assert "line" not in machine["total"]
    back_up(coldrise, tmp_path, "web01", 1)
    later(service)
    wait_until(lambda: target(service, str(other))["machines"][0]["points_there"] == 2, "the second point")


def test_invalid_jobs_are_refused(service, coldrise):
    for job, word in ((copy_job(to=None), "to"), (copy_job(to="Far Site"), "to"), (copy_job(prefix="/"), "prefix"),
                      (copy_job(rate_windows=["mon-fri 08:00-18:00=5M", "sat,sun"]), "rate_windows: \"sat,sun\" has no rate"),
                      (copy_job(rate_windows=["mon-fry=5M"]), "rate_windows: \"mon-fry\""), (copy_job(rate_windows=["sat=fast"]), "rate_windows"),
                      (copy_job(rate_windows=["mon-fri=off", "sat,sun=off"]), "rate_windows: nothing would ever be sent"),
                      (copy_job(last=0), "last"), (copy_job(behind_limit_minutes=0), "behind_limit_minutes"),
                      (copy_job(to_passphrase_file="/x"), "to_passphrase_file"), (copy_job(disks={"vda": "raw:/x"}), "disks"),
                      (copy_job(to=str(coldrise.repository)), ""), (copy_job(to=str(service.state)), ""),
                      ({"name": "gc", "kind": "gc", "follows": "points"}, "follows")):
        answer = service.call("POST", "jobs", job)
        assert answer.status == 400 and word in answer.json["detail"], (job, answer.body)
    assert service.get("jobs") == []


def test_incomplete_points_are_shown_at_the_receiving_site(coldrise, far, tmp_path):
    second = tmp_path / "second.img"
    second.write_bytes(random.Random(1).randbytes(12 * MIB))
    address = back_up(coldrise, tmp_path, "web01", 0, 4 * MIB, f"vdb=raw:{second}")
    work = tmp_path / "there"
    work.mkdir()
    clock = BothClocks(tmp_path)
    far.stop(signal.SIGKILL)
    far.start(clock.environment())
    with Coldrised(work, far.program.repository, far.program.passphrase_file) as there:
        wait_until(lambda: there.call("GET", "coming").status == 200, "the repository")
        assert there.get("coming") == []
        with contextlib.closing(there.connection(timeout_s=60)) as stream:
            stream.request("GET", "/api/v1/events")
            response = stream.getresponse()
            copy = far.held(coldrise, 9 * MIB, "--to", "far")
            (found,) = wait_until(lambda: there.get("coming"), "the point")
            assert (found["address"], found["machine"], found["size_bytes"]) == (address, "web01", 16 * MIB)
            assert found["is_reachable"] and found["percent_here"] < 100 and found["missing_bytes"] > 0
            wait_until(lambda: b'"coming"' in response.readline(), "the event")
        # It is shown to those who may see its machine, and to programs that ask the service.
        assert there.call("GET", "coming", token=there.token("viewer", ["db*"])).json == []
        assert len(there.call("GET", "coming", token=there.token("viewer", ["web*"])).json) == 1
        (work / "token").write_text(there.token("viewer"))
        remote = ["--server", f"https://localhost:{there.port}", "--token-file", work / "token",
                  "--server-certificate", there.state / "tls" / "cert.pem"]
        (listed,) = json.loads(printed(far.program, "--json", *remote, "list", "web01"))["coming"]
        assert listed["address"] == address
        # The same in the metrics, of each machine.
        label = '{machine="web01"}'
        found = metrics(there)
        assert (found[f"coldrise_coming_points{label}"], found[f"coldrise_coming_connected{label}"]) == (1, 1)
        assert 0 < found[f"coldrise_coming_missing_bytes{label}"] <= 16 * MIB
        assert metrics(there, token=there.token("metrics", ["db*"]), over="https") == {}
        far.let_note(clock)
        wait_until(lambda: there.get("coming")[0]["percent_here"] >= 20, "a part of it")
        session = there.post("runs", {"kind": "publish", "address": address, "session": "early"})["run"]
        # A run that has not begun is not known yet.
        wait_until(lambda: (there.call("GET", f"runs/{session}").json or {}).get("state") == "ok", "the session")
        # The other site is lost: missing content cannot be read.
        copy.kill()
        copy.communicate()
        far.gate.release()
        wait_until(lambda: not there.get("coming")[0]["is_reachable"], "its loss")
        assert metrics(there)[f"coldrise_coming_connected{label}"] == 0
        # `show` says the same from another host as here.
        for command in (["show", address], ["show", "web01/latest"], ["--json", "show", address]):
            def is_same(command=command):
                return printed(far.program, *remote, *command) == printed(far.program, *command)

            wait_until(is_same, f"the same answer to {command}")
        shown = printed(far.program, *remote, "show", address)
        assert f"{address}/vdb  12.0 MiB" in shown and "the other site is not connected" in shown, shown
        unknown = far.program.run(*remote, "show", "web01/20200101T000000Z")
        assert unknown.returncode == 1 and "being copied" not in unknown.stderr, unknown.stderr
        coldrise.json("copy", "--to", "far")
        wait_until(lambda: there.get("coming") == [], "the end of the copy")
        assert metrics(there) == {}
        assert points(far) == {address.split("/")[1]}


@pytest.mark.encrypted
def test_a_job_copies_to_a_bucket(coldrise, tmp_path):
    back_up(coldrise, tmp_path, "web01")
    server = S3Server(tmp_path / "s3").start()
    with contextlib.closing(server), Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file, environment=server.env()) as service:
        url = server.url("site-a")
        coldrise.more = server.env()
        coldrise.json("bucket", "init", url)
        for wrong, words in (({"to": "s3://a\nb"}, "to:"), ({"to": "s4://bucket"}, "neither")):
            assert words in service.post("jobs", copy_job(**wrong), expected=(400,))["detail"]
        service.post("jobs", copy_job(to=url, to_passphrase_file=str(coldrise.passphrase_file), follows="points"))
        service.post("jobs/offsite/start", {}, expected=(202,))
        assert reaches(service, "current", url)["is_link"] is False
        back_up(coldrise, tmp_path, "db01")
        wait_until(lambda: len(coldrise.json("bucket", "list", url)["points"]) == 2, "the copy of the new point")
        server.stop()
        back_up(coldrise, tmp_path, "db01", 1)
        assert reaches(service, "behind", url)["machines"]
