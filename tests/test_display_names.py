"""Display names of machines: from configurations or by hand, in lists, in searches, in jobs, in copies; hostile ones, too."""

import json

import pytest

from support.cli import Coldrise
from support.far_site import FarSite
from support.nbdserver import wait_until
from support.service import Coldrised

NAME = "Web Server 01 (Köln)"
LONGEST = "🖥" * 255


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk.raw"
    path.write_bytes(b"1" * 65536)
    return f"vda=raw:{path}"


@pytest.fixture
def backup(coldrise, disk):
    """Backs up a machine; returns the answer."""
    def make(machine="vm17", *options):
        return coldrise.json("backup", machine, disk, *options)

    return make


def name_of(coldrise, machine="vm17"):
    [listed] = coldrise.json("list", machine)["machines"]
    return listed.get("display_name")


def test_a_manual_name_is_kept_until_it_is_replaced(coldrise, backup):
    made = backup("vm17", "--display-name", NAME)
    assert made["display_name"] == name_of(coldrise) == coldrise.json("show", made["address"])["display_name"] == NAME
    text = coldrise.run("list").stdout
    assert text.splitlines()[0].split()[:3] == ["ADDRESS", "NAME", "KIND"] and NAME in text
    assert f"name         {NAME}" in coldrise.run("show", made["address"]).stdout
    # The next backup does not repeat it.
    assert backup()["display_name"] == name_of(coldrise) == NAME
    backup("vm17", "--display-name", LONGEST)
    assert name_of(coldrise) == LONGEST
    # A session of the first point seals a point of its own, which is older than the latest backup.
    coldrise.publish(made["address"], "trial")
    sealed = coldrise.json("seal", "trial")["address"]
    assert coldrise.json("show", sealed)["display_name"] == NAME
    assert name_of(coldrise) == LONGEST
    # The machine's own name removes it.
    assert "display_name" not in backup("vm17", "--display-name", "vm17")
    assert name_of(coldrise) is None
    assert "display_name" not in coldrise.json("show", "vm17/latest")


def test_names_of_configurations(coldrise, backup, tmp_path):
    for file, content, expected in [
            ("a.xml", f"<domain type='kvm'><name>vm17</name><title>{NAME}</title></domain>".encode(), NAME),
            ("b.xml", b"<domain type='kvm'><name>web server</name></domain>", "web server"),
            ("c.vmx", '.encoding = "UTF-8"\ndisplayName = "K|C3|B6ln |22alt|22"\n'.encode(), 'Köln "alt"'),
            ("d.vmx", '.encoding = "windows-1252"\r\ndisplayName = "Köln 2"\r\n'.encode("cp1252"), "Köln 2"),
            ("e.json", json.dumps({"display_name": "Mail <b>1</b>"}).encode(), "Mail <b>1</b>"),
            # Foreign names are cleaned.
            ("f.xml", "<domain type='kvm'><title>a\u202eb&#10;c\u200b</title></domain>".encode(), "ab c"),
            # The machine's own name is none: that of the latest backup stays.
            ("g.xml", b"<domain type='kvm'><name>vm17</name></domain>", "ab c")]:
        path = tmp_path / file
        path.write_bytes(content)
        assert backup("vm17", "--config", path)["display_name"] == expected, file
        assert name_of(coldrise) == expected
    converted = coldrise.json("list", "vm17")["machines"][0]["points"][3]["address"]
    text = coldrise.json("show", converted)["configuration"]["text"]
    assert text == '.encoding = "UTF-8"\r\ndisplayName = "Köln 2"\r\n'
    assert backup("vm17", "--config", tmp_path / "a.xml", "--display-name", "By hand")["display_name"] == "By hand"


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\tb", "\x1b[31mred", "web\u202e10", "a\u200bb", "x" * 256, "\u3164"])
def test_hostile_names_are_refused(coldrise, disk, name):
    done = coldrise.run("backup", "vm17", disk, "--display-name", name)
    assert done.returncode == 2 and "display name" in done.stderr
    assert not any(character in done.stderr for character in "\x1b\u202e\u200b")


def test_an_invalid_address_gets_advice(coldrise, disk):
    done = coldrise.run("backup", "Web Server 01", disk)
    assert done.returncode == 2
    assert "not a machine name" in done.stderr and "backup web-server-01 --display-name 'Web Server 01'" in done.stderr


def test_copies_carry_names(coldrise, backup, tmp_path):
    backup("vm17", "--display-name", NAME)
    far = FarSite.repository(tmp_path, "far")
    coldrise.json("copy", "--to", far.repository)
    assert name_of(far) == NAME


@pytest.fixture
def service(tmp_path, coldrise, backup):
    backup("vm17", "--display-name", NAME)
    backup("vm18", "--display-name", "Mail 'x' <b>")
    backup("web01")
    # This host's libvirtd, if it has one, is not asked.
    environment = {"LIBVIRT_DEFAULT_URI": f"qemu+unix:///system?socket={tmp_path}/libvirt-sock"}
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file, environment=environment) as service:
        wait_until(lambda: service.call("GET", "machines").status == 200, "the repository")
        yield service


