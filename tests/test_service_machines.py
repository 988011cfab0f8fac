"""The service's view of the repository, and the contents of disks that it serves."""

import hashlib
import json
import shutil
import subprocess
import time

import pytest

from support.cli import Coldrise
from support.image import Image
from support.service import Coldrised

MIB = 1 << 20


@pytest.fixture
def image(tmp_path):
    image = Image(8 * MIB)
    image.fill(MIB, 2 * MIB, "random")
    image.fill(5 * MIB, MIB // 2, "random")
    return image.save(tmp_path / "disk.raw")


@pytest.fixture
def repository(coldrise, image):
    for machine in ("db01", "web01"):
        coldrise.backup(machine, vda=image)
    return coldrise


@pytest.fixture
def service(tmp_path, repository):
    with Coldrised(tmp_path, repository.repository, repository.passphrase_file) as service:
        wait_for(lambda: service.call("GET", "machines").status == 200)
        yield service


def wait_for(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def names(service, **keywords):
    return [machine["machine"] for machine in service.get("machines", **keywords)]


def test_the_api_matches_the_command_line(service, repository):
    assert service.get("points") == repository.json("list")
    point = service.get("points")["machines"][1]["points"][0]
    assert service.get(f"machines/web01/points/{point['point']}") == repository.json("show", point["address"])
    assert service.get("machines/web01/points/latest") == repository.json("show", "web01/latest")
    assert service.get("sessions") == repository.json("sessions")
    preview = service.post("retention/preview", {"rules": {"keep_last": 1}})
    assert [machine["machine"] for machine in preview["machines"]] == ["db01", "web01"]
    assert service.get("machines/web01")["points"] == 1


def test_the_site_summary_counts_only_visible_machines(service, repository):
    site = service.get("site")
    assert (site["machines"], site["protected"], site["proven"], site["copies_behind"]) == (2, 0, 0, None)
    assert site["oldest_machine"] == "db01" and site["available_bytes"] > 0
    service.post("jobs", {"name": "all", "kind": "backup", "machines": ["db01", "web01"], "disks": {"vda": "raw:/none"}, "schedule": ["*-*-* 04:00"]})
    # Without a boot it is protected, but not proven.
    assert (service.get("site")["protected"], service.get("site")["proven"]) == (2, 0)
    own = service.get("site", token=service.token("viewer", ["web*"]))
    assert (own["machines"], own["oldest_machine"], own["available_bytes"]) == (1, "web01", None)


def test_concurrent_changes_are_detected_and_reported(service, repository, image):
    repository.backup("new01", vda=image)
    wait_for(lambda: names(service) == ["db01", "new01", "web01"])
    repository.publish("web01/latest", "trial")
    wait_for(lambda: service.get("sessions")["sessions"])
    assert service.get("sessions/trial")["machine"] == "web01"


def test_a_changed_protection_is_seen(tmp_path, repository):
    """Two documents of a point differ in little without encryption."""
    point = repository.json("list")["machines"][0]["points"][0]["address"]
    repository.json("protect", point)
    with Coldrised(tmp_path, repository.repository, repository.passphrase_file) as service:
        wait_for(lambda: service.call("GET", "machines").status == 200)
        for command in ("unprotect", "protect", "unprotect"):
            repository.json(command, point)
            wait_for(lambda: service.get("points") == repository.json("list"))
            wait_for(lambda: service.get("machines/db01/points")["points"][0]["is_protected"] == (command == "protect"))


def test_differences_match_the_command_line(service, repository, image):
    first = service.get("machines/web01/points/latest")["address"]
    with image.open("r+b") as disk:
        disk.seek(3 * MIB)
        disk.write(b"new" * 1000)
    second = repository.backup("web01", vda=image)
    shown = service.get(f"difference?from={first}&to={second}")
    reported = repository.json("diff", first, second)
    reported.pop("elapsed_ms")
    assert shown == reported
    [disk] = shown["disks"]
    assert [(part["offset_bytes"], part["differing_bytes"]) for part in disk["ranges"]] == [(3 * MIB, disk["differing_bytes"])]
    assert service.get(f"difference?from={first}&to={first}")["is_equal"]
    for wrong, status in (("web01/20200101T000000Z", 404), ("web01", 400), ("live/trial", 400), (f"{second}/vda", 400)):
        assert service.call("GET", f"difference?from={first}&to={wrong}").status == status, wrong
    token = service.token("viewer", ["web*"])
    assert service.get(f"difference?from={first}&to={second}", token=token) == shown
    assert service.call("GET", f"difference?from={first}&to=db01/latest", token=token).status == 404


def test_many_differences_are_joined(service, repository, nbdkit, tmp_path):
    """10,000 changed blocks of 4 KiB, each 16 KiB apart: the answer stays small, and the differences exact."""
    first = repository.backup("big01", vda=Image(256 * MIB).save(tmp_path / "big.raw"))
    with nbdkit().connect(repository.publish(first, "trial")["vda"]) as disk:
        for index in range(10_000):
            disk.pwrite(b"w" * 4096, index * 16384)
        disk.flush()
    sealed = repository.json("seal", "trial")["address"]
    [disk] = service.get(f"difference?from={first}&to={sealed.replace('+', '%2B')}")["disks"]
    assert disk["range_count"] == 10_000 and disk["differing_bytes"] == 10_000 * 4096
    assert len(disk["ranges"]) <= 4096
    assert sum(part["differing_bytes"] for part in disk["ranges"]) == disk["differing_bytes"]


def test_the_host_reports_its_free_resources(service):
    host = service.get("host", token=service.token("viewer", ["web*"]))
    assert host["processors"] >= 1 and host["machines"] == host["machines_memory_mib"] == 0
    assert 0 < host["fitting_memory_mib"] << 20 < host["available_bytes"] <= host["memory_bytes"]
    assert service.call("GET", "host", token=service.token("backup")).status == 403


def test_the_hardware_of_a_point_matches_its_configuration(service, repository, image, tmp_path):
    default = {"cpus": 2, "memory_mib": 2048, "firmware": "bios", "disk_bus": "virtio", "network": "none"}
    assert service.get("machines/web01/points/latest")["hardware"] == default
    configuration = tmp_path / "web01.json"
    configuration.write_text('{"memory_mib": 512, "cpus": 4, "disk_bus": "sata"}')
    repository.json("backup", "web01", "--config", configuration, f"vda=raw:{image}")
    expected = {**default, "cpus": 4, "memory_mib": 512, "disk_bus": "sata"}
    assert service.get("machines/web01/points/latest")["hardware"] == expected


def test_a_token_sees_only_its_machines(service, repository):
    repository.publish("db01/latest", "trial")
    token = service.token("operator", ["web*"])
    assert names(service, token=token) == ["web01"]
    listed = service.get("points", token=token)["machines"]
    assert [machine["machine"] for machine in listed] == ["web01"]
    assert service.get("sessions", token=token)["sessions"] == []
    hidden = ["machines/db01", "machines/db01/points", "machines/db01/points/latest",
              "machines/db01/points/latest/disks/vda.raw", "machines/db01/points/latest/screenshot.png",
              "sessions/trial", "machines/live/points/trial/disks/vda",
              "machines/web01%2F..%2Fdb01/points/latest/disks/vda.raw"]
    for path in hidden:
        answer = service.call("GET", path, token=token)
        assert answer.status in (400, 404), (path, answer.status)
        assert b"db01" not in answer.body.replace(b"machines/db01", b"") or "db01" in path
    unknown = service.call("GET", "machines/nothere", token=token)
    assert unknown.json["detail"] == "there is no machine nothere"
    # Requests about all machines are refused.
    for path in ("repository/space", "repository/damage"):
        assert service.call("GET", path, token=token).status == 403


def test_a_viewer_reads_no_content(service):
    token = service.token("viewer")
    assert names(service, token=token) == ["db01", "web01"]
    for path in ("machines/web01/points/latest/disks/vda.raw", "machines/web01/points/latest/screenshot.png"):
        assert service.call("GET", path, token=token).status == 403


@pytest.mark.encrypted
def test_a_backup_rejects_files_of_other_users_and_of_the_service(service, repository, image, tmp_path):
    start = {"kind": "backup", "machine": "web01", "disks": {"vda": f"raw:{image}"}}
    limited = service.token("admin", ["web*"])
    assert service.call("POST", "runs", start, token=limited).status == 403
    link = tmp_path / "link"
    link.symlink_to(repository.passphrase_file)
    own = [repository.passphrase_file, link, service.state / "coldrised.db", service.state / "tls" / "key.pem",
           repository.repository / "repository.json"]
    for path in own:
        answer = service.call("POST", "runs", {**start, "disks": {"vda": f"raw:{path}"}})
        assert answer.status == 400 and "service itself" in answer.json["detail"], path
        job = {"name": "own", "kind": "backup", "machines": ["web01"], "disks": {"vda": f"raw:{path}"}}
        assert service.call("POST", "jobs", job).status == 400, path
        target = {"kind": "restore", "address": "web01/latest/vda", "target": str(path), "replace": True}
        assert service.call("POST", "runs", target).status == 400, path


def test_disks_are_read_with_ranges(service, image):
    content = image.read_bytes()
    path = "machines/web01/points/latest/disks/vda.raw"
    whole = service.call("GET", path)
    assert (whole.status, whole.headers["Accept-Ranges"]) == (200, "bytes")
    assert hashlib.sha256(whole.body).digest() == hashlib.sha256(content).digest()
    for text, part in [("0-0", content[:1]), ("1048575-1048580", content[MIB - 1:MIB + 5]),
                       ("8388600-", content[-8:]), ("-4096", content[-4096:]),
                       ("1048576-3145727", content[MIB:3 * MIB])]:
        answer = service.call("GET", path, headers={"Range": f"bytes={text}"})
        assert (answer.status, answer.body) == (206, part), text
        assert answer.headers["Content-Range"].endswith(f"/{8 * MIB}")
    behind = service.call("GET", path, headers={"Range": f"bytes={8 * MIB}-"})
    assert (behind.status, behind.headers["Content-Range"]) == (416, f"bytes */{8 * MIB}")
    tag = whole.headers["ETag"]
    assert service.call("GET", path, headers={"If-None-Match": tag}).status == 304
    # A range of another version is not mixed in.
    other = service.call("GET", path, headers={"Range": "bytes=0-0", "If-Range": '"other"'})
    assert other.status == 200
    head = service.call("HEAD", path)
    assert (head.status, head.headers["Content-Length"], head.body) == (200, str(8 * MIB), b"")
    reads = [entry for entry in service.get("audit") if entry["action"] == "read disk"]
    assert len(reads) == 1 and reads[0]["who"] == "unix:root" and reads[0]["subject"].startswith("web01/")


@pytest.mark.parametrize("extension", ["raw", "qcow2", "vhdx", "vhd", "vmdk"])
def test_every_format_is_a_disk_that_qemu_reads(service, image, tmp_path, extension):
    folder = "machines/web01/points/latest/disks"
    files = [f"vda.{extension}"] + (["vda-flat.vmdk"] if extension == "vmdk" else [])
    for name in files:
        (tmp_path / name).write_bytes(service.call("GET", f"{folder}/{name}").body)
    word = {"vhd": "vpc"}.get(extension, extension)
    same = subprocess.run(["qemu-img", "compare", "-f", word, "-F", "raw", tmp_path / files[0], image],
                          capture_output=True, text=True)
    # A VHD's size is rounded up to its geometry; the rest is zero.
    assert same.returncode == 0, same.stdout + same.stderr


def test_unknown_names_and_malformed_input_are_problems(service):
    for method, path, body, status in [
        ("GET", "machines/nothere", None, 404),
        ("GET", "machines/UPPER", None, 400),
        ("GET", "machines/web01/points/20200101T000000Z", None, 404),
        ("GET", "machines/web01/points/yesterday", None, 400),
        ("GET", "machines/web01/points/latest/disks/vdz.raw", None, 404),
        ("GET", "machines/web01/points/latest/disks/vda.exe", None, 404),
        ("GET", "machines/web01/points?limit=x", None, 400),
        ("GET", "machines/web01/points/latest/screenshot.png", None, 404),
        ("GET", "sessions/nothere", None, 404),
        ("GET", "nothing", None, 404),
        ("PUT", "machines", {}, 405),
        ("POST", "retention/preview", b"{", 400),
        ("POST", "retention/preview", {"rules": {"keep_last": 0}}, 400),
        ("POST", "retention/preview", {"rules": {}, "more": 1}, 400),
        ("POST", "retention/preview", b"x" * (300 << 10), 413),
    ]:
        answer = service.call(method, path, body, headers={"Content-Type": "application/json"} if body else None)
        assert answer.status == status, (method, path, answer.status, answer.body)
        problem = json.loads(answer.body)
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert problem["status"] == status and problem["detail"] and problem["kind"]
    missing = service.call("GET", "machines/nothere").json
    assert missing["kind"] == "not_found" and missing["exit_code"] == 1


def test_an_unreachable_repository_returns(service, repository, image):
    place, away = repository.repository, repository.repository.with_name("away")
    place.rename(away)
    wait_for(lambda: service.call("GET", "machines").status == 503)
    problem = service.call("GET", "points").json
    assert problem["kind"] == "no_repository" and str(place) in problem["detail"]
    assert service.call("GET", "/healthz").status == 200
    Coldrise(away, repository.passphrase_file).backup("later", vda=image)
    away.rename(place)
    wait_for(lambda: service.call("GET", "machines").status == 200)
    assert names(service) == ["db01", "later", "web01"]
    # It is logged after all consequences are handled.
    wait_for(lambda: "the repository is back" in service.log)


@pytest.mark.encrypted
def test_another_repository_in_its_place_is_refused(service, repository, tmp_path):
    place = repository.repository
    other = Coldrise(tmp_path / "other", repository.passphrase_file)
    other.init()
    place.rename(place.with_name("away"))
    shutil.move(other.repository, place)

    def is_refused():
        # At first it may be seen as missing.
        answer = service.call("GET", "machines")
        return answer.status != 200 and "another repository" in answer.json["detail"]

    wait_for(is_refused)
