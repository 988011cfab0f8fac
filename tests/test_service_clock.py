"""The service while its wall clock is set: by a day forwards and back, and a little."""

import contextlib
import datetime
import json
import queue
import socket
import threading

import pytest

from support.cli import PROGRAM
from support.service import Coldrised
from support.sinks import WebSink
from support.wallclock import WallClock
from test_service_access import PASSWORD, set_up
from test_service_jobs import ended, idle, images, job, wait_for

HOUR, DAY = 3600, 86400
# The dispatcher's log line for each handled jump.
NOTICED = "the clock was set"


class Clocked:
    """A service with a clock that can be set."""

    def __init__(self, service, clock):
        self.service, self.clock = service, clock

    def jump(self, offset_s):
        """Sets the clock, and waits until the queue has dealt with it."""
        noticed = self.service.log.count(NOTICED)
        self.clock.set(offset_s)
        # Any change wakes the dispatcher, which else looks every 30 s, and another one those who compute alarms.
        assert self.service.call("PATCH", "queue", {"parallel": 4}).status == 204
        assert self.service.call("PUT", "notifications/settings", {}).status in (200, 204)
        wait_for(lambda: self.service.log.count(NOTICED) > noticed, "the jump is noticed")
        wait_for(lambda: idle(self.service), "what was due has run")

    def runs(self, name):
        """The number of runs of a job; all of them succeeded."""
        found = ended(self.service, job=name, command="backup")
        assert all(run["state"] == "ok" for run in found), found
        return len(found)

    def calendar(self, in_s):
        """A daily time, so far from now."""
        at = datetime.datetime.fromtimestamp(self.clock.now() + in_s, datetime.UTC)
        return at.strftime("*-*-* %H:%M:%S UTC")


@pytest.fixture
def clocked(tmp_path, coldrise):
    clock = WallClock(tmp_path)
    program = clock.program(PROGRAM, tmp_path)
    service = Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file,
                        environment=clock.environment(), options=["--program", program])
    images(tmp_path, "web01", "web02", "web03")
    with service:
        yield Clocked(service, clock)


