//! Calendar events, as systemd.time(7) defines them.

use std::fmt;

use jiff::civil::{Date, DateTime};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{Timestamp, ToSpan};

use crate::field::{Field, Item};

/// The last year of a calendar event, as in systemd.
pub(crate) const MAX_YEAR: u32 = 2199;
pub(crate) const MICROS: u32 = 1_000_000;
pub(crate) const ALL_DAYS: u8 = 0b111_1111;
const DAY_NAMES: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];

/// A calendar event: `Mon..Fri *-*-* 22:00:00 Europe/Berlin`. `Display` gives the normalized
/// text, which parses to the same event.
#[derive(Clone, Debug, PartialEq)]
pub struct Calendar {
    /// Bit 0 is Monday.
    pub(crate) weekdays: u8,
    pub(crate) years: Field,
    pub(crate) months: Field,
    pub(crate) days: Field,
    /// Days count from the end of the month: `~`.
    pub(crate) is_from_end: bool,
    pub(crate) hours: Field,
    pub(crate) minutes: Field,
    /// In microseconds.
    pub(crate) seconds: Field,
    pub(crate) zone: Option<TimeZone>,
}

impl Calendar {
    /// The first time of the event after `after`, exact to the microsecond; `None` if there is none
    /// until the end of 2199. Without a time zone in the event, the system's applies.
    ///
    /// As in systemd, local times that a change to summer time skips do not occur, and local time
    /// never goes back: of an hour that occurs twice, only one is used. So a job at 02:30
    /// does not run on the night of the change in spring, and runs once on the night in autumn.
    pub fn next_after(&self, after: Timestamp) -> Option<Timestamp> {
        self.next_after_in(after, &TimeZone::system())
    }

    /// Like [`Calendar::next_after`], with `default` for events without a time zone.
    pub fn next_after_in(&self, after: Timestamp, default: &TimeZone) -> Option<Timestamp> {
        let zone = self.zone.as_ref().unwrap_or(default);
        let after = Timestamp::from_microsecond(after.as_microsecond()).ok()?;
        let mut from = zone.to_datetime(after).checked_add(1.microsecond()).ok()?;
        loop {
            let local = self.next_local(from)?;
            let ambiguous = zone.to_ambiguous_timestamp(local);
            // One gap lasts a day at most, so this ends.
            from = local.checked_add(1.second()).ok()?.with().subsec_nanosecond(0).build().ok()?;
            if let AmbiguousOffset::Gap { .. } = ambiguous.offset() {
                continue;
            }
            let times = [ambiguous.earlier().ok()?, ambiguous.later().ok()?];
            if let Some(time) = times.into_iter().find(|time| *time > after) {
                return Some(time);
            }
        }
    }

    /// The first local time of the event at or after `from`.
    fn next_local(&self, from: DateTime) -> Option<DateTime> {
        let mut date = from.date();
        let time = from.time();
        let second_us = u32::from(time.second().unsigned_abs()) * MICROS
            + u32::from(time.microsecond().unsigned_abs())
            + u32::from(time.millisecond().unsigned_abs()) * 1000;
        let mut start =
            (time.hour().unsigned_abs().into(), time.minute().unsigned_abs().into(), second_us);
        loop {
            let year = u32::try_from(date.year()).ok()?;
            let next_year = self.years.next(year, MAX_YEAR)?;
            if next_year != year {
                date = Date::new(i16::try_from(next_year).ok()?, 1, 1).ok()?;
                start = (0, 0, 0);
            }
            if !self.months.has(date.month().unsigned_abs().into()) {
                date = date.last_of_month().tomorrow().ok()?;
                start = (0, 0, 0);
                continue;
            }
            if self.is_day(date) {
                if let Some((hour, minute, us)) = self.next_time(start) {
                    let [hour, minute, second] = [hour, minute, us / MICROS].map(|n| n as i8);
                    let nanoseconds = i32::try_from(us % MICROS * 1000).ok()?;
                    return Some(date.at(hour, minute, second, nanoseconds));
                }
            }
            date = date.tomorrow().ok()?;
            start = (0, 0, 0);
        }
    }

    fn is_day(&self, date: Date) -> bool {
        let weekday = date.weekday().to_monday_zero_offset();
        let day = u32::from(date.day().unsigned_abs());
        let is_listed = match self.is_from_end {
            true => self.days.has_from_end(day, date.days_in_month().unsigned_abs().into()),
            false => self.days.has(day),
        };
        is_listed && self.weekdays & (1 << weekday) != 0
    }

    /// The first time of day at or after `from`: hour, minute, microseconds.
    fn next_time(&self, from: (u32, u32, u32)) -> Option<(u32, u32, u32)> {
        let (mut hour, mut minute, mut us) = from;
        loop {
            let next_hour = self.hours.next(hour, 23)?;
            if next_hour != hour {
                (hour, minute, us) = (next_hour, 0, 0);
            }
            while let Some(next_minute) = self.minutes.next(minute, 59) {
                if next_minute != minute {
                    (minute, us) = (next_minute, 0);
                }
                if let Some(us) = self.seconds.next(us, 60 * MICROS - 1) {
                    return Some((hour, minute, us));
                }
                (minute, us) = (minute + 1, 0);
            }
            (hour, minute, us) = (hour + 1, 0, 0);
        }
    }
}

impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.weekdays != ALL_DAYS {
            write!(f, "{} ", show_weekdays(self.weekdays))?;
        }
        let separator = if self.is_from_end { '~' } else { '-' };
        let (years, months, days) = (self.years.show(1), self.months.show(1), self.days.show(1));
        let (hours, minutes) = (self.hours.show(1), self.minutes.show(1));
        write!(f, "{years}-{months}{separator}{days} {hours}:{minutes}:")?;
        match self.seconds == every_second() {
            true => f.write_str("*")?,
            false => f.write_str(&self.seconds.show(MICROS))?,
        }
        match self.zone.as_ref().and_then(TimeZone::iana_name) {
            Some(name) => write!(f, " {name}"),
            None => Ok(()),
        }
    }
}

/// The meaning of `*` for seconds.
pub(crate) fn every_second() -> Field {
    Field(vec![Item { start: 0, stop: None, step: MICROS }])
}

/// Three and more days in a row become a range.
pub(crate) fn show_weekdays(days: u8) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut day = 0;
    while day < 7 {
        let count = (day..7).take_while(|day| days & (1 << day) != 0).count();
        let names = DAY_NAMES.iter().skip(day).take(count);
        match count {
            0..=2 => words.extend(names.map(|name| (*name).to_owned())),
            _ => words.push(format!("{}..{}", DAY_NAMES[day], DAY_NAMES[day + count - 1])),
        }
        day += count + 1;
    }
    words.join(",")
}
