"""Ways of recovery besides booting here, the host's capacity, and differences between points."""

import json
import shlex
import subprocess

import nbd
import pytest

from support import browser, site
from support.cli import PROGRAM
from support.nbdserver import wait_until
from support.service import Coldrised, free_port

MIB = 1 << 20
HUGE = '{"memory_mib": 4194304, "cpus": 200}'


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A machine with two points that differ in one block, and one that no host can hold."""
    folder = tmp_path_factory.mktemp("ways")
    made = site.Site(folder)
    made.first, made.second = made.back_up("web01", [3, 2])
    made.disk = (folder / "web01.raw").read_bytes()
    description = folder / "huge.json"
    description.write_text(HUGE)
    made.coldrise.json("backup", "huge01", "--config", description, f"vda=raw:{folder}/web01.raw")
    work = folder / "service"
    work.mkdir()
    with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file,
                   options=["--web", str(browser.PAGE)]) as service:
        for role in ("admin", "operator"):
            service.post("users", {"name": role, "role": role, "password": browser.PASSWORD})
        made.service = service
        try:
            yield made
        finally:
            for run in running(service):
                service.call("POST", f"runs/{run['id']}/cancel", {})
            wait_until(lambda: not running(service), "the servers end")


def running(service):
    return service.get("runs?state=running")["runs"]


def recover(visit, place, machine="web01", user="admin"):
    """The open drawer, and its window."""
    visitor = visit(place.service)
    visitor.log_in(user)
    visitor.go(f"machines/{machine}")
    visitor.page.get_by_role("button", name="Recover").click()
    drawer = visitor.page.get_by_role("dialog", name=f"Recover {machine}")
    drawer.get_by_role("radio", checked=True).first.wait_for()
    return visitor, drawer


def test_the_command_for_other_hosts_works(place, visit, tmp_path):
    visitor = visit(place.service)
    visitor.log_in()
    visitor.go("about")
    line = visitor.page.locator("code", has_text="coldrise --server").inner_text()
    assert f"https://HOST:{place.service.port}" in line, "no other host reaches 127.0.0.1"
    token = tmp_path / "token"
    token.write_text(place.service.token("viewer"))
    token.chmod(0o600)
    given = {"coldrise": PROGRAM, "cert.pem": place.service.state / "tls/cert.pem", "token": token}
    words = [str(given.get(word, word)).replace("HOST", "127.0.0.1") for word in shlex.split(line)]
    assert "web01" in subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_point_is_served_over_nbd(place, visit):
    visitor, drawer = recover(visit, place, user="operator")
    page, port = visitor.page, free_port()
    drawer.get_by_label("Serve over NBD").check()
    assert drawer.get_by_label("Other hosts").is_disabled(), "an operator serves this host only"
    drawer.get_by_label("Session name").fill("from-page")
    drawer.get_by_label("Listen at").fill(f"127.0.0.1:{port}")
    uri = f"nbd://127.0.0.1:{port}/live/from-page/vda"
    drawer.get_by_text(f"file={uri},").wait_for()
    drawer.get_by_text(f"coldrise serve nbd --listen 127.0.0.1:{port}").wait_for()
    drawer.get_by_text("Usable within seconds; nothing is moved.").wait_for()
    assert not visitor.violations()
    drawer.get_by_role("button", name="Start").click()
    page.get_by_role("heading", name="from-page").wait_for()
    reach = page.get_by_role("region", name="How its disks are reached")
    reach.get_by_text(f"file={uri},").wait_for()
    # At 127.0.0.1 the page knows no address of its host that others could use.
    assert reach.get_by_text(f"ssh -N -L {port}:127.0.0.1:{port} HOST", exact=True).count() == 1
    reach.get_by_text("set COLDRISE_LISTEN").wait_for()
    # Local starts come first, and remarks about all servers appear once.
    top = [element.bounding_box()["y"] for element in (reach.get_by_role("button", name="Boot it here"),
                                                       reach.get_by_role("link", name="Server over NBD"))]
    assert top == sorted(top)
    second = place.service.post("runs", {"kind": "serve", "protocol": "nbd", "listen": f"127.0.0.1:{free_port()}"})["run"]
    reach.get_by_role("link", name="Server over NBD").nth(1).wait_for()
    assert reach.get_by_text("set COLDRISE_LISTEN").count() == 1
    # A server has no progress.
    assert page.get_by_role("progressbar").count() == 0
    place.service.call("POST", f"runs/{second}/cancel", {})
    reach.get_by_role("link", name="Server over NBD").nth(1).wait_for(state="detached")

    line = reach.locator("code", has_text="qemu-system-x86_64").inner_text()
    disk = wait_until(lambda: connected(uri), "the disk is served")
    assert disk.pread(len(place.disk), 0) == place.disk
    disk.pwrite(b"w" * MIB, 0)
    disk.flush()
    # A page opened later shows earlier events.
    wait_until(lambda: place.service.get("sessions/from-page/activity/history")[-1:] != [], "a sample")
    page.reload()
    live = page.get_by_role("region", name="Live activity")
    live.get_by_text("written").first.wait_for()
    page.get_by_text("In use since").wait_for()
    assert live.get_by_role("img", name="Throughput").count() == 1
    assert not visitor.violations()
    disk.shutdown()
    # The printed line for QEMU works unchanged, with and without KVM.
    words = [*shlex.split(line), "-S", "-display", "none", "-monitor", "stdio"]
    shown = subprocess.run(words, input="info block\nquit\n", capture_output=True, text=True, timeout=60, check=True)
    assert uri in shown.stdout, shown

    reach.get_by_role("button", name="Stop serving").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop serving").click()
    reach.get_by_text("No server runs").wait_for()
    reach.get_by_role("button", name="Serve over NBD").wait_for()


def connected(uri):
    """A client; `None` if the server does not listen yet. A refused handle cannot be used again."""
    disk = nbd.NBD()
    try:
        disk.connect_uri(uri)
    except nbd.Error:
        return None
    return disk


def test_refused_requests_start_nothing(place, visit):
    visitor, drawer = recover(visit, place)
    drawer.get_by_label("Serve over NFS").check()
    drawer.get_by_label("Other hosts").check()
    drawer.get_by_label("Session name").fill("refused")
    drawer.get_by_label("Allowed clients").fill("everyone")
    drawer.get_by_text("esxcli storage nfs add -H HOST -s /coldrise -v coldrise").wait_for()
    drawer.get_by_text("registervm /vmfs/volumes/coldrise/live/refused/refused.vmx").wait_for()
    drawer.get_by_role("button", name="Start").click()
    alert = drawer.get_by_role("alert")
    alert.get_by_text('allow: "everyone" is not a network such as 10.0.0.0/24').wait_for()
    assert "Session refused is published, but nothing serves it yet." in alert.inner_text()
    assert not [run for run in running(place.service) if "serve" in run["plan"]["command"]]
    assert not visitor.violations()


def test_a_corrected_form_is_submitted(place, visit):
    """No server runs for a session that cannot be published; the same drawer continues after the correction."""
    visitor, drawer = recover(visit, place, user="operator")
    taken = f"taken-{free_port()}"
    place.coldrise.publish(place.first, taken)
    drawer.get_by_label("Serve over NBD").check()
    name, listen = drawer.get_by_label("Session name"), drawer.get_by_label("Listen at")
    name.fill("Rescue")
    listen.fill(f"127.0.0.1:{free_port()}")
    drawer.get_by_role("button", name="Start").click()
    assert not name.evaluate("field => field.checkValidity()"), "names have no capital letters"
    drawer.get_by_role("alert").get_by_text("A session’s name has a-z").wait_for()
    name.fill(taken)
    drawer.get_by_role("button", name="Start").click()
    drawer.get_by_role("alert").get_by_text("Nothing was started.").wait_for()
    assert not running(place.service)
    name.fill("rescue")
    listen.fill("nowhere")
    drawer.get_by_role("button", name="Start").click()
    drawer.get_by_role("alert").get_by_text("Session rescue is published, but nothing serves it yet.").wait_for()
    port = free_port()
    listen.fill(f"127.0.0.1:{port}")
    drawer.get_by_role("button", name="Start").click()
    visitor.page.get_by_role("heading", name="rescue").wait_for()
    [server] = wait_until(lambda: running(place.service), "the server's run")
    # The same server is not started twice; one for others is another one.
    visitor = visit(place.service)
    visitor.log_in()
    visitor.go("machines/web01")
    visitor.page.get_by_role("button", name="Recover").click()
    drawer = visitor.page.get_by_role("dialog", name="Recover web01")
    drawer.get_by_label("Serve over NBD").check()
    drawer.get_by_label("Listen at").fill(f"127.0.0.1:{port}")
    drawer.get_by_text("The NBD server that runs already serves it.").wait_for()
    drawer.get_by_label("Other hosts").check()
    drawer.get_by_label("Listen at").fill(f"0.0.0.0:{port}")
    drawer.get_by_label("Folder of certificates").fill("/etc/tls")
    drawer.get_by_text(f"coldrise serve nbd --listen 0.0.0.0:{port} --tls-certificates /etc/tls").wait_for()
    drawer.get_by_text(f"One with other settings has port {port}").wait_for()
    place.service.call("POST", f"runs/{server['id']}/cancel", {})
    wait_until(lambda: not running(place.service), "the server ends")


def test_a_disk_is_restored_in_the_services_folder(place, visit):
    visitor, drawer = recover(visit, place, user="operator")
    page = visitor.page
    drawer.get_by_label("Restore on the host").check()
    drawer.get_by_label("Format").select_option("raw")
    name = place.second.replace("/", "-") + "-vda.raw"
    target = drawer.get_by_label("Target")
    for wrong in ("/srv/web01.raw", "nbd://127.0.0.1/disk"):
        target.fill(wrong)
        drawer.get_by_role("alert").get_by_text("needs the role admin").wait_for()
        assert not target.evaluate("field => field.checkValidity()"), wrong
    target.fill("")
    assert drawer.get_by_role("alert").count() == 0
    drawer.get_by_text(f"coldrise restore {place.second}/vda {name} --format raw").wait_for()
    drawer.get_by_text("Usable when all of it is moved: up to 1.0 MiB.").wait_for()
    assert not visitor.violations()
    drawer.get_by_role("button", name="Start").press("Enter")
    page.get_by_role("heading", name="restore").wait_for()
    page.get_by_text("ok", exact=True).wait_for()
    assert page.evaluate("document.activeElement.id") == "main", "the keyboard goes on in the new page"
    assert (place.service.state / "restores" / name).read_bytes() == place.disk
    page.get_by_text("web01: restore: done.").wait_for()
    # It is only replaced on request, and every page reports it.
    visitor.go("machines/web01")
    page.get_by_role("button", name="Recover").click()
    drawer.get_by_label("Restore on the host").check()
    drawer.get_by_label("Target").fill(name)
    drawer.get_by_role("button", name="Start").click()
    page.get_by_text(f"web01: restore: {place.service.state / 'restores' / name}").get_by_text("exists").first.wait_for()
    assert "or check “Replace an existing file”" in page.locator(".message", has_text="exists").inner_text()


def test_a_device_is_overwritten_only_after_confirmation(place, visit, tmp_path):
    visitor, drawer = recover(visit, place)
    page = visitor.page
    drawer.get_by_label("Restore on the host").check()
    target = f"nbd://127.0.0.1:{free_port()}/disk"
    drawer.get_by_label("Target").fill(target)
    drawer.get_by_role("button", name="Start").click()
    question = page.get_by_role("dialog", name=f"Overwrite {target}?")
    before = place.service.get("runs")["runs"]
    question.get_by_role("button", name="Keep").click()
    question.wait_for(state="detached")
    assert place.service.get("runs")["runs"] == before
    drawer.get_by_label("Target").fill(str(tmp_path / "copy.qcow2"))
    drawer.get_by_role("button", name="Start").click()
    page.get_by_role("heading", name="restore").wait_for()
    page.get_by_text("ok", exact=True).wait_for()
    done = subprocess.run(["qemu-img", "info", "--output=json", tmp_path / "copy.qcow2"], capture_output=True, check=True)
    assert json.loads(done.stdout)["virtual-size"] == MIB


@pytest.mark.parametrize("format", ["raw", "qcow2", "vhdx"])
def test_a_disk_is_downloaded(place, visit, tmp_path, format):
    visitor, drawer = recover(visit, place, user="operator")
    drawer.get_by_label("Download").check()
    drawer.get_by_label("Format").select_option(format)
    drawer.get_by_text("curl --cacert cert.pem").wait_for()
    with visitor.page.expect_download() as waiting:
        drawer.get_by_role("link", name="Download").click()
    name = f"{place.second.replace('/', '-')}-vda.{format}"
    assert waiting.value.suggested_filename == name
    waiting.value.save_as(tmp_path / name)
    subprocess.run(["qemu-img", "convert", "-f", format, "-O", "raw", tmp_path / name, tmp_path / "raw"], check=True)
    assert (tmp_path / "raw").read_bytes()[:MIB] == place.disk


def test_the_memory_that_fits_is_proposed(place, visit):
    visitor, drawer = recover(visit, place, "huge01")
    host = place.service.get("host")
    drawer.get_by_text("which this host has not left").wait_for()
    memory = drawer.get_by_label("Memory, MiB")
    proposed = int(memory.input_value())
    assert 0 < proposed < host["memory_bytes"] >> 20
    command = drawer.locator("code", has_text="coldrise boot")
    assert f"--memory {proposed}M" in command.inner_text()
    drawer.get_by_label("What fits now").get_by_text("no machine runs from a backup").wait_for()
    drawer.get_by_text("200 processors share").wait_for()
    memory.fill(str(proposed * 2))
    drawer.get_by_text("the start is refused").wait_for()
    assert not memory.evaluate("field => field.checkValidity()")
    for wrong in ("0", "100.5"):
        memory.fill(wrong)
        assert not memory.evaluate("field => field.checkValidity()"), wrong
    memory.fill("0")
    assert " 0 " not in command.inner_text()
    assert not visitor.violations()


def test_a_machine_that_fits_keeps_its_memory(place, visit):
    _, drawer = recover(visit, place)
    memory = drawer.get_by_label("Memory, MiB")
    drawer.get_by_label("What fits now").wait_for()
    wait_until(lambda: memory.get_attribute("placeholder") == "64, as the original", "the machine's memory")
    assert memory.input_value() == "" and "--memory" not in drawer.locator("code").inner_text()


def test_differing_blocks_are_shown(place, visit):
    visitor = visit(place.service)
    visitor.log_in()
    page = visitor.page
    visitor.go("compare/" + "/".join(address.replace("/", "%2F") for address in (place.first, place.second)))
    changed = page.get_by_role("region", name="Changed blocks")
    expected = place.service.get(f"difference?from={place.first}&to={place.second}")["disks"][0]
    strip = changed.get_by_role("img", name="Disk vda:")
    strip.wait_for()
    assert "of 1.0 MiB differ, in 1 range" in strip.get_attribute("aria-label")
    # 64 KiB of identical boot record, then 64 KiB that are unique to the point.
    assert strip.locator("rect").count() == 256 * expected["differing_bytes"] // MIB
    row = changed.get_by_role("table").get_by_role("row").nth(1)
    assert row.get_by_role("cell").last.inner_text() == str(expected["ranges"][0]["offset_bytes"])
    assert not visitor.violations()
    page.get_by_role("combobox", name="Point 1").select_option(place.second)
    changed.get_by_text("Their disks have the same content.").wait_for()


def test_a_job_has_every_setting(place, visit):
    visitor = visit(place.service)
    visitor.log_in()
    page = visitor.page
    visitor.go("jobs?new")
    form = page.get_by_role("dialog", name="New job")
    form.get_by_role("textbox", name="Name", exact=True).fill("full")
    form.get_by_role("textbox", name="Machines").fill("web01\ndb01")
    form.get_by_label("Disk 1: source").fill("raw:/dev/vg/{machine}")
    form.get_by_label("Boot check after a backup").select_option("daily")
    form.get_by_label("Boot proven by").select_option("service")
    form.get_by_label("Open TCP port").fill("22")
    form.get_by_label("Reads at most, MiB/s").fill("25")
    form.get_by_text("More settings").click()
    form.get_by_label("Other disks of some machines").fill("db01 vda=raw:/dev/vg1/a=b\ndb01 vdb=/srv/db.raw")
    form.get_by_label("File with the machine’s configuration").fill("/etc/{machine}.xml")
    form.get_by_label("Dirty bitmap").fill("coldrise")
    form.get_by_label("Retries after a failure").fill("5")
    form.get_by_label("First pause, seconds").fill("30")
    assert not visitor.violations()
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="detached")
    job = place.service.get("jobs/full")
    wanted = {"boot_check": {"when": "daily", "until": "service", "check_port": 22}, "rate_bytes_per_second": 25 * MIB,
              "disks_of": {"db01": {"vda": "raw:/dev/vg1/a=b", "vdb": "/srv/db.raw"}}, "config": "/etc/{machine}.xml",
              "bitmap": "coldrise", "retries": 5, "retry_seconds": 30, "disks": {"vda": "raw:/dev/vg/{machine}"}}
    assert {name: job.get(name) for name in wanted} == wanted
    page.get_by_text("at most 25.0 MiB/s").wait_for()
    # The form shows stored values; refusals are shown in the service's words.
    page.get_by_role("button", name="Edit").click()
    form = page.get_by_role("dialog", name="Job full")
    form.get_by_text("More settings").click()
    assert form.get_by_label("Other disks of some machines").input_value() == "db01 vda=raw:/dev/vg1/a=b\ndb01 vdb=/srv/db.raw"
    form.get_by_label("Other disks of some machines").fill("nonsense")
    form.get_by_role("button", name="Save").click()
    form.get_by_role("alert").get_by_text("nonsense is not among machines").wait_for()
    assert place.service.get("jobs/full")["disks_of"] == wanted["disks_of"]