@contextlib.contextmanager
def events(service, headers=None, over="unix"):
    """The types of the events of a stream; None when it has ended."""
    found = queue.Queue()

    def follow(response):
        # The client's own close ends the loop with any of these.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while line := response.readline():
                if line.startswith(b"data:") and "type" in (event := json.loads(line[5:])):
                    found.put(event["type"])
        found.put(None)

    with contextlib.closing(service.connection(over, timeout_s=120)) as connection:
        connection.request("GET", "/api/v1/events", headers=headers or {})
        response = connection.getresponse()
        assert response.status == 200
        threading.Thread(target=follow, args=[response], daemon=True).start()
        yield found
        # Else the close waits until the thread has read the next sign of life.
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def test_no_time_runs_twice_and_what_was_missed_runs_once(clocked, tmp_path):
    service = clocked.service
    daily = job(tmp_path, "daily", ["web01"], schedule=[clocked.calendar(HOUR / 2)])
    # Its time is far from all those that the clock is set to, and does not pass on its own.
    at = datetime.datetime.fromtimestamp(clocked.clock.now() + 2 * HOUR / 3, datetime.UTC)
    hourly = job(tmp_path, "hourly", ["web02"], schedule=[at.strftime("*-*-* *:%M:%S UTC")])
    for new in (daily, hourly):
        service.post("jobs", new)
    with events(service) as stream:
        clocked.jump(HOUR)
        assert (clocked.runs("daily"), clocked.runs("hourly")) == (1, 1)
        # Back over the time of the daily job: it was done half an hour ago. And on.
        clocked.jump(HOUR // 3)
        assert service.get("jobs/daily")["next_ms"][0] > (clocked.clock.now() + 23 * HOUR) * 1000
        clocked.jump(HOUR)
        assert clocked.runs("daily") == 1
        # Forwards over one time of the first and 24 of the second.
        before = clocked.runs("hourly")
        clocked.jump(HOUR + DAY)
        assert (clocked.runs("daily"), clocked.runs("hourly")) == (2, before + 1)
        # A day back: neither runs immediately, and the hourly one does not wait for a day.
        clocked.jump(HOUR)
        assert (clocked.runs("daily"), clocked.runs("hourly")) == (2, before + 1)
        assert service.get("jobs/hourly")["next_ms"][0] <= (clocked.clock.now() + HOUR) * 1000
        assert service.get("jobs/daily")["next_ms"][0] <= (clocked.clock.now() + 2 * DAY) * 1000
        clocked.jump(2 * HOUR)
        assert clocked.runs("hourly") == before + 2
        # A restart with another clock: due jobs run once.
        service.stop()
        clocked.clock.set(2 * DAY + 2 * HOUR)
        service.start()
        wait_for(lambda: clocked.runs("hourly") == before + 3 and clocked.runs("daily") == 3 and idle(service),
                 "one run each")
        assert stream.get(timeout=30) is not None


def test_ages_and_messages_follow_the_clock_and_come_back(clocked, tmp_path, coldrise):
    service = clocked.service
    with WebSink() as web:
        way = {"type": "webhook", "url": web.url, "template": "generic"}
        service.post("notifications/targets", {"name": "web", "way": way})
        service.post("jobs", job(tmp_path, "by-hand", ["web01"], age_limit_hours=26))
        service.post("jobs", job(tmp_path, "daily", ["web02"], age_limit_hours=26,
                                 schedule=[clocked.calendar(HOUR)]))
        for name in ("by-hand", "daily"):
            service.post(f"jobs/{name}/start", {}, expected=(202,))
        wait_for(lambda: idle(service) and clocked.runs("daily") == 1, "the first backups")
        with events(service) as stream:
            clocked.jump(DAY)
            assert clocked.runs("daily") == 2
            # 24 hours are below the limit; a clock change alone raises no alarm.
            assert web.messages(2) == []
            # No run has failed; still the backup of web01 is too old. That of web02 was made.
            clocked.jump(DAY + 3 * HOUR)
            raised = web.message(timeout_s=60)
            assert (raised["key"], raised["occasion"], raised["severity"]) == ("age:web01", "raised", "fail")
            assert "27 h old" in raised["summary"]
            # Back: the newest point of web02 lies in the future, and raises no alarm.
            clocked.jump(0)
            cleared = web.message(timeout_s=60)
            assert (cleared["key"], cleared["occasion"]) == ("age:web01", "cleared")
            assert web.messages(2) == []
            clocked.jump(-DAY)
            assert web.messages(2) == [] and service.get("alarms?active=true") == []
            found = set()
            while "alarm" not in found:
                found.add(stream.get(timeout=10))
            assert {"run", "machine", "job"} & found and None not in found
            # A backup now has an earlier name, and is the newest good one.
            service.post("jobs/by-hand/start", {}, expected=(202,))
            wait_for(lambda: idle(service), "the backup")
            clocked.jump(-DAY + 2 * HOUR)
            age = service.get("machines/web01")["last_good_backup"]["age_seconds"]
            assert 2 * HOUR <= age < 3 * HOUR
            assert web.messages(1) == []


def test_logins_end_whichever_way_the_clock_is_set(clocked):
    service, clock = clocked.service, clocked.clock
    first = set_up(service)

    def status(login):
        return service.call("GET", "me", headers=login, over="https").status

    def log_in():
        body = {"user": "admin", "password": PASSWORD}
        answer = service.call("POST", "login", body, over="https")
        assert answer.status == 200, answer.body
        return {"Cookie": answer.headers["Set-Cookie"].split(";")[0], "Sec-Fetch-Site": "same-origin"}

    assert status(first) == 200
    with events(service, first, "https") as stream:
        clock.set(DAY)
        assert status(first) == 401
        while stream.get(timeout=30) is not None:
            pass
    second = log_in()
    assert status(second) == 200
    with events(service, second, "https") as stream:
        # Made a day in the future: it would live for a day and a half.
        clock.set(0)
        assert status(second) == 401
        while stream.get(timeout=30) is not None:
            pass
    # A small step back does not end one.
    third = log_in()
    clock.set(-60)
    assert status(third) == 200
    clock.set(-60 + 12 * HOUR + 120)
    assert status(third) == 401
