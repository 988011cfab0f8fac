"""The metrics of the service, and the board and alert rules made from them."""

import json
import os
import pathlib
import re
import time

import pytest

from support.service import Coldrised

GRAFANA = pathlib.Path(__file__).resolve().parents[1] / "docs" / "grafana"
NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
OURS = re.compile(r"\b(?:coldrise|process)_[a-z_]+\b")


def parse(text):
    """The samples of an exposition by name; strict, as the standard says."""
    samples, types, helped, last = {}, {}, set(), None
    *lines, end, empty = text.split("\n")
    assert (end, empty) == ("# EOF", "")
    for line in lines:
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            assert NAME.fullmatch(name) and rest, line
            if word == "HELP":
                assert name not in helped, f"{name} comes twice"
                helped.add(name)
            else:
                assert word == "TYPE" and rest in ("gauge", "info") and name not in types, line
                types[name] = rest
            last = name
            continue
        head, value = line.rsplit(" ", 1)
        name, _, inner = head.partition("{")
        family = name.removesuffix("_info") if types.get(last) == "info" else name
        assert family == last and family in types and family in helped, line
        labels, rest = {}, inner.removesuffix("}")
        assert not inner or inner.endswith("}")
        while rest:
            found = LABEL.match(rest)
            assert found and found[1] not in labels, line
            labels[found[1]] = found[2]
            rest = rest[found.end():]
        key = tuple(sorted(labels.items()))
        assert key not in samples.setdefault(name, {}), f"{line} comes twice"
        samples[name][key] = float(value)
    return samples


def metrics(service, **keywords):
    answer = service.call("GET", "/metrics", **keywords)
    assert answer.status == 200, answer.body
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    return parse(answer.body.decode())


@pytest.fixture
def service(tmp_path, coldrise):
    for machine in ("web01", "db01"):
        disk = tmp_path / f"{machine}.raw"
        disk.write_bytes(os.urandom(1 << 20))
        coldrise.json("backup", machine, f"vda=raw:{disk}")
    coldrise.json("publish", "web01/latest", "--name", "trial")
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        job = {"name": "nightly", "kind": "backup", "machines": ["web01"], "age_limit_hours": 26, "retries": 0,
               "disks": {"vda": f"raw:{tmp_path}/{{machine}}.raw"}}
        service.post("jobs", job)
        service.post("jobs/nightly/start", {})
        deadline = time.monotonic() + 30
        while not is_ready(metrics(service)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield service


def is_ready(found):
    return "coldrise_run_last_result" in found and "coldrise_machine_last_point_timestamp_seconds" in found \
        and found["coldrise_alarms"][(("severity", "warn"),)] == 1 \
        and found["coldrise_runs"][(("state", "running"),)] == 0


def of(machine):
    return (("machine", machine),)


def test_the_numbers_are_correct(service, coldrise):
    found = metrics(service)
    ages = found["coldrise_machine_last_point_timestamp_seconds"]
    assert set(ages) == {of("web01"), of("db01")}
    assert all(0 <= time.time() - at < 120 for at in ages.values())
    assert found["coldrise_damaged_points"] == {(): 0}
    assert set(found["coldrise_session_captured_bytes"]) == {(("session", "trial"),)}
    space = {dict(labels)["kind"]: value for labels, value in found["coldrise_repository_bytes"].items()}
    seen = os.statvfs(coldrise.repository)
    assert abs(space["available"] - seen.f_bavail * seen.f_frsize) < 1 << 30
    assert space["size"] == space["used"] + space["available"]
    # db01 is in no job.
    assert found["coldrise_alarms"] == {(("severity", "fail"),): 0, (("severity", "warn"),): 1}
    assert found["coldrise_machine_without_job"] == {of("web01"): 0, of("db01"): 1}
    assert found["coldrise_machine_age_limit_seconds"] == {of("web01"): 26 * 3600}
    assert found["coldrise_run_last_result"] == {(("job", "nightly"), ("machine", "web01")): 1}
    assert found["coldrise_queue_waiting"] == {(): 0}
    assert found["coldrise_runs"][(("state", "running"),)] == 0
    assert 5 << 20 < found["process_resident_memory_bytes"][()] < 300 << 20
    assert list(found["coldrise_build_info"].values()) == [1]


def test_a_scoped_token_sees_only_its_machines(service):
    token = service.token("metrics", ["db*"])
    found = metrics(service, token=token, over="https")
    assert set(found["coldrise_machine_last_point_timestamp_seconds"]) == {of("db01")}
    for site in ("coldrise_repository_bytes", "coldrise_damaged_points", "coldrise_session_captured_bytes",
                 "coldrise_runs"):
        assert site not in found
    assert not any("web01" in str(labels) for values in found.values() for labels in values)
    assert service.call("GET", "/metrics", token=service.token("backup"), over="https").status == 403
    assert service.call("GET", "/metrics", over="https").status == 401


def test_ages_stay_while_the_repository_is_away(service, coldrise):
    before = metrics(service)["coldrise_machine_last_point_timestamp_seconds"]
    coldrise.repository.rename(coldrise.repository.with_name("away"))
    deadline = time.monotonic() + 30
    while "coldrise_damaged_points" in (found := metrics(service)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    after = found["coldrise_machine_last_point_timestamp_seconds"]
    assert set(after) == set(before)
    assert all(abs(after[key] - before[key]) <= 1 for key in before)


def test_the_dashboard_and_the_rules_use_existing_metrics():
    """The source names each metric; the other tests show what it holds."""
    source = (GRAFANA.parents[1] / "server/service/src/metrics.rs").read_text()
    known = set(re.findall(r'"((?:coldrise|process)_[a-z_]+)"', source)) | {"coldrise_build_info"}
    board = json.loads((GRAFANA / "coldrise.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = re.findall(r"^\s+expr: (.*)$", (GRAFANA / "alerts.yml").read_text(), re.MULTILINE)
    assert len(queries) > 12 and len(rules) > 8
    used = {name for text in queries + rules for name in OURS.findall(text)}
    assert used <= known, used - known
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
