"""The next seven days of the jobs, on days that the test chooses: the service and the page have its clock."""

import datetime

import pytest

from support import browser
from support.service import Coldrised
from support.wallclock import WallClock

OFTEN, WEEKLY = "*:0/30", "Sun 04:00"


@pytest.fixture
def week_of(tmp_path, visit):
    """Opens the page at a time with these jobs, and returns the rows of each day. The service is in UTC, the page in Berlin."""
    clock = WallClock(tmp_path)
    service = Coldrised(tmp_path, options=["--web", str(browser.PAGE)], environment=clock.environment() | {"TZ": "UTC"})

    def open_page(at, schedules, look=lambda visitor: None):
        clock.set(round(at.timestamp() - clock.now()))
        service.start()
        service.post("users", {"name": "admin", "role": "admin", "password": browser.PASSWORD})
        for name, schedule in schedules.items():
            service.post("jobs", {"name": name, "kind": "backup", "machines": ["web01"], "disks": {"vda": "raw:/srv/web01.raw"},
                                  "schedule": schedule})
        visitor = visit(service)
        visitor.context.clock.set_fixed_time(at)
        visitor.log_in()
        visitor.go("activity")
        week = visitor.page.locator("section", has=visitor.page.get_by_role("heading", name="Next seven days"))
        week.locator("ol > li").first.wait_for()
        look(visitor)
        return {day.get_by_role("heading").inner_text(): [" ".join(row.split()) for row in day.locator("ul > li").all_inner_texts()]
                for day in week.locator("ol > li").all()}

    yield open_page
    service.stop()
    service.short.cleanup()


@pytest.mark.parametrize("date", [*(f"2026-11-{day}" for day in range(23, 30)), "2026-03-26"])
def test_a_frequent_job_does_not_hide_others(week_of, date):
    start = datetime.date.fromisoformat(date)
    days = [start + datetime.timedelta(days=ahead) for ahead in range(7)]
    expected = {}
    for day in days:
        # Twenty to two in the first night. In March, the night of Sunday has no hour from 2 to 3.
        first, times = ("02:00", 44) if day == start else ("00:00", 46 if day == datetime.date(2026, 3, 29) else 48)
        weekly = [f"{'05' if day.month == 11 else '06'}:00 weekly"] if day.strftime("%a") == "Sun" else []
        expected[day.strftime("%a %-d %b")] = [*weekly, f"{first} often every 30 min, {times} times"]
    at = datetime.datetime.combine(start, datetime.time(0, 40), datetime.UTC)
    assert week_of(at, {"often": [OFTEN], "weekly": [WEEKLY]}) == expected


def test_rare_jobs_are_shown_among_many(week_of):
    """All jobs that are due on few days, at any time."""
    nightly = {f"nightly-{number:02}": [f"20:{number:02}"] for number in range(15)}
    late = {f"late-{number}": [f"Mon 22:0{number}"] for number in range(9)} | {"twice": ["Mon 04:00", "Mon 19:00"]}
    monthly = {f"monthly-{number}": [f"*-*-01 23:{number}0"] for number in range(5)} | {"first-hour": ["*-*-01 *:0/10"]}
    on_tuesday = {f"tuesday-{number}": [f"Tue 21:{number}0"] for number in range(4)}
    week = week_of(datetime.datetime(2026, 11, 27, 0, 40, tzinfo=datetime.UTC),
                   {"a-minutely": ["minutely"], "weekly": [WEEKLY], "yearly": ["yearly"],
                    **nightly, **late, **monthly, **on_tuesday}, lambda visitor: browser.look(visitor, "Next seven days"))
    usual = [f"21:{number:02} nightly-{number:02}" for number in range(8)]
    monday = [*(f"23:0{number} late-{number}" for number in range(9)), "05:00 twice 2 times"]
    # The first of December in UTC, which ends at 1 in the morning in Berlin.
    tuesday = [*(f"22:{number}0 tuesday-{number}" for number in range(4)), "01:00 first-hour every 10 min, 138 times"]
    wednesday = [*(f"00:{number}0 monthly-{number}" for number in range(5)), "00:00 first-hour every 10 min, 6 times"]
    for day, rows in week.items():
        expected = {"Sun 29 Nov": ["05:00 weekly", *usual[:7], "and 9 more jobs"],
                    "Mon 30 Nov": [*monday, "and 16 more jobs"],
                    "Tue 1 Dec": [*tuesday, *usual[:3], "and 13 more jobs"],
                    "Wed 2 Dec": [*wednesday, *usual[:2], "and 14 more jobs"]}.get(day, [*usual, "and 8 more jobs"])
        assert rows == expected, day
    assert len(week) == 7
