"""How the service serves the page's files."""

import gzip
import re

from support.browser import PAGE
from support.service import Coldrised


def get(service, path, **headers):
    return service.call("GET", path, over="https", headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_the_page_and_its_files(service):
    page = get(service, "/")
    assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.headers["Cache-Control"] == "no-cache"
    assert page.body == (PAGE / "index.html").read_bytes()
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["Referrer-Policy"] == "no-referrer"
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page.body.decode()):
        file = get(service, path)
        assert file.status == 200 and file.body == (PAGE / path[1:]).read_bytes()
        if path.startswith("/assets/"):
            assert file.headers["Cache-Control"] == "public, max-age=31536000, immutable"


def test_compressed_and_unchanged_files(service):
    page = get(service, "/", Accept_Encoding="gzip, br")
    assert page.headers["Content-Encoding"] == "gzip" and page.headers["Vary"] == "accept-encoding"
    assert gzip.decompress(page.body) == (PAGE / "index.html").read_bytes()
    again = get(service, "/", If_None_Match=page.headers["ETag"])
    assert again.status == 304 and again.body == b""
    assert get(service, "/", If_None_Match='"other"').status == 200


def test_a_wrong_cookie_still_gets_the_page(service):
    assert get(service, "/", Cookie="__Host-coldrise=" + "0" * 64).status == 200
    assert get(service, "/api/v1/me", Cookie="__Host-coldrise=" + "0" * 64).status == 401


def test_nothing_else_is_served(service):
    for path in ("/index.html", "/index.html.gz", "/../../../etc/passwd", "/..%2f..%2fetc/passwd", "/assets/", "/assets/../index.html",
                 "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/assets/none.js", "/state/coldrised.db"):
        answer = get(service, path)
        assert answer.status == 404 and b"root:" not in answer.body, path
    assert service.call("POST", "/", {}, over="https").status == 405


def test_without_a_page_the_service_gives_advice(tmp_path):
    with Coldrised(tmp_path) as service:
        assert b"openapi.json" in get(service, "/").body


def test_a_folder_without_a_page_is_refused(tmp_path):
    import subprocess

    service = Coldrised(tmp_path, options=["--web", str(tmp_path)])
    done = subprocess.run(service.command(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "there is no index.html" in done.stderr and "make web" in done.stderr


def test_the_first_page_load_is_small():
    """The files that a browser loads to show the machines: index.html, its script, its style. In compressed bytes."""
    page = (PAGE / "index.html").read_text()
    files = [PAGE / "index.html", *(PAGE / path[1:] for path in re.findall(r'(?:src|href)="(/assets/[^"]+)"', page))]
    assert len(files) >= 3
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) <= 120_000


def test_the_page_names_no_other_host():
    for file in PAGE.rglob("*"):
        if file.suffix in (".js", ".css", ".html"):
            found = set(re.findall(r"https?://[\w.-]+", file.read_text()))
            # Names of XML, documentation of warnings and what a person types: nothing is loaded from there.
            assert found <= {"http://www.w3.org", "https://svelte.dev", "https://"}, (file, found)
