//! Tests retention against a model that decides for every point alone, by counting the
//! newer periods with a point.

use std::collections::BTreeSet;

use jiff::Timestamp;
use jiff::civil::date;
use jiff::tz::TimeZone;
use proptest::prelude::*;

use super::*;

fn point(name: &str) -> RetentionPoint {
    let name = PointName::parse(name).unwrap();
    RetentionPoint { name, is_protected: false, is_quarantined: false, sessions: Vec::new() }
}

fn count(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).unwrap()
}

fn keeping(periods: &[(Period, u32)]) -> RetentionRules {
    let periods = periods.iter().map(|(period, number)| (*period, count(*number))).collect();
    RetentionRules { periods, ..RetentionRules::default() }
}

/// The names that stay for any reason except being the newest backup.
fn kept<'a>(rules: &RetentionRules, names: &[&'a str]) -> Vec<&'a str> {
    let points: Vec<_> = names.iter().map(|name| point(name)).collect();
    let reasons = retained(rules, &points, u64::MAX);
    let stays = |reasons: &Vec<KeepReason>| {
        reasons.iter().any(|reason| *reason != KeepReason::NewestBackup)
    };
    names.iter().zip(&reasons).filter(|(_, r)| stays(r)).map(|(name, _)| *name).collect()
}

#[test]
fn weeks_are_those_of_iso_8601_across_the_ends_of_years() {
    // 2026-12-28 to 2027-01-03 is week 53 of 2026; 2029-12-31 is in week 1 of 2030.
    let names = [
        "20261227T235959Z",
        "20261228T000000Z",
        "20261231T235959Z",
        "20270101T000000Z",
        "20270103T235959Z",
        "20270104T000000Z",
        "20291231T120000Z",
        "20300101T120000Z",
    ];
    assert_eq!(
        kept(&keeping(&[(Period::Weekly, 9)]), &names),
        ["20261227T235959Z", "20270103T235959Z", "20270104T000000Z", "20300101T120000Z"]
    );
    let points = [point("20270103T235959Z"), point("20300101T120000Z")];
    let reasons = retained(&keeping(&[(Period::Weekly, 2)]), &points, u64::MAX);
    assert_eq!(reasons[0], [KeepReason::Newest(Period::Weekly, "2026-W53".into())]);
    assert_eq!(reasons[1][0], KeepReason::Newest(Period::Weekly, "2030-W01".into()));
    // The first week of the range began on a Monday before 1970.
    let first = ["19700101T000000Z", "19700104T235959Z", "19700105T000000Z"];
    assert_eq!(
        kept(&keeping(&[(Period::Weekly, 9)]), &first),
        ["19700104T235959Z", "19700105T000000Z"]
    );
}

#[test]
fn years_months_days_and_hours_end_where_the_calendar_says() {
    let names = ["20280228T235959Z", "20280229T000000Z", "20280229T235959Z", "20280301T000000Z"];
    assert_eq!(kept(&keeping(&[(Period::Daily, 9)]), &names), [names[0], names[2], names[3]]);
    assert_eq!(kept(&keeping(&[(Period::Monthly, 9)]), &names), [names[2], names[3]]);
    let names = ["20261231T225959Z", "20261231T235959Z", "20270101T000000Z", "20270101T005959Z"];
    assert_eq!(kept(&keeping(&[(Period::Yearly, 9)]), &names), [names[1], names[3]]);
    assert_eq!(kept(&keeping(&[(Period::Hourly, 9)]), &names), [names[0], names[1], names[3]]);
    // The same month of another year is another month.
    let names = ["20251121T000000Z", "20261121T000000Z"];
    assert_eq!(kept(&keeping(&[(Period::Monthly, 2)]), &names), names);
}

#[test]
fn a_period_without_points_takes_no_place() {
    let names = ["20200101T000000Z", "20260601T000000Z", "20261121T000000Z"];
    assert_eq!(kept(&keeping(&[(Period::Daily, 2)]), &names), [names[1], names[2]]);
    assert_eq!(kept(&keeping(&[(Period::Daily, 3)]), &names), names);
}

#[test]
fn points_of_one_backup_are_ordered_by_their_states() {
    let names = ["20261121T100000Z", "20261121T100000Z+1", "20261121T100000Z+10"];
    assert_eq!(kept(&keeping(&[(Period::Daily, 1)]), &names), [names[2]]);
    let last = RetentionRules { last: Some(count(2)), ..RetentionRules::default() };
    assert_eq!(kept(&last, &names), [names[1], names[2]]);
    // The last one shows an old mark.
    assert_eq!(kept(&last, &[names[2], names[0], names[1]]), [names[0], names[1]]);
}

