"""Names, logs, consoles and pictures of a hostile machine or user are text. Nothing of them runs, and nothing breaks the page.

A visitor complains of dialogs, exceptions, refusals of the content policy and requests to other hosts.
"""

import pytest

from support import browser, site
from support.nbdserver import wait_until
from support.service import Coldrised

HTML = "<img src=x onerror=alert(1)><script>alert(2)</script>"
# Turns what follows around, in the eyes of a person.
TURNED = "gpj.\u202eexe\u200f"
ESCAPES = "\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[2J\x9b31m"
PROMPT = f"\r\n{HTML} {ESCAPES} </pre><b>\r\nevil01 login: "
CONFIGURATION = f"""<domain type="kvm"><name>evil01</name><description>{HTML.replace("<", "&lt;")}</description>
  <memory unit="MiB">64</memory><vcpu>1</vcpu><devices><disk type="file" device="disk"><target dev="vda" bus="virtio"/></disk></devices>
  <!-- {HTML} ]]></pre> --></domain>
"""
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(3)</script></svg>'


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A machine that prints HTML and escape sequences, and a service whose tokens, targets, jobs and runs have hostile names."""
    folder = tmp_path_factory.mktemp("hostile")
    made = site.Site(folder)
    [made.evil] = made.back_up("evil01", [2], prompt=PROMPT, configuration_text=CONFIGURATION)
    made.check_boot(made.evil)
    made.long = "l" * 63
    made.back_up(made.long, [1])
    work = folder / "service"
    work.mkdir()
    with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file,
                   options=["--web", str(browser.PAGE)]) as service:
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        service.post("users", {"name": "u" * 64, "role": "viewer", "password": browser.PASSWORD})
        for name in (HTML, TURNED, "'\"`&amp;", "w" * 100):
            service.token("viewer", name=name, machines=["*", made.long])
            service.post("notifications/targets", {"name": name, "way": {"type": "webhook", "template": "generic",
                                                                            "url": "http://127.0.0.1:1/" + "p" * 200}})
        service.post("jobs", {"name": "j" * 63, "kind": "backup", "machines": [made.long], "retries": 0,
                              "disks": {"vda": f"raw:/none/{HTML}{TURNED}{'d' * 200}"}})
        made.run = service.post(f"jobs/{'j' * 63}/start", {})["runs"][0]
        made.service = service
        yield made


def enter(visit, place, **options):
    visitor = visit(place.service, **options)
    visitor.log_in()
    return visitor, visitor.page


def nothing_of_it_is_html(page):
    assert page.locator("script:not([src]), img[src='x'], body b, iframe, object, embed").count() == 0
    assert "title" != page.title()


@pytest.mark.parametrize("look", [{}, {"viewport": {"width": 390, "height": 844}}], ids=["wide", "phone"])
def test_hostile_names_on_every_page(place, visit, look):
    visitor, page = enter(visit, place, **look)
    for address, said in {"access": HTML, "notifications": HTML, f"jobs?job={'j' * 63}": HTML, "activity": place.long, f"runs/{place.run}": HTML,
                          "machines": place.long, f"machines/{place.long}": place.long, "machines/evil01": "evil01",
                          "repository": place.long}.items():
        visitor.go("about")
        visitor.go(address)
        page.locator("#main").get_by_text(said).first.wait_for()
        nothing_of_it_is_html(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{address} is wider than the window"


def test_machine_output_is_shown_as_text(place, visit):
    visitor, page = enter(visit, place)
    visitor.go("machines/evil01")
    evidence = page.get_by_label("Evidence")
    evidence.get_by_text("evil01 login:").first.wait_for()
    evidence.get_by_text("Last lines of the serial console").click()
    evidence.locator("pre").get_by_text(HTML).wait_for()
    assert "\x1b" not in evidence.inner_text()
    page.get_by_text("Configuration of the machine").click()
    page.get_by_label("Chosen point").locator("pre").get_by_text(f"<!-- {HTML}").wait_for()
    nothing_of_it_is_html(page)


def test_a_hostile_machine_in_the_console_is_harmless(place, visit):
    visitor, page = enter(visit, place)
    started = place.service.post("runs", {"kind": "boot", "address": place.evil, "session": "evil", "memory_mib": 64})["run"]
    try:
        wait_until(lambda: place.service.call("GET", "sessions/evil").status == 200
                   and (place.service.get("sessions/evil")["running"] or {}).get("state") == "running", "the machine")
        visitor.go("sessions/evil")
        page.get_by_role("application", name="Screen of the machine").locator("canvas").wait_for(timeout=60_000)
        page.get_by_text("Connecting to the screen").wait_for(state="detached")
        page.get_by_role("button", name="Serial console").click()
        # Ctrl-Alt-Del restarts it: this console shows its output.
        page.get_by_text("Connecting").wait_for(state="detached")
        page.get_by_role("button", name="Ctrl-Alt-Del").click()
        console = page.get_by_role("application", name="Serial console")
        console.get_by_text("evil01 login:").first.wait_for(timeout=60_000)
        shown = console.inner_text()
        assert HTML in shown and " red" in shown and "\x1b" not in shown and "[31m" not in shown and "0;title" not in shown
        nothing_of_it_is_html(page)
        visitor.go("about")
        page.get_by_role("heading", name="About").wait_for()
    finally:
        place.service.call("POST", f"runs/{started}/cancel", {})
        wait_until(lambda: not place.service.get("runs?state=running")["runs"], "the machine ends")


def test_an_invalid_picture_is_reported(place, visit):
    """The service always declares a PNG; the page reports that it cannot be shown."""
    visitor, page = enter(visit, place)
    address = f"/api/v1/machines/{place.evil.replace('/', '/points/')}/screenshot.png"
    answer = visitor.context.request.get(address)
    assert answer.status == 200 and answer.body().startswith(b"\x89PNG")
    assert answer.headers["content-type"] == "image/png" and answer.headers["x-content-type-options"] == "nosniff"

    def other_picture(route):
        route.fulfill(response=route.fetch(), body=SVG)

    page.route("**/screenshot.png", other_picture)
    visitor.go("machines/evil01")
    page.get_by_text("There is no picture of its screen that can be shown.").wait_for()
    page.goto(address)
    assert page.evaluate("document.contentType") == "image/png"
    assert page.locator("script").count() == 0
    # Chromium's own frame of a picture has a style, which the policy refuses too.
    assert all("Applying inline style" in complaint for complaint in visitor.complaints)
    visitor.complaints.clear()


def test_hostile_addresses(place, visit):
    visitor, page = enter(visit, place)
    for name in (HTML, TURNED, '"><b>', "x" * 200, "%", "../../etc", "javascript:alert(1)", "a/b"):
        for kind in ("machines", "sessions", "runs", "compare"):
            print(kind, ascii(name))
            page.goto("about:blank")
            page.goto("/#/about")
            page.evaluate("([kind, name]) => { location.hash = `#/${kind}/${encodeURIComponent(name)}`; }", [kind, name])
            page.locator("#main").get_by_role("alert").or_(page.get_by_text("There is no")).first.wait_for()
            nothing_of_it_is_html(page)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{kind} is wider than the window"
    page.evaluate("location.hash = '#/machines/%E0%A4%A'")
    page.get_by_role("heading", name="%E0%A4%A").wait_for()


def test_invalid_names_are_refused(place, visit):
    visitor, page = enter(visit, place)
    visitor.go("access")
    for name in (HTML, TURNED, "Capital", "a b"):
        page.get_by_role("button", name="New user").click()
        form = page.get_by_role("dialog")
        form.get_by_label("Name").fill(name)
        form.get_by_label("Password").fill(browser.PASSWORD)
        form.get_by_role("button", name="Save").click()
        form.get_by_role("alert").get_by_text("is not a user name: give 1 to 64 of a-z").wait_for()
        nothing_of_it_is_html(page)
        form.get_by_role("button", name="Close", exact=True).last.click()
    # Longer ones cannot be typed, and the API refuses them too.
    page.get_by_role("button", name="New token").click()
    page.get_by_label("What it is for").fill("t" * 200)
    assert len(page.get_by_label("What it is for").input_value()) in (100, 200)
    answer = visitor.context.request.post("/api/v1/tokens", data={"name": "t" * 101, "role": "viewer"}, headers={"Sec-Fetch-Site": "same-origin"})
    assert answer.status == 400 and "1 to 100 characters" in answer.json()["detail"]
