//! How often events occur, by span of time.

use std::collections::BTreeMap;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::Calendar;
use crate::calendar::MICROS;
use crate::field::Field;

const MINUTE_MS: i64 = 60_000;

/// The occurrences in a span of time. Times are whole seconds, in milliseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occurrences {
    /// The first time.
    pub first_ms: i64,
    /// Number of times, at least 1.
    pub times: usize,
    /// The distance from each time to the next one, if there are three times or more and it is always the same.
    pub step_ms: Option<i64>,
}

/// The occurrences of any of the events between neighbours of `bounds_ms`, which ascend; `None` where nothing
/// occurs. Times within one second count once. `default` is for events without a time zone.
///
/// Each event costs one step for each minute in which it occurs, however many seconds it names. The caller bounds the
/// time from the first bound to the last one.
pub fn occurrences(
    events: &[Calendar],
    bounds_ms: &[i64],
    default: &TimeZone,
) -> Vec<Option<Occurrences>> {
    let minutes = minutes(events, bounds_ms, default).unwrap_or_default();
    let spans = bounds_ms.iter().zip(bounds_ms.iter().skip(1));
    spans.map(|(from_ms, until_ms)| span(&minutes, *from_ms, *until_ms)).collect()
}

/// The minutes in which events occur, by their start, with a bit for each second.
fn minutes(
    events: &[Calendar],
    bounds_ms: &[i64],
    default: &TimeZone,
) -> Option<BTreeMap<i64, u64>> {
    let first_ms = bounds_ms.first()?.checked_sub(MINUTE_MS)?;
    let first = Timestamp::from_millisecond(first_ms).ok()?;
    let last = Timestamp::from_millisecond(*bounds_ms.last()?).ok()?;
    let mut minutes = BTreeMap::new();
    for event in events {
        let by_minute = Calendar { seconds: Field::value(0), ..event.clone() };
        let mut at = first;
        while let Some(next) = by_minute.next_after_in(at, default).filter(|next| *next < last) {
            *minutes.entry(next.as_millisecond()).or_default() |= seconds(event);
            at = next;
        }
    }
    Some(minutes)
}

/// The seconds of a minute, as bits.
fn seconds(event: &Calendar) -> u64 {
    let occurs_in =
        |second: &u32| event.seconds.next(second * MICROS, second * MICROS + MICROS - 1).is_some();
    (0..60).filter(occurs_in).map(|second| 1 << second).sum()
}

fn span(minutes: &BTreeMap<i64, u64>, from_ms: i64, until_ms: i64) -> Option<Occurrences> {
    let near = minutes.range(from_ms.saturating_sub(MINUTE_MS).min(until_ms)..until_ms);
    let seconds = near.flat_map(|(minute_ms, seconds)| {
        let is_set = move |second: &i64| seconds >> second & 1 == 1;
        (0..60).filter(is_set).map(move |second| minute_ms + second * 1000)
    });
    let times: Vec<i64> = seconds.filter(|ms| (from_ms..until_ms).contains(ms)).collect();
    let mut steps = times.iter().zip(times.iter().skip(1)).map(|(ms, next_ms)| next_ms - ms);
    let step_ms = steps.next().filter(|step| times.len() > 2 && steps.all(|other| other == *step));
    Some(Occurrences { first_ms: *times.first()?, times: times.len(), step_ms })
}

#[cfg(test)]
mod tests {
    use super::{Occurrences, occurrences};
    use crate::Calendar;
    use jiff::tz::TimeZone;
    use jiff::{Timestamp, ToSpan, civil};

    const MINUTE_MS: i64 = 60_000;
    const HOUR_MS: i64 = 60 * MINUTE_MS;

    /// The midnights of eight days.
    fn week(first: &str, zone: &TimeZone) -> Vec<i64> {
        let first: civil::Date = first.parse().unwrap();
        let midnight = |day: i64| first.checked_add(day.days()).unwrap().to_zoned(zone.clone());
        (0..8).map(|day| midnight(day).unwrap().timestamp().as_millisecond()).collect()
    }

    fn events(lines: &[&str]) -> Vec<Calendar> {
        lines.iter().map(|line| line.parse().unwrap()).collect()
    }

