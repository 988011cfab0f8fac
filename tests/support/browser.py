"""Debian's Chromium, driven by Playwright, on the page of one service."""

import contextlib
import pathlib
import sys

from .cli import ROOT
from .service import Coldrised

PAGE = ROOT / "build" / "web"
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
PACKAGES = ROOT / "build" / "playwright"
CHROMIUM = pathlib.Path("/usr/lib/chromium/chromium")
PASSWORD = "correct horse battery"
LOOKS = {"light": ("light", 1280), "dark": ("dark", 1280), "phone": ("light", 390)}


def missing():
    """The missing builds and programs, in words; empty if nothing is missing."""
    parts = {PAGE / "index.html": "make web", PACKAGES / "playwright": "make web-test-deps",
             CHROMIUM: "make web-test-deps"}
    return ", ".join(f"{path} ({command})" for path, command in parts.items() if not path.exists())


@contextlib.contextmanager
def served(coldrise, folder):
    """A service with its page, and a user for each role."""
    with Coldrised(folder, coldrise.repository, coldrise.passphrase_file, options=["--web", str(PAGE)]) as service:
        for role in ("admin", "operator", "viewer"):
            service.post("users", {"name": role, "role": role, "password": PASSWORD})
        yield service


@contextlib.contextmanager
def chromium():
    """A browser without a window. Playwright is imported here: other tests do without it."""
    sys.path.insert(0, str(PACKAGES))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"])
        try:
            yield browser
        finally:
            browser.close()


def look(visitor, *words):
    """The findings of axe, light, dark and on a phone, once the words appear."""
    page, found = visitor.page, {}
    for name, (scheme, width) in LOOKS.items():
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 844})
        for word in words:
            page.get_by_text(word).first.wait_for()
        found[name] = visitor.violations()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the window"
    page.set_viewport_size({"width": 1280, "height": 800})
    assert not any(found.values()), found


class Visitor:
    """A browser's window at one service. Everything that the page complains of is kept."""

    def __init__(self, browser, service, **options):
        options.setdefault("viewport", {"width": 1280, "height": 800})
        self.service = service
        self.context = browser.new_context(ignore_https_errors=True, timezone_id="Europe/Berlin",
                                           base_url=f"https://127.0.0.1:{service.port}", **options)
        self.page = self.context.new_page()
        self.complaints = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("dialog", self._dialog)
        self.page.on("request", self._request)

    def _console(self, message):
        # A refused request is a line of the console too, and so is the screen of a machine that has just ended (noVNC says
        # so): tests check the visible page instead. The last is advice on speed: a test reads the canvas.
        known = ("Failed to load resource", "Failed when connecting", "willReadFrequently")
        is_known = any(words in message.text for words in known)
        if message.type in ("error", "warning") and not is_known:
            self.complaints.append(f"{message.type}: {message.text}")

    def _dialog(self, dialog):
        self.complaints.append(f"{dialog.type}: {dialog.message}")
        dialog.dismiss()

    def _request(self, request):
        if not request.url.startswith((f"https://127.0.0.1:{self.service.port}/", "data:", "blob:")):
            self.complaints.append(f"another host: {request.url}")

    def set_up(self, user="admin"):
        """Makes the first administrator through the page."""
        self.page.goto(f"/#/setup/{self.service.setup_secret()}")
        self.page.get_by_label("User").fill(user)
        self.page.get_by_label("Password", exact=False).first.fill(PASSWORD)
        self.page.get_by_label("Password again").fill(PASSWORD)
        self.page.get_by_role("button", name="Make administrator").click()
        self.page.get_by_role("heading", name="Machines").wait_for()

    def log_in(self, user="admin", password=PASSWORD):
        """Logs in with a cookie of the API: quicker than the form, which has a test of its own."""
        answer = self.context.request.post("/api/v1/login", data={"user": user, "password": password},
                                           headers={"Sec-Fetch-Site": "same-origin"})
        assert answer.status == 200, answer.text()

    def go(self, address):
        self.page.goto(f"/#/{address}")

    def violations(self):
        """The findings of axe-core, in words, after the slide-in animation: during it, colours are paler."""
        if not self.page.evaluate("() => 'axe' in window"):
            self.page.evaluate(AXE.read_text())
        # In one step: an element that appears between two requests would be in its animation again.
        found = self.page.evaluate("""async () => {
            const moving = () => document.getAnimations().filter((each) => each.playState === 'running'
                && each.effect.getComputedTiming().endTime < Infinity);
            for (let some = moving(); some.length > 0; some = moving())
                await Promise.all(some.map((each) => each.finished.catch(() => undefined)));
            return axe.run(document, { resultTypes: ['violations'] });
        }""")["violations"]
        return [f"{rule['id']}: {rule['help']}: {[node['html'][:160] for node in rule['nodes'][:3]]}" for rule in found]

    def close(self):
        self.context.close()
