//! Calendar events, compared with what `systemd-analyze calendar` says.
//!
//! Set PROPTEST_CASES for more random events. The tests need systemd-analyze, but no systemd that
//! runs.

use std::process::Command;

use coldrise_schedule::Calendar;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

const ITERATIONS: usize = 4;

/// Normalized text and times in seconds; `None` if the event is refused.
type Answer = Option<(String, Vec<i64>)>;

/// What systemd says; `None` if it has no answer.
fn systemd(text: &str, base: Timestamp, zone: &str) -> Option<Answer> {
    let base = base.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
    let done = Command::new("systemd-analyze")
        .args(["calendar", &format!("--iterations={ITERATIONS}"), &format!("--base-time={base}")])
        .args(["--", text])
        .env("TZ", zone)
        .env("LC_ALL", "C")
        .output()
        .unwrap();
    // A defect of systemd 252: with some steps ("*-05/6-*") it gives up at a change of the clock.
    if String::from_utf8_lossy(&done.stderr).contains("Failed to determine next elapse") {
        return None;
    }
    let output = String::from_utf8(done.stdout).unwrap();
    let value = |line: &str| line.split_once(": ").map(|(_, value)| value.to_owned());
    let normalized = output.lines().find(|line| line.contains("Normalized form")).and_then(value);
    let Some(normalized) = normalized else { return Some(None) };
    let mut times = Vec::new();
    for line in output.lines() {
        let is_utc = line.contains("(in UTC)");
        let is_local = line.contains("Next elapse") || line.contains("Iter. #");
        let Some(shown) = value(line).filter(|_| is_utc || is_local) else { continue };
        // "Sat 2026-03-28 02:30:00 CET": the line in UTC follows, unless this is it.
        let parts: Vec<_> = shown.split(' ').collect();
        if parts.len() == 4 && parts[3] == "UTC" {
            let time: Timestamp = format!("{}T{}Z", parts[1], parts[2]).parse().unwrap();
            times.push(time.as_second());
        }
    }
    Some(Some((normalized, times)))
}

/// The same from this crate.
fn ours(text: &str, base: Timestamp, zone: &str) -> Answer {
    let calendar = Calendar::parse(text).ok()?;
    let (zone, mut times, mut at) = (TimeZone::get(zone).unwrap(), Vec::new(), base);
    while times.len() < ITERATIONS {
        let Some(next) = calendar.next_after_in(at, &zone) else { break };
        times.push(next.as_second());
        at = next;
    }
    Some((calendar.to_string(), times))
}

fn compare(text: &str, base: Timestamp, zone: &str) -> Result<(), TestCaseError> {
    if let Some(expected) = systemd(text, base, zone) {
        let answer = ours(text, base, zone);
        if answer != expected && text.contains('/') && is_near_change(&answer, base, text, zone) {
            return Ok(());
        }
        // systemd 252 refuses "~4,26", though it takes each of them.
        if expected.is_none() && text.contains('~') && text.contains(',') {
            return Ok(());
        }
        prop_assert_eq!(answer, expected, "{} at {} in {}", text, base, zone);
    }
    Ok(())
}

/// Whether a time of the answer is within a day of a change of the clock. There, systemd 252
/// skips times of events with steps: "0,3/6:*" has no minute at 0 o'clock, but "0,3:*" has.
fn is_near_change(answer: &Answer, base: Timestamp, text: &str, zone: &str) -> bool {
    let zone = text.split(' ').find(|word| ZONES.contains(word)).unwrap_or(zone);
    let zone = TimeZone::get(zone).unwrap();
    let day = SignedDuration::from_hours(24);
    let times = answer.iter().flat_map(|(_, times)| times.iter());
    let times = times.map(|time| Timestamp::from_second(*time).unwrap()).chain([base]);
    let mut changes =
        times.map(|time| zone.following(time - day).next().map(|at| (time, at.timestamp())));
    changes.any(|change| change.is_some_and(|(time, change)| change < time + day))
}