    /// One time after the other.
    fn slowly(lines: &[Calendar], bounds_ms: &[i64], zone: &TimeZone) -> Vec<Option<Occurrences>> {
        let start = Timestamp::from_millisecond(bounds_ms[0] - 1).unwrap();
        let next = |after: &Timestamp| {
            lines.iter().filter_map(|line| line.next_after_in(*after, zone)).min()
        };
        let until = *bounds_ms.last().unwrap();
        let times: Vec<i64> = std::iter::successors(next(&start), next)
            .map(Timestamp::as_millisecond)
            .take_while(|ms| *ms < until)
            .collect();
        let span = |bounds: &[i64]| {
            let own: Vec<i64> =
                times.iter().copied().filter(|ms| (bounds[0]..bounds[1]).contains(ms)).collect();
            let steps: Vec<i64> = own.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let is_regular = steps.len() > 1 && steps.iter().all(|step| *step == steps[0]);
            own.first().map(|first_ms| Occurrences {
                first_ms: *first_ms,
                times: own.len(),
                step_ms: is_regular.then(|| steps[0]),
            })
        };
        bounds_ms.windows(2).map(span).collect()
    }

    #[test]
    fn days_on_which_the_clock_changes_are_counted_as_they_pass() {
        let zone = TimeZone::get("Europe/Berlin").unwrap();
        let counts = |first: &str, lines: &[&str], day: usize| {
            let found = occurrences(&events(lines), &week(first, &zone), &zone);
            found[day].as_ref().map(|found| (found.times, found.step_ms))
        };
        // In spring, the hour from 2 to 3 is missing. In autumn it occurs twice, and events use it once.
        let (spring, autumn) = ("2026-03-28", "2026-10-24");
        let half = ["*:0/30"];
        assert_eq!(counts(spring, &half, 0), Some((48, Some(30 * MINUTE_MS))));
        assert_eq!(counts(spring, &half, 1), Some((46, Some(30 * MINUTE_MS))));
        assert_eq!(counts(autumn, &half, 1), Some((48, None)));
        assert_eq!(counts(autumn, &half, 2), Some((48, Some(30 * MINUTE_MS))));
        assert_eq!(counts(spring, &["02:30"], 1), None);
        assert_eq!(counts(autumn, &["02:30"], 1), Some((1, None)));
        assert_eq!(counts(spring, &["*:*:*"], 1), Some((23 * 3600, Some(1000))));
        // In UTC, both days are as long as they are.
        assert_eq!(counts(spring, &["*:0/30 UTC"], 1), Some((46, Some(30 * MINUTE_MS))));
        assert_eq!(counts(autumn, &["*:0/30 UTC"], 1), Some((50, Some(30 * MINUTE_MS))));
    }

    #[test]
    fn several_events_are_one_list_of_times() {
        let zone = TimeZone::UTC;
        let lines = events(&["Sun 04:00", "*-*-* 04:00", "22:00:30", "22:00:30.5"]);
        let found = occurrences(&lines, &week("2026-11-27", &zone), &zone);
        for (day, found) in found.into_iter().enumerate() {
            let found = found.unwrap();
            assert_eq!((found.times, found.step_ms), (2, None), "{day}");
            assert_eq!(found.first_ms % (24 * HOUR_MS), 4 * HOUR_MS, "{day}");
        }
        let lines = events(&["*:*", "*:*:30"]);
        let found = occurrences(&lines, &[1_000, 91_000, 91_001, 151_000], &zone);
        let first = Occurrences { first_ms: 30_000, times: 3, step_ms: Some(30_000) };
        let last = Occurrences { first_ms: 120_000, times: 2, step_ms: None };
        assert_eq!(found, [Some(first), None, Some(last)]);
        assert_eq!(occurrences(&[], &[0, 1], &zone), [None]);
        assert_eq!(occurrences(&lines, &[i64::MIN, 0, i64::MAX], &zone), [None, None]);
    }

    #[test]
    fn the_counts_are_those_of_all_times_one_by_one() {
        for (name, first) in [
            ("UTC", "2026-11-27"),
            ("Europe/Berlin", "2026-03-26"),
            ("Europe/Berlin", "2026-10-23"),
            ("America/New_York", "2026-10-29"),
            ("Australia/Lord_Howe", "2026-10-01"),
            ("Australia/Lord_Howe", "2026-04-02"),
            ("Africa/Cairo", "2026-04-22"),
            ("Asia/Kathmandu", "2026-11-27"),
        ] {
            let zone = TimeZone::get(name).unwrap();
            for lines in [
                &["*:0/30"][..],
                &["*:*"],
                &["*:*:0/20"],
                &["Sat,Sun 02:00..03:0/7", "*:15", "*-*-* 01:45:10 UTC"],
                &["*:0/20", "*:0/30", "daily"],
                &["*:0/15 Europe/Berlin", "02:10 Australia/Lord_Howe"],
                &["2020-01-01"],
            ] {
                let (lines, bounds) = (events(lines), week(first, &zone));
                let expected = slowly(&lines, &bounds, &zone);
                assert_eq!(occurrences(&lines, &bounds, &zone), expected, "{name} {first}");
            }
        }
    }
}