#[test]
fn spans_count_back_from_the_newest_point() {
    let within = |span: &str| RetentionRules {
        within: Some(RetentionSpan::parse(span).unwrap()),
        ..RetentionRules::default()
    };
    let names = ["20280229T100000Z", "20280229T100001Z", "20280524T100000Z", "20280531T100000Z"];
    // Three months before May 31 is the last day of February; a point of exactly that
    // age is too old.
    assert_eq!(kept(&within("3m"), &names), names[1..]);
    assert_eq!(kept(&within("7d"), &names), names[3..]);
    assert_eq!(kept(&within("1w"), &names), names[3..]);
    assert_eq!(kept(&within("169h"), &names), names[2..]);
    assert_eq!(kept(&within("1y"), &names), names);
    for text in ["4294967295y", "4294967295h", "60y"] {
        assert_eq!(kept(&within(text), &["19700101T000000Z", "20280531T100000Z"]).len(), 2);
    }
    for text in ["", "7", "d", "0d", "-1d", "+1d", "1.5d", "7 d", "7D", "1d2h", "99999999999d", "é"]
    {
        assert_eq!(
            RetentionSpan::parse(text).unwrap_err().kind(),
            coldrise_block::ErrorKind::InvalidInput,
            "{text}"
        );
    }
}

#[test]
fn points_in_the_future_are_kept_and_not_counted() {
    let points = [point("20261119T000000Z"), point("20261120T000000Z"), point("20361120T000000Z")];
    let now = points[1].name.unix_seconds();
    let span = RetentionSpan::parse("36h").unwrap();
    let rules = RetentionRules { within: Some(span), ..RetentionRules::default() };
    let reasons = retained(&rules, &points, now);
    assert_eq!(reasons[0], [KeepReason::Within(span)]);
    assert_eq!(reasons[1], [KeepReason::Within(span), KeepReason::NewestBackup]);
    assert_eq!(reasons[2], [KeepReason::Future]);
    // A future point is the newest if there is no other.
    let reasons = retained(&rules, &points[2..], now);
    assert_eq!(reasons[0], [KeepReason::Future, KeepReason::NewestBackup]);
    // Setting the clock back deletes nothing.
    let last = RetentionRules { last: Some(count(1)), ..RetentionRules::default() };
    assert!(retained(&last, &points, 0).iter().all(|reasons| !reasons.is_empty()));
}

#[test]
fn protected_published_and_the_base_of_increments_stay() {
    let mut points = [
        point("20261101T000000Z"),
        point("20261102T000000Z"),
        point("20261103T000000Z"),
        point("20261104T000000Z"),
        point("20261104T000000Z+1"),
    ];
    points[0].is_protected = true;
    let session = SessionName::parse("trial").unwrap();
    points[1].sessions.push(session.clone());
    let rules = RetentionRules { last: Some(count(1)), ..RetentionRules::default() };
    let reasons = retained(&rules, &points, u64::MAX);
    assert_eq!(reasons[0], [KeepReason::Protected]);
    assert_eq!(reasons[1], [KeepReason::Published(session)]);
    assert!(reasons[2].is_empty());
    assert_eq!(reasons[3], [KeepReason::NewestBackup]);
    assert_eq!(reasons[4], [KeepReason::Last(1)]);
    let none = retained(&RetentionRules::default(), &points, u64::MAX);
    assert!(none.iter().all(|reasons| reasons.contains(&KeepReason::NoRule)));
}

/// The value that two points of one period share.
fn model_period(period: Period, seconds: u64) -> (i32, i32, i32) {
    let moment = Timestamp::from_second(seconds as i64).unwrap().to_zoned(TimeZone::UTC);
    let (year, day) = (i32::from(moment.year()), i32::from(moment.day_of_year()));
    match period {
        Period::Hourly => (year, day, i32::from(moment.hour())),
        Period::Daily => (year, day, 0),
        Period::Weekly => {
            let week = moment.date().iso_week_date();
            (i32::from(week.year()), i32::from(week.week()), 0)
        }
        Period::Monthly => (year, i32::from(moment.month()), 0),
        Period::Yearly => (year, 0, 0),
    }
}

