//! Windows of time in which jobs may start.

use std::fmt;
use std::str::FromStr;

use coldrise_block::{Error, Result};
use jiff::civil::{DateTime, Time};

use crate::calendar::{show_weekdays, ALL_DAYS};
use crate::parse::{weekdays, words, Word};

/// A part of the day, on some weekdays: `22:00-06:00 Mon..Fri`. A window over midnight belongs to
/// the day on which it begins. Its end is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    begin: Time,
    end: Time,
    /// Bit 0 is Monday.
    weekdays: u8,
}

impl Window {
    /// Whether a local time is inside.
    pub fn contains(&self, local: DateTime) -> bool {
        let is_on = |days_back: i8| {
            let weekday = local.date().weekday().wrapping_sub(days_back);
            self.weekdays & (1 << weekday.to_monday_zero_offset()) != 0
        };
        let time = local.time();
        match self.begin < self.end {
            true => (self.begin..self.end).contains(&time) && is_on(0),
            false => (time >= self.begin && is_on(0)) || (time < self.end && is_on(1)),
        }
    }
}

impl FromStr for Window {
    type Err = Error;

    fn from_str(text: &str) -> Result<Window> {
        let words = words(text)?;
        let first = words[0];
        let times = first.text.split_once('-').map(|(begin, end)| (clock(begin), clock(end)));
        let Some((Some(begin), Some(end))) = times else {
            return Err(first.refuse("is no window: write 22:00-06:00, and then weekdays if any"));
        };
        let days = match words.as_slice() {
            [_] => ALL_DAYS,
            [_, days] => weekdays(*days)?,
            [_, _, more, ..] => return Err(Word::refuse(*more, "is too much")),
            [] => ALL_DAYS,
        };
        Ok(Window { begin, end, weekdays: days })
    }
}

/// `HH:MM`.
fn clock(text: &str) -> Option<Time> {
    let (hour, minute) = text.split_once(':')?;
    let number = |text: &str| {
        let is_short = (1..=2).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        is_short.then(|| text.parse().ok()).flatten()
    };
    Time::new(number(hour)?, number(minute)?, 0, 0).ok()
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.begin.strftime("%H:%M"), self.end.strftime("%H:%M"))?;
        if self.weekdays != ALL_DAYS {
            write!(f, " {}", show_weekdays(self.weekdays))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Window;

    #[test]
    fn a_window_over_midnight_belongs_to_the_day_on_which_it_begins() {
        let window: Window = "22:00-6:00 Mon..Fri".parse().unwrap();
        assert_eq!(window.to_string(), "22:00-06:00 Mon..Fri");
        for (time, is_inside) in [
            ("2026-11-23T21:59:59", false), // Monday
            ("2026-11-23T22:00:00", true),
            ("2026-11-23T05:00:00", false),
            ("2026-11-28T05:59:59", true), // Saturday: Friday's window
            ("2026-11-28T06:00:00", false),
            ("2026-11-28T23:00:00", false),
        ] {
            assert_eq!(window.contains(time.parse().unwrap()), is_inside, "{time}");
        }
        let day: Window = "09:00-17:00".parse().unwrap();
        assert!(day.contains("2026-11-22T09:00:00".parse().unwrap()));
        assert!(!day.contains("2026-11-22T17:00:00".parse().unwrap()));
        for text in [
            "",
            "22:00",
            "22:00-24:00",
            "22:00-6",
            "a:b-c:d",
            "22:00-06:00 Foo",
            "22:00-06:00 Mon Tue",
            "-1:00-5:00",
        ] {
            assert!(text.parse::<Window>().is_err(), "{text}");
        }
    }
}
