//! Windows with a clock of the test's own.

use std::sync::atomic::{AtomicUsize, Ordering};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::*;

fn at(megabytes: u64) -> Flow {
    Flow::At(Rate::from_bytes_per_second(megabytes << 20).unwrap())
}

fn windows(texts: &[&str], otherwise: Option<Rate>) -> Result<RateWindows> {
    let windows = texts.iter().map(|text| text.parse()).collect::<Result<_>>()?;
    RateWindows::new(windows, otherwise)
}

fn time(text: &str) -> DateTime {
    text.parse().unwrap()
}

#[test]
fn the_lowest_of_overlapping_limits_applies() {
    let rate = Some(Rate::from_bytes_per_second(20 << 20).unwrap());
    let windows =
        windows(&["mon-fri 08:00-18:00=5M", "12:00-13:00=1M", "sat,sun=off"], rate).unwrap();
    for (local, flow) in [
        ("2026-11-25T07:59:59", at(20)), // Wednesday
        ("2026-11-25T08:00:00", at(5)),
        ("2026-11-25T12:30:00", at(1)),
        ("2026-11-25T18:00:00", at(20)),
        ("2026-11-27T23:59:59", at(20)),
        ("2026-11-28T00:00:00", Flow::Stopped), // Saturday
        ("2026-11-28T12:30:00", Flow::Stopped),
        ("2026-11-30T00:00:00", at(20)),
    ] {
        assert_eq!(windows.flow(time(local)), flow, "{local}");
    }
    assert_eq!(windows.opens(time("2026-11-28T12:30:10")), Some(time("2026-11-30T00:00:00")));
    assert_eq!(windows.opens(time("2026-11-25T12:30:10")), Some(time("2026-11-25T12:30:10")));
    assert_eq!(RateWindows::default().flow(time("2026-11-28T00:00:00")), Flow::Free);
}

#[test]
fn errors_name_the_wrong_part() {
    for (text, part) in [
        ("mon-fri 08:00-18:00", "has no rate"),
        ("mon-fry 08:00-18:00=5M", "\"fry\" is not a weekday"),
        ("mon-fri 08:00-25:00=5M", "\"08:00-25:00\" is not a window"),
        ("mon-fri 08:00-18:00=fast", "\"fast\""),
        ("mon-fri 08:00-18:00=0M", "too slow"),
        ("=5M", "empty"),
        ("mon fri 08:00-18:00=5M", "\"08:00-18:00\" is too much"),
    ] {
        let error = text.parse::<RateWindow>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.full_message().contains(part), "{text}: {}", error.full_message());
    }
    let never = windows(&["mon-fri=off", "sat,sun=off"], None).unwrap_err();
    assert!(never.full_message().contains("mon-fri=off, sat,sun=off"), "{never}");
}

/// What is applied while the clock shows these times, one after the other.
fn followed(windows: &RateWindows, times: &[DateTime]) -> Vec<Flow> {
    let asked = AtomicUsize::new(0);
    let clock = || times[asked.fetch_add(1, Ordering::Relaxed).min(times.len() - 1)];
    let is_over = || asked.load(Ordering::Relaxed) >= times.len();
    let mut applied = Vec::new();
    windows.follow(Flow::Free, &clock, &is_over, |flow| applied.push(flow));
    applied
}

#[test]
fn a_running_copy_follows_the_clock_and_its_jumps() {
    let windows = windows(&["08:00-18:00=5M", "sun=off"], None).unwrap();
    let times = [
        "2026-11-25T07:59:59",
        "2026-11-25T08:00:00",
        "2026-11-25T08:00:01",
        // The clock is set back, and then forward over the window.
        "2026-11-25T07:00:00",
        "2026-11-29T09:00:00",
        "2026-11-30T19:00:00",
    ];
    let times: Vec<_> = times.map(time).to_vec();
    assert_eq!(followed(&windows, &times), [at(5), Flow::Free, Flow::Stopped, Flow::Free]);
}

#[test]
fn local_times_that_come_twice_or_never_count_as_the_clock_shows_them() {
    let berlin = TimeZone::get("Europe/Berlin").unwrap();
    let windows = windows(&["02:00-03:00=off"], None).unwrap();
    let stopped_minutes = |first: &str| {
        let first: Timestamp = first.parse().unwrap();
        let minutes = (0..180).map(|count| first.checked_add((count).minutes()).unwrap());
        let local = minutes.map(|time| berlin.to_datetime(time));
        local.filter(|local| windows.flow(*local) == Flow::Stopped).count()
    };
    // On an ordinary day, when clocks go forward from 2 to 3, and when they go back from 3 to 2.
    assert_eq!(stopped_minutes("2026-11-25T00:00:00Z"), 60);
    assert_eq!(stopped_minutes("2026-03-29T00:00:00Z"), 0);
    assert_eq!(stopped_minutes("2026-10-25T00:00:00Z"), 120);
}