fn model(rules: &RetentionRules, names: &[PointName], now: u64) -> BTreeSet<PointName> {
    let is_counted = |name: &PointName| name.unix_seconds() <= now;
    let counted: Vec<&PointName> = names.iter().filter(|name| is_counted(name)).collect();
    let keeps = |name: &PointName| {
        let newer = counted.iter().filter(|other| **other > name).count();
        let last = rules.last.is_some_and(|count| newer < count.get() as usize);
        let newest = counted.iter().map(|name| name.unix_seconds()).max();
        let within = rules.within.zip(newest).is_some_and(|(span, newest)| {
            span.before(newest).is_none_or(|since| name.unix_seconds() > since)
        });
        let in_period = rules.periods.iter().any(|(period, count)| {
            let mine = model_period(*period, name.unix_seconds());
            let of = |other: &PointName| model_period(*period, other.unix_seconds());
            let is_newest = counted.iter().all(|other| *other <= name || of(other) != mine);
            let newer: BTreeSet<_> =
                counted.iter().map(|other| of(other)).filter(|period| *period > mine).collect();
            is_newest && newer.len() < count.get() as usize
        });
        let backups = || names.iter().filter(|name| !name.is_synthetic());
        let newest = backups().filter(|name| is_counted(name)).max().or_else(|| backups().max());
        let is_base = newest == Some(name);
        is_base || !is_counted(name) || last || within || in_period
    };
    names.iter().filter(|name| keeps(name)).cloned().collect()
}

/// Backups at a steady pace, with gaps, bursts, and jumps of the clock both ways.
fn histories() -> impl Strategy<Value = BTreeSet<PointName>> {
    let starts = prop_oneof![
        Just(date(2026, 12, 20)),
        Just(date(2028, 2, 20)),
        Just(date(2020, 12, 30)),
        Just(date(1970, 1, 3)),
    ];
    let step = prop_oneof![
        6 => Just(86_400i64),
        3 => 0i64..7200,
        3 => 0i64..(3 * 86_400),
        1 => 0i64..(400 * 86_400),
        1 => -(40 * 86_400)..0i64,
    ];
    (starts, prop::collection::vec((step, 0u32..4), 1..40)).prop_map(|(start, steps)| {
        let mut at = start.to_zoned(TimeZone::UTC).unwrap().timestamp().as_second();
        let mut names = BTreeSet::new();
        for (step, synthetic) in steps {
            at = (at + step).max(0);
            let name = PointName::from_time(Timestamp::from_second(at).unwrap()).unwrap();
            // 0 and 1: a backup; otherwise only its sealed point is left.
            match synthetic {
                0 | 1 => names.insert(name),
                number => names.insert(name.synthetic(number).unwrap()),
            };
        }
        names
    })
}

fn rules() -> impl Strategy<Value = RetentionRules> {
    let some = || prop::option::weighted(0.4, (1u32..10).prop_map(count));
    let span = prop::sample::select(vec!["1h", "36h", "7d", "2w", "1m", "3m", "1y"]);
    let within = prop::option::weighted(0.3, span.prop_map(|s| RetentionSpan::parse(s).unwrap()));
    (some(), within, [some(), some(), some(), some(), some()]).prop_map(|(last, within, counts)| {
        let kinds =
            [Period::Hourly, Period::Daily, Period::Weekly, Period::Monthly, Period::Yearly];
        let periods = kinds.into_iter().zip(counts);
        let periods = periods.filter_map(|(kind, count)| count.map(|count| (kind, count)));
        RetentionRules { last, within, periods: periods.collect() }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_history_is_kept_as_the_model_says(
        history in histories(),
        rules in rules(),
        now in prop_oneof![Just(u64::MAX), 1_500_000_000u64..2_000_000_000],
    ) {
        let names: Vec<PointName> = history.into_iter().collect();
        let stays = |names: &[PointName]| -> BTreeSet<PointName> {
            let points: Vec<_> = names.iter().map(|name| point(name.as_str())).collect();
            let reasons = retained(&rules, &points, now);
            let kept = names.iter().zip(reasons).filter(|(_, reasons)| !reasons.is_empty());
            kept.map(|(name, _)| name.clone()).collect()
        };
        let kept = stays(&names);
        if rules.is_empty() {
            prop_assert_eq!(kept.len(), names.len());
            return Ok(());
        }
        prop_assert_eq!(&kept, &model(&rules, &names, now));
        prop_assert!(!kept.is_empty());
        // A second run removes nothing more.
        let left: Vec<PointName> = kept.iter().cloned().collect();
        prop_assert_eq!(stays(&left), kept);
    }
}