const ZONES: [&str; 6] = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Kathmandu",
    "Africa/Cairo",
];

/// A part of an event: mostly valid, and sometimes at its limits or beyond.
fn part(min: u32, max: u32) -> impl Strategy<Value = String> {
    let number = prop_oneof![8 => min..=max, 1 => 0..=max + 3];
    let item = (number.clone(), number, 0_u32..7, 0_u32..40).prop_map(|(a, b, step, kind)| {
        let (low, high) = if kind == 39 { (b, a) } else { (a.min(b), a.max(b)) };
        match kind {
            0..=19 => format!("{a}"),
            20..=26 => format!("{low}..{high}"),
            27..=30 => format!("{low}..{high}/{step}"),
            31..=38 => format!("{a}/{step}"),
            _ => format!("{low:02}..{high:02}"),
        }
    });
    prop_oneof![
        2 => Just("*".to_owned()),
        3 => proptest::collection::vec(item, 1..4).prop_map(|items| items.join(",")),
    ]
}

fn second() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => part(0, 59),
        1 => (0_u32..60, 0_u32..10_000_000).prop_map(|(s, f)| format!("{s}.{f}")),
        1 => (0_u32..60, 1_u32..99).prop_map(|(s, f)| format!("{s}/0.{f:02}")),
        1 => (0_u32..30, 30_u32..60, 1_u32..99).prop_map(|(a, b, f)| format!("{a}.5..{b}/7.{f}")),
    ]
}

