"""Display names from libvirt: titles, and domains whose names address no machine."""

import json

import pytest

from support.nbdserver import wait_until
from support.running import MIB
from support.service import Coldrised


@pytest.fixture
def backup(coldrise, libvirt):
    """Runs a backup of a domain."""
    scratch = libvirt.folder / "scratch"
    scratch.mkdir(exist_ok=True)

    def run(machine, source="libvirt"):
        return coldrise.run("--json", "backup", machine, "--from", source, "--connect", libvirt.uri, "--scratch", scratch)

    yield run
    assert not list(scratch.iterdir())


def listed(coldrise):
    return {machine["machine"]: machine.get("display_name") for machine in coldrise.json("list")["machines"]}


def test_a_title_is_the_display_name(coldrise, domain, backup):
    domain("vm17", title="Web Server 01 &amp; &lt;b&gt;")
    domain("vm18")
    for machine in ("vm17", "vm18"):
        done = backup(machine)
        assert done.returncode == 0, done.stderr
    assert listed(coldrise) == {"vm17": "Web Server 01 & <b>", "vm18": None}


def test_a_name_with_spaces_becomes_an_address(coldrise, domain, backup):
    running = domain("Web Server 01")
    running.write("vda", "write -P 17 0 1M")
    done = backup("Web Server 01")
    assert done.returncode == 0, done.stderr
    assert "Web Server 01 is stored as the machine web-server-01" in done.stderr
    assert listed(coldrise) == {"web-server-01": "Web Server 01"}
    # The next one reads only what changed, and says nothing.
    running.write("vda", "write -P 18 4M 64k")
    done = backup("Web Server 01")
    assert done.returncode == 0 and "is stored as" not in done.stderr
    made = json.loads(done.stdout.strip().splitlines()[-1])
    assert made["disks"][0]["read_bytes"] < MIB and made["display_name"] == "Web Server 01"
    assert len(coldrise.json("list")["machines"][0]["points"]) == 2


def test_an_address_of_another_machine_is_refused(coldrise, domain, backup, tmp_path):
    path = tmp_path / "other.raw"
    path.write_bytes(b"1" * 65536)
    coldrise.backup("web-server-01", vda=path)
    domain("Web Server 01")
    done = backup("Web Server 01")
    assert done.returncode != 0
    assert "web-server-01, which is the name of another machine" in done.stderr
    assert "--from 'libvirt:Web Server 01'" in done.stderr
    # As it says.
    done = backup("web2", "libvirt:Web Server 01")
    assert done.returncode == 0, done.stderr
    assert listed(coldrise)["web2"] == "Web Server 01"


def test_two_domains_with_one_address_are_refused(coldrise, domain, backup):
    domain("Web Server 01")
    domain("web-server-01")
    done = backup("Web Server 01")
    assert done.returncode != 0 and "the name of another machine" in done.stderr
    assert backup("web-server-01").returncode == 0


def test_a_job_with_a_pattern_backs_up_domains_of_any_name(coldrise, libvirt, domain, tmp_path):
    domain("Web Server 01")
    domain("vm17", title="Web Proxy")
    domain("db01")
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file,
                   environment={"LIBVIRT_DEFAULT_URI": libvirt.uri, "TMPDIR": str(libvirt.folder)}) as service:
        service.post("jobs", {"name": "all", "kind": "backup", "from": "libvirt", "machines": ["*"]})
        service.post("jobs/all/start", {}, expected=(202,))
        wait_until(lambda: not service.get("queue")["runs"], "the end of the runs")
        expected = {"db01": None, "vm17": "Web Proxy", "web-server-01": "Web Server 01"}
        assert listed(coldrise) == expected, [run["problems"] for run in service.get("runs")["runs"]]
        assert {run["plan"]["machine"] for run in service.get("runs")["runs"]} == set(expected)
        # Now that they are known: by title, which libvirt's list does not have.
        service.post("jobs", {"name": "web", "kind": "backup", "from": "libvirt", "machines": ["Web *"]})
        wait_until(lambda: len(service.get("display-names")) == 2, "the names")
        service.post("jobs/web/start", {}, expected=(202,))
        wait_until(lambda: not service.get("queue")["runs"], "the end of the runs")
        counts = {machine["machine"]: len(machine["points"]) for machine in coldrise.json("list")["machines"]}
        assert counts == {"db01": 1, "vm17": 2, "web-server-01": 2}
