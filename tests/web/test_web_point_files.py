"""The files of a point on the page: browse, search, versions, download."""

import os
import pathlib
import shutil
import tempfile
import zipfile

import pytest

from support import browser, filesystems
from support.cli import Coldrise
from support.nbdserver import wait_until
from support.service import Coldrised

MIB = 1 << 20
LOOKS = {"light": ("light", 1280), "dark": ("dark", 1280), "phone": ("light", 390)}


@pytest.fixture(scope="module")
def service(template):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="crw-"))
    tree = folder / "tree"
    (tree / "etc/deep").mkdir(parents=True)
    (tree / "etc/deep/a.conf").write_text("alpha\n")
    (tree / "etc/out").symlink_to("/etc/passwd")
    (tree / "empty").mkdir()
    for name in (b"<img src=x onerror=alert(1)>", b"\xff\xfe", "gnp\u202eexe.txt".encode()):
        (tree / "etc").joinpath(os.fsdecode(name)).write_text("strange")
    coldrise = Coldrise.copied(template, folder / "repository")
    inner = filesystems.ext4(folder / "inner", tree / "etc/deep", 8 * MIB)
    secret = filesystems.luks(folder / "vdb.raw", inner, "open sesame")
    for hour, text in enumerate(("first\n", "second, and longer\n")):
        (tree / "etc/fstab").write_text(text)
        root = filesystems.ext4(folder / "root", tree, 16 * MIB, "-L", "root")
        disk = filesystems.partitioned(folder / "vda.raw", [root, inner])
        coldrise.json("backup", "web01", f"vda=raw:{disk}", f"vdb=raw:{secret}", "--time", f"20261120T1{hour}0000Z")
    environment = {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
    with Coldrised(folder, coldrise.repository, coldrise.passphrase_file, environment=environment,
                   options=["--web", str(browser.PAGE)]) as service:
        for role in ("operator", "viewer"):
            service.post("users", {"name": role, "role": role, "password": browser.PASSWORD})
        wait_until(lambda: service.call("GET", "machines/web01").status == 200, "the repository")
        yield service
        for run in service.get("runs?state=running")["runs"]:
            service.call("POST", f"runs/{run['id']}/cancel", {})
        wait_until(lambda: not service.get("runs?state=running")["runs"], "the end of the machines")
    shutil.rmtree(folder)


def look(visitor, name):
    """The findings of axe, light, dark and on a phone; with COLDRISE_PICTURES the pictures are kept there."""
    page, found = visitor.page, {}
    pictures = os.environ.get("COLDRISE_PICTURES")
    for looks, (scheme, width) in LOOKS.items():
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 844})
        found[looks] = visitor.violations()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{looks} is wider than the window"
        if pictures:
            page.screenshot(path=f"{pictures}/{name}-{looks}.png", full_page=True)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 800})
    assert not any(found.values()), found


def saved(page, action):
    with page.expect_download() as waiting:
        action()
    return waiting.value


def test_files_of_a_point(service, visit):
    visitor = visit(service)
    visitor.log_in("operator")
    page = visitor.page
    visitor.go("machines/web01/20261120T110000Z")
    page.get_by_role("link", name="Files", exact=True).click()
    page.get_by_text("A small machine starts").wait_for()
    systems = page.get_by_role("region", name="File systems")
    systems.get_by_role("link", name="vda1").wait_for(timeout=60_000)
    systems.get_by_text("its key is not taken here").wait_for()
    assert systems.get_by_role("link", name="vdb").count() == 0
    look(visitor, "systems")

    systems.get_by_role("link", name="vda1").click()
    folder = page.get_by_role("region", name="Folder")
    folder.get_by_role("link", name="etc/").click()
    folder.get_by_text("<img src=x onerror=alert(1)>", exact=True).wait_for()
    folder.get_by_text("\\xff\\xfe", exact=True).wait_for()
    look(visitor, "folder")
    # A file, one whose name is not text, and a folder.
    file = saved(page, folder.get_by_role("link", name="fstab", exact=True).click)
    assert file.suggested_filename == "fstab" and file.path().read_text() == "second, and longer\n"
    assert saved(page, folder.get_by_text("\\xff\\xfe", exact=True).click).path().read_text() == "strange"
    whole = saved(page, folder.get_by_role("link", name="Download as zip").first.click)
    with zipfile.ZipFile(whole.path()) as archive:
        assert whole.suggested_filename == "etc.zip" and archive.read("etc/deep/a.conf") == b"alpha\n"

    keyboard(page, folder)
    search(visitor, folder)
    versions(visitor, folder)


def keyboard(page, folder):
    folder.get_by_role("link", name="deep/").focus()
    page.keyboard.press("Enter")
    folder.get_by_role("link", name="a.conf").wait_for()
    page.keyboard.press("Backspace")
    folder.get_by_role("link", name="deep/").wait_for()
    page.wait_for_function("document.activeElement.textContent === 'deep/'")
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.textContent") != "deep/"
    page.get_by_role("navigation", name="Path").get_by_role("link", name="vda1").click()
    folder.get_by_role("link", name="empty/").click()
    folder.get_by_text("This folder is empty.").wait_for()
    page.get_by_role("navigation", name="Path").get_by_role("link", name="vda1").click()
    folder.get_by_role("link", name="etc/").wait_for()


def search(visitor, folder):
    page = visitor.page
    page.keyboard.press("/")
    page.keyboard.type("conf")
    page.keyboard.press("Enter")
    folder.get_by_text("1 file or folder found").wait_for()
    folder.get_by_role("link", name="/etc/deep/a.conf").wait_for()
    look(visitor, "found")
    folder.get_by_role("searchbox").fill("none of this name")
    page.keyboard.press("Enter")
    folder.get_by_text("Nothing of that name is here.").wait_for()
    folder.get_by_role("button", name="Show the folder").click()
    folder.get_by_role("link", name="etc/").click()


def versions(visitor, folder):
    page = visitor.page
    folder.get_by_role("button", name="Versions of fstab").click()
    dialog = page.get_by_role("dialog", name="Versions")
    dialog.get_by_text("All 2 points looked at.").wait_for(timeout=60_000)
    look(visitor, "versions")
    older = saved(page, dialog.get_by_role("button", name="Download the version of 20261120T100000Z").click)
    assert older.path().read_text() == "first\n"
    dialog.get_by_role("button", name="Close").click()


def test_content_that_cannot_be_shown_is_reported(service, visit):
    watcher = visit(service)
    watcher.log_in("viewer")
    watcher.go("machines/web01/20261120T110000Z")
    watcher.page.get_by_text("Protection").wait_for()
    assert watcher.page.get_by_role("link", name="Files", exact=True).count() == 0
    watcher.go("files/web01/20261120T110000Z")
    watcher.page.get_by_text("Your role may not read files").wait_for()
    look(watcher, "refused")

    visitor = visit(service)
    visitor.log_in("operator")
    visitor.go("files/web01/20200101T000000Z")
    visitor.page.get_by_role("alert").get_by_text("Not found").wait_for()
    visitor.go("files/web01/20261120T110000Z?system=vda1&path=/none")
    visitor.page.get_by_role("region", name="Folder").get_by_role("alert").wait_for(timeout=60_000)
    visitor.page.get_by_role("alert").get_by_text("/none").wait_for()
