"""Repository: how it grew, by samples of the service, one a day."""

import re
import sqlite3
import subprocess
import time

from support import browser, site
from support.nbdserver import wait_until
from support.service import Coldrised

DAY_MS = 86_400_000
GIB = 1 << 30


def test_growth_is_sampled_and_drawn(tmp_path, visit):
    made = site.Site(tmp_path)
    made.back_up("web01", [2, 1])
    work = tmp_path / "service"
    work.mkdir()
    options = ["--web", str(browser.PAGE)]
    with Coldrised(work, made.coldrise.repository, made.coldrise.passphrase_file, options=options) as service:
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        visitor = visit(service)
        visitor.log_in()
        wait_until(lambda: service.get("repository/growth"), "the first sample")
        [first] = service.get("repository/growth")
        used = int(subprocess.run(["du", "-s", "-B1", made.coldrise.repository], capture_output=True, check=True).stdout.split()[0])
        assert abs(first["occupied_bytes"] - used) < 1 << 20
        assert service.call("GET", "repository/growth", token=service.token("viewer", ["web*"])).status == 403
        visitor.go("repository")
        growth = visitor.page.get_by_text("After two days, this shows how it grows.")
        growth.wait_for()
        assert visitor.page.get_by_role("img", name="Space of the repository by day").count() == 0

        # The days before: 2 GiB more each, without two days on which the service was off.
        service.stop()
        with sqlite3.connect(service.state / "coldrised.db") as database:
            now_ms = int(time.time() * 1000)
            rows = [(at // DAY_MS, at, GIB * (20 - 2 * back)) for back in (10, 9, 8, 5, 4, 3, 2, 1) for at in [now_ms - back * DAY_MS]]
            database.executemany("INSERT INTO growth SELECT repository, ?, ?, ? FROM (SELECT DISTINCT repository FROM growth)", rows)
            database.execute("INSERT INTO growth VALUES ('another', ?, ?, ?)", (rows[0][0] - 90, now_ms - 100 * DAY_MS, 5))
        service.start()
        assert [sample["occupied_bytes"] for sample in service.get("repository/growth")[:-1]] == [row[2] for row in rows]
        for look in ({}, {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}}):
            visitor = visit(service, **look)
            visitor.log_in()
            visitor.go("repository")
            plot = visitor.page.get_by_role("img", name="Space of the repository by day")
            plot.wait_for()
            name = plot.get_attribute("aria-label")
            assert re.search(r"From 0 B to [\d.]+ [KM]iB in 10 d: [\d.]+ [KM]iB more, [\d.]+ [KM]iB a day", name), name
            assert plot.get_by_text("20.0 GiB").or_(plot.get_by_text("32.0 GiB")).count() == 1, "the axis"
            assert plot.locator("circle").count() == len(rows) + 2
            assert not visitor.violations()
            assert visitor.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