fn event() -> impl Strategy<Value = String> {
    let day = proptest::sample::select(vec!["Mon", "tue", "WED", "Thursday", "fri", "Sat", "Sun"]);
    let days = prop_oneof![
        (day.clone()).prop_map(str::to_owned),
        (day.clone(), day.clone()).prop_map(|(a, b)| format!("{a}..{b}")),
        (day.clone(), day.clone(), day).prop_map(|(a, b, c)| format!("{a}..{b},{c}")),
    ];
    let year = prop_oneof![3 => Just("*".to_owned()), 1 => part(2020, 2040), 1 => part(0, 99)];
    let date = prop_oneof![
        3 => (year.clone(), part(1, 12), part(1, 31)).prop_map(|(y, m, d)| format!("{y}-{m}-{d}")),
        1 => (part(1, 12), part(1, 31)).prop_map(|(m, d)| format!("{m}-{d}")),
        1 => (year, part(1, 12), part(1, 28)).prop_map(|(y, m, d)| format!("{y}-{m}~{d}")),
    ];
    let time = prop_oneof![
        (part(0, 23), part(0, 59)).prop_map(|(h, m)| format!("{h}:{m}")),
        (part(0, 23), part(0, 59), second()).prop_map(|(h, m, s)| format!("{h}:{m}:{s}")),
    ];
    let zone = proptest::sample::select(ZONES.to_vec()).prop_map(str::to_owned);
    (
        proptest::option::of(days),
        proptest::option::of(date),
        proptest::option::of(time),
        proptest::option::weighted(0.2, zone),
    )
        .prop_map(|(days, date, time, zone)| {
            let words: Vec<String> = [days, date, time, zone].into_iter().flatten().collect();
            words.join(" ")
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_events_are_those_of_systemd(
        text in event(),
        zone in proptest::sample::select(ZONES.to_vec()),
        base_s in 1_577_836_800_i64..1_893_456_000,
    ) {
        compare(&text, Timestamp::from_second(base_s).unwrap(), zone)?;
    }

    #[test]
    fn frequent_events_around_changes_of_the_clock_are_those_of_systemd(
        hour in part(0, 4),
        minute in part(0, 59),
        ahead_minutes in -200_i64..200,
        change in proptest::sample::select(vec![
            ("Europe/Berlin", "2026-03-29T01:00:00Z"),
            ("Europe/Berlin", "2026-10-25T01:00:00Z"),
            ("America/New_York", "2026-03-08T07:00:00Z"),
            ("America/New_York", "2026-11-01T06:00:00Z"),
            ("Australia/Lord_Howe", "2026-10-03T15:30:00Z"),
            ("Australia/Lord_Howe", "2026-04-04T15:00:00Z"),
            ("Africa/Cairo", "2026-04-23T22:00:00Z"),
        ]),
    ) {
        let (zone, at) = change;
        let base = at.parse::<Timestamp>().unwrap() + SignedDuration::from_mins(ahead_minutes);
        compare(&format!("{hour}:{minute}"), base, zone)?;
    }

    #[test]
    fn any_text_is_parsed_or_refused_and_its_normalized_form_means_the_same(
        text in "[ -~]{0,40}|[0-9*/.,:~ -]{0,30}|\\PC{0,30}",
    ) {
        if let Ok(calendar) = Calendar::parse(&text) {
            let again = Calendar::parse(&calendar.to_string()).unwrap();
            prop_assert_eq!(&again.to_string(), &calendar.to_string());
            let base: Timestamp = "2026-11-23T00:00:00Z".parse().unwrap();
            let zone = TimeZone::UTC;
            prop_assert_eq!(again.next_after_in(base, &zone), calendar.next_after_in(base, &zone));
        }
    }
}

/// Expression, normalized text, next time after 2026-06-01 in UTC. Made by systemd 252.
const GOLDEN: [(&str, &str, Option<&str>); 31] = [
    ("minutely", "*-*-* *:*:00", Some("2026-06-01T00:01:00Z")),
    ("HOURLY", "*-*-* *:00:00", Some("2026-06-01T01:00:00Z")),
    ("daily", "*-*-* 00:00:00", Some("2026-06-02T00:00:00Z")),
    ("weekly Europe/Paris", "Mon *-*-* 00:00:00 Europe/Paris", Some("2026-06-07T22:00:00Z")),
    ("monthly", "*-*-01 00:00:00", Some("2026-07-01T00:00:00Z")),
    ("quarterly", "*-01,04,07,10-01 00:00:00", Some("2026-07-01T00:00:00Z")),
    ("semiannually", "*-01,07-01 00:00:00", Some("2026-07-01T00:00:00Z")),
    ("yearly", "*-01-01 00:00:00", Some("2027-01-01T00:00:00Z")),
    ("Sat,Thu,Mon..Wed,Sat..Sun", "Mon..Thu,Sat,Sun *-*-* 00:00:00", Some("2026-06-02T00:00:00Z")),
    ("Mon-Fri 22:00", "Mon..Fri *-*-* 22:00:00", Some("2026-06-01T22:00:00Z")),
    ("Mon..Sun", "*-*-* 00:00:00", Some("2026-06-02T00:00:00Z")),
    ("12,14,13,12:20,10,30", "*-*-* 12,13,14:10,20,30:00", Some("2026-06-01T12:10:00Z")),
    ("mon,fri *-1/2-1,3 *:30:45", "Mon,Fri *-01/2-01,03 *:30:45", Some("2026-07-03T00:30:45Z")),
    ("2003-03-05 05:40:23.42", "2003-03-05 05:40:23.420000", None),
    ("*:*:0/0.5", "*-*-* *:*:00/0.500000", Some("2026-06-01T00:00:00.5Z")),
    ("*:*:0.8050975", "*-*-* *:*:00.805098", Some("2026-06-01T00:00:00.805098Z")),
    ("*:*:1.2345678", "*-*-* *:*:01.234568", Some("2026-06-01T00:00:01.234568Z")),
    ("05:40 utc", "*-*-* 05:40:00 UTC", Some("2026-06-01T05:40:00Z")),
    ("1..12/3-1", "*-01..10/3-01 00:00:00", Some("2026-07-01T00:00:00Z")),
    ("Mon *-05~07/1", "Mon *-05~07/1 00:00:00", Some("2027-05-31T00:00:00Z")),
    ("*-*~1..7/2", "*-*~01..07/2 00:00:00", Some("2026-06-24T00:00:00Z")),
    ("*-*~5/2", "*-*~05/2 00:00:00", Some("2026-06-26T00:00:00Z")),
    ("*~1", "*-*~01 00:00:00", Some("2026-06-30T00:00:00Z")),
    ("*-02-29", "*-02-29 00:00:00", Some("2028-02-29T00:00:00Z")),
    ("*-02-30", "*-02-30 00:00:00", None),
    ("70-1-1", "1970-01-01 00:00:00", None),
    ("2199-12-31 23:59", "2199-12-31 23:59:00", Some("2199-12-31T23:59:00Z")),
    ("@1395716396", "2014-03-25 02:59:56 UTC", None),
    ("5..7/10:00", "*-*-* 05:00:00", Some("2026-06-01T05:00:00Z")),
    ("0:0:0.5..2/0.25", "*-*-* 00:00:00.500000..02/0.250000", Some("2026-06-01T00:00:00.5Z")),
    ("Mon  *-*-*   5:00", "Mon *-*-* 05:00:00", Some("2026-06-01T05:00:00Z")),
];

#[test]
fn golden_events() {
    let base: Timestamp = "2026-06-01T00:00:00Z".parse().unwrap();
    for (text, normalized, next) in GOLDEN {
        let calendar = Calendar::parse(text).unwrap();
        assert_eq!(calendar.to_string(), normalized, "{text}");
        let next = next.map(|next| next.parse().unwrap());
        assert_eq!(calendar.next_after_in(base, &TimeZone::UTC), next, "{text}");
    }
}

#[test]
fn errors_name_the_position_and_the_allowed_values() {
    for (text, place, allowed) in [
        ("", "empty", "daily"),
        (" \t", "empty", "daily"),
        ("*:0/0", "character 5: \"0\"", "1 or more"),
        ("Mon 24:00", "character 5: \"24\"", "0 to 23"),
        ("Mon,Foo 5:00", "character 5: \"Foo\"", "Mon to Sun"),
        ("Fri..Mon", "character 1", "from Mon to Sun"),
        ("9999-1-1", "\"9999\"", "1970 to 2199"),
        ("*-*-1 5:00 Mars/Base", "character 12", "Europe/Berlin"),
        ("*-*-1 5:00 UTC x", "character 16", "too much"),
        ("10..5:00", "character 1", "before it begins"),
        ("59/2:00", "\"59\"", "0 to 23"),
        ("*:59/2", "character 6", "too large"),
        ("5", "character 1", "22:00"),
        ("é 5:00", "character 1", "weekday"),
        ("5:00 ../../etc/passwd", "character 6", "time zone"),
        ("@99999999999999999999", "character 1", "1970"),
        ("@1 UTC", "character 4", "UTC already"),
    ] {
        let message = Calendar::parse(text).unwrap_err().full_message();
        assert!(message.contains(place) && message.contains(allowed), "{text}: {message}");
    }
    assert!(Calendar::parse(&"1,".repeat(400)).unwrap_err().full_message().contains("512 bytes"));
}

#[test]
fn hostile_events_are_bounded_work() {
    let zone = TimeZone::get("Europe/Berlin").unwrap();
    let list = (0..59).map(|n| format!("{n}/1")).collect::<Vec<_>>().join(",");
    let started = std::time::Instant::now();
    for text in [
        "*-02-30 *:*:0/0.000001",
        "2026-03-29 2:*:0/0.000001",
        "Mon 2199-12-31",
        "*-*-* 2:30:59.999999",
        &format!("*-02-31 *:{list}"),
    ] {
        let calendar = Calendar::parse(text).unwrap();
        let mut at: Timestamp = "1970-01-01T00:00:00Z".parse().unwrap();
        for _ in 0..3 {
            match calendar.next_after_in(at, &zone) {
                Some(next) => at = next,
                None => break,
            }
        }
        for edge in [Timestamp::MIN, Timestamp::MAX] {
            calendar.next_after_in(edge, &zone);
        }
    }
    assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
}