def test_the_api_shows_and_searches_names(service, coldrise, backup):
    shown = {machine["machine"]: machine.get("display_name") for machine in service.get("machines")}
    assert shown == {"vm17": NAME, "vm18": "Mail 'x' <b>", "web01": None}
    assert service.get("display-names") == {"vm17": NAME, "vm18": "Mail 'x' <b>"}
    assert service.get("points") == coldrise.json("list")
    assert service.get("machines/vm17")["display_name"] == service.get("machines/vm17/points/latest")["display_name"] == NAME

    def found(text):
        return [machine["machine"] for machine in service.get(f"machines?search={text}")]

    assert found("web") == ["vm17", "web01"] and found("WEB+k%C3%B6ln") == ["vm17"] and found("vm+mail") == ["vm18"]
    assert found("KO%CC%88LN") == ["vm17"]
    assert found("nothing") == []
    # A renamed machine.
    backup("vm18", "--display-name", "Post")
    wait_until(lambda: service.get("display-names")["vm18"] == "Post", "the new name")
    # By a run.
    body = {"kind": "backup", "machine": "vm18", "display_name": "Mail", "disks": {"vda": f"raw:{service.folder}/disk.raw"}}
    service.post("runs", body)
    wait_until(lambda: service.get("display-names")["vm18"] == "Mail", "the name of the run")
    assert service.call("POST", "runs", {**body, "display_name": "a\u202e"}).status == 400


def test_display_names_do_not_extend_a_token(service):
    """The user who names a machine chooses that name."""
    assert service.call("POST", "tokens", {"name": "x", "role": "viewer", "machines": ["Web*"]}).status in (400, 422)
    token = service.token("viewer", name="web", machines=["web*"])
    seen = service.call("GET", "machines", token=token, over="tls").json
    assert [machine["machine"] for machine in seen] == ["web01"]
    assert service.call("GET", "display-names", token=token, over="tls").json == {}


def test_jobs_find_machines_by_either_name(service):
    service.post("jobs", {"name": "by-name", "kind": "verify", "machines": ["web server*", "web01"]})
    service.post("jobs/by-name/start", {}, expected=(202,))
    wait_until(lambda: not service.get("queue")["runs"], "the end of the runs")
    runs = service.get("runs")["runs"]
    assert sorted((run["plan"]["machine"], run["state"]) for run in runs) == [("vm17", "ok"), ("web01", "ok")]
    # A job that covers it by name protects it.
    assert service.get("uncovered") == ["vm17", "vm18", "web01"]
    service.post("jobs", {"name": "nightly", "kind": "backup", "from": "libvirt", "machines": ["Web *", "Mail*"]})
    assert service.get("uncovered") == ["web01"]
    assert [job["name"] for job in service.get("jobs?machine=vm17")] == ["nightly"]
    absent = service.call("POST", "jobs/nightly/start", {})
    assert absent.status == 502 and "virsh list failed" in absent.json["detail"], absent.body


def test_remote_commands_show_and_give_names(service, disk, tmp_path):
    token = tmp_path / "token"
    token.write_text(service.token("admin"), encoding="utf-8")
    far = Coldrise(tmp_path / "none")
    there = ["--server", f"https://localhost:{service.port}", "--token-file", token, "--server-certificate",
             service.state / "tls" / "cert.pem"]
    assert far.json(*there, "list", "vm17")["machines"][0]["display_name"] == NAME
    assert f"name         {NAME}" in far.run(*there, "show", "vm17/latest").stdout
    assert far.json(*there, "backup", "web01", disk, "--display-name", "Far")["display_name"] == "Far"
