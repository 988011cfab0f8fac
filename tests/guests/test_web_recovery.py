"""A whole system is recovered with two clicks, used in its console, sealed and ended: one boot for all."""

import re

import pytest

from support import browser, site
from support.cli import Coldrise
from support.guest import image
from support.nbdserver import wait_until
from support.service import Coldrised

HOSTILE = '<b id="hostile">&amp;</b>'


@pytest.fixture
def guest(tmp_path):
    """A service that knows the project's guest, with 512 MiB of memory."""
    passphrase, configuration = tmp_path / "passphrase", tmp_path / "guest.xml"
    passphrase.write_text("correct horse\n", encoding="utf-8")
    configuration.write_text(site.CONFIGURATION.format(machine="guest").replace(">64<", ">512<"), encoding="utf-8")
    coldrise = Coldrise(tmp_path / "repository", passphrase)
    coldrise.init()
    coldrise.json("backup", "guest", "--config", configuration, f"vda=raw:{image()}")
    with Coldrised(tmp_path, coldrise.repository, passphrase, options=["--web", str(browser.PAGE)]) as service:
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        try:
            yield service
        finally:
            for run in service.get("runs?state=running")["runs"]:
                service.call("POST", f"runs/{run['id']}/cancel", {})
            wait_until(lambda: not service.get("runs?state=running")["runs"], "the machine ends")


def test_a_machine_is_recovered_used_sealed_and_ended(guest, visit):
    visitor = visit(guest)
    visitor.log_in()
    page = visitor.page
    visitor.go("machines/guest")
    page.get_by_role("button", name="Recover").click()
    page.get_by_role("dialog", name="Recover guest").get_by_role("button", name="Start").click()

    page.get_by_role("button", name="Serial console").wait_for(timeout=60_000)
    session = page.get_by_role("heading", level=1).inner_text()
    use_the_console(page)
    page.get_by_role("button", name="Screen", exact=True).click()
    screen = page.get_by_role("application", name="Screen of the machine").locator("canvas")
    screen.wait_for()
    wait_until(lambda: screen.evaluate("canvas => canvas.width") >= 640, "the machine's screen")
    see_the_activity(page)
    # Two clocks: the time until it was usable, and that nothing was moved before.
    page.get_by_text(re.compile(r"^\w{3} \d+ \w{3} \d{4}, \d\d:\d\d: disks and consoles, \d+\.\d s after its run began$")).wait_for()
    page.get_by_text(re.compile(r"^nothing: its disks of [\d.]+ [MG]iB stay in the backup, [\d.]+ MiB were read from it$")).wait_for()
    [run] = guest.get("runs?state=running")["runs"]
    assert (run["machine"]["session"], run["machine"]["network"], run["machine"]["memory_mib"]) == (session, "isolated", 512)
    look_everywhere(visitor, {f"sessions/{session}": session, f"runs/{run['id']}": "boot"})

    # Its writes become a point, while it runs.
    visitor.go(f"sessions/{session}")
    page.get_by_role("button", name="Seal", exact=True).click()
    made = page.get_by_text("Seal: done. It made the point").get_by_role("link", name="guest/")
    made.click()
    page.get_by_label("Chosen point").get_by_text("sealed session").wait_for()
    assert page.url.endswith("%2B1") or page.url.endswith("+1"), page.url
    timeline = page.get_by_role("slider", name="Restore point")
    # Two points, and times of the running session.
    page.wait_for_function("slider => Number(slider.getAttribute('aria-valuemax')) >= 2", arg=timeline.element_handle())
    timeline.focus()
    page.keyboard.press("PageDown")
    page.get_by_label("Chosen point").get_by_text(session).first.wait_for(state="detached")
    page.keyboard.press("PageUp")
    page.get_by_label("Chosen point").get_by_text(session).first.wait_for()

    # The end of the run is the end of the machine; its session stays.
    visitor.go(f"runs/{run['id']}")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("cancelled", exact=True).wait_for(timeout=60_000)
    visitor.go(f"sessions/{session}")
    page.get_by_text("published, not in use").wait_for()
    assert page.get_by_role("button", name="Serial console").count() == 0


def use_the_console(page):
    """Logs in, and says something that a browser would take for HTML."""
    # The screen is shown first and names the other console with the login. Keys work there immediately.
    page.get_by_text("The serial console says: coldrise-guest login:").wait_for(timeout=300_000)
    page.get_by_role("button", name="Serial console").click()
    console = page.get_by_role("application", name="Serial console")
    page.keyboard.type("root\n")
    console.get_by_text("root@coldrise-guest").first.wait_for(timeout=60_000)
    page.keyboard.type(f"echo '{HOSTILE}' $((6 * 7))\n")
    console.get_by_text(f"{HOSTILE} 42").wait_for()
    assert page.locator("#hostile").count() == 0
    # Its network works.
    page.keyboard.type("until ip -brief address | grep 'UP.*10[.]0[.]2[.]'; do sleep 1; done\n")
    console.get_by_text("10.0.2.").wait_for(timeout=60_000)
    page.keyboard.type("head -c 3M /dev/urandom >/root/new; sync; echo written $((1 + 1))\n")
    console.get_by_text("written 2").wait_for(timeout=60_000)


def see_the_activity(page):
    """Plots, sources of reads and the heat map of the disk show what the machine did."""
    live = page.get_by_role("region", name="Live activity")
    live.get_by_role("img", name="Throughput: read").wait_for()
    label = live.get_by_role("img", name="from the backup").get_attribute("aria-label")
    assert " 0 B" not in label.split(",")[0], label
    captured = page.locator("dd", has_text="per hour on average")
    wait_until(lambda: "MiB" in captured.inner_text().split("(")[0], "the captured writes")
    heat = live.get_by_role("img", name="Disk vda:")
    wait_until(lambda: int(heat.get_attribute("aria-label").split(": ")[1].split()[0]) > 10, "warm regions")


def look_everywhere(visitor, addresses):
    page, found = visitor.page, {}
    for look, (scheme, width) in browser.LOOKS.items():
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 844})
        for address, heading in addresses.items():
            visitor.go(address)
            page.get_by_role("heading", level=1, name=heading).wait_for()
            page.get_by_text("running", exact=True).first.wait_for()
            if address.startswith("sessions"):
                page.get_by_role("application", name="Screen of the machine").locator("canvas").wait_for()
                page.get_by_text("Connecting to the screen").wait_for(state="detached")
                page.get_by_role("img", name="Disk vda:").wait_for()
            found[look, address] = visitor.violations()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{look}: {address} is wider than the window"
    page.set_viewport_size({"width": 1280, "height": 800})
    assert not any(found.values()), {where: rules for where, rules in found.items() if rules}
