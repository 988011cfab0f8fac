"""An independent implementation of the rules of coldrise prune."""

import datetime
import itertools

UTC = datetime.timezone.utc

PERIODS = {
    "hourly": lambda time: (time.date(), time.hour),
    "daily": lambda time: time.date(),
    "weekly": lambda time: time.isocalendar()[:2],
    "monthly": lambda time: (time.year, time.month),
    "yearly": lambda time: time.year,
}


def time_of(point):
    return datetime.datetime.strptime(point.split("+")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)


def order_of(point):
    time, _, number = point.partition("+")
    return time, int(number or 0)


def before(moment, span):
    """The moment that precedes another one by a span."""
    count, unit = int(span[:-1]), span[-1]
    if unit in "hdw":
        hours = {"h": 1, "d": 24, "w": 7 * 24}[unit]
        return moment - datetime.timedelta(hours=hours * count)
    months = moment.year * 12 + moment.month - 1 - (count if unit == "m" else 12 * count)
    # The same day, or the month's last.
    for day in range(moment.day, 0, -1):
        try:
            return moment.replace(year=months // 12, month=months % 12 + 1, day=day)
        except ValueError:
            continue
    raise AssertionError("no month is without a first day")


def kept(points, rules, now):
    """The points of a machine that stay. `rules` are {"daily": 7, "within": "7d"}."""
    newest_first = sorted(points, key=order_of, reverse=True)
    stays = {point for point in points if time_of(point) > now}
    counted = [point for point in newest_first if point not in stays]
    # The newest backup; one from the future only if it is the only one.
    backups = [point for point in counted + newest_first if "+" not in point]
    stays |= set(backups[:1])
    for rule, bound in rules.items():
        if rule == "last":
            stays |= set(counted[:bound])
        elif rule == "within" and counted:
            since = before(time_of(counted[0]), bound)
            stays |= {point for point in counted if time_of(point) > since}
        elif rule in PERIODS:
            period = PERIODS[rule]
            groups = itertools.groupby(counted, key=lambda point: period(time_of(point)))
            stays |= {next(group) for _, group in itertools.islice(groups, bound)}
    return stays
