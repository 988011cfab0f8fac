"""Targets of messages, and jobs that lead to some."""

import contextlib
import sqlite3
import time


def webhook(url, template="generic", **more):
    way = {"type": "webhook", "url": url, "template": template}
    return {"name": f"to {url[:30]} {template}", "way": way, **more}


def smtp(port, **more):
    way = {"type": "smtp", "host": "127.0.0.1", "port": port, "encryption": "none",
           "from": "Coldrise <coldrise@example.org>", "to": ["ops@example.org"], **more}
    return {"name": f"mail {port}", "way": way}


def add(service, settings):
    return service.post("notifications/targets", settings)


def change(service, target, **more):
    settings = {"name": target["name"], "way": target["way"], **more}
    answer = service.call("PUT", f"notifications/targets/{target['id']}", settings)
    assert answer.status == 200, answer.body
    return answer.json


def trial(service, target):
    return service.post(f"notifications/targets/{target['id']}/test", {}, expected=(200,))


def wait_for(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
    return found


def count_looks(service):
    """The service has looked at the runs and at the drive at least once."""
    with contextlib.closing(sqlite3.connect(service.state / "coldrised.db")) as database:
        return database.execute("SELECT count(*) FROM space_samples").fetchone()[0]


class Jobs:
    """Backup jobs of the service, whose disks are files that exist or not."""

    def __init__(self, service, folder):
        self.service, self.folder = service, folder
        # Events before the first scan of the service are not reported.
        wait_for(lambda: service.call("GET", "machines").status == 200)
        wait_for(lambda: count_looks(service) > 0)

    def disk(self, machine):
        return self.folder / f"{machine}.raw"

    def add(self, name, machines, **more):
        job = {"name": name, "kind": "backup", "machines": machines, "retries": 0,
               "disks": {"vda": f"raw:{self.folder}/{{machine}}.raw"}, **more}
        self.service.post("jobs", job)

    def run(self, name):
        """Starts a job, and waits for its runs."""
        started = self.service.post(f"jobs/{name}/start", {})["runs"]
        wait_for(lambda: all(self.state(run) not in (None, "running") for run in started))
        return started

    def state(self, run):
        answer = self.service.call("GET", f"runs/{run}")
        return answer.json["state"] if answer.status == 200 else None


def active(service):
    return [(alarm["key"], alarm["severity"]) for alarm in service.get("alarms?active=true")]
