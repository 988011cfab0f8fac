//! Windows of time in which jobs may start.

use std::fmt;
use std::str::FromStr;

use coldrise_block::{Error, Result};
use jiff::civil::{DateTime, Time};

use crate::calendar::{ALL_DAYS, show_weekdays};
use crate::parse::{Word, weekdays, words};

/// A part of the day, on some weekdays: `22:00-06:00 Mon..Fri`, `mon-fri 22:00-06:00`, or whole days: `sat,sun`. A
/// window over midnight belongs to the day on which it begins. Its end is not part of it.
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
        let (times, days) = match words.as_slice() {
            [one] if is_days(one.text) => (None, Some(*one)),
            [times] => (Some(*times), None),
            [days, times] if is_days(days.text) => (Some(*times), Some(*days)),
            [times, days] => (Some(*times), Some(*days)),
            [_, _, more, ..] => return Err(more.refuse("is too much")),
            [] => (None, None),
        };
        // A day from midnight to midnight.
        let (begin, end) = times.map_or(Ok((Time::midnight(), Time::midnight())), clocks)?;
        let days = days.map_or(Ok(ALL_DAYS), weekdays)?;
        Ok(Window { begin, end, weekdays: days })
    }
}

/// Days begin with a letter, times with a digit.
fn is_days(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
}

/// `HH:MM-HH:MM`.
fn clocks(word: Word<'_>) -> Result<(Time, Time)> {
    let times =
        word.text.split_once('-').and_then(|(begin, end)| Some((clock(begin)?, clock(end)?)));
    times.ok_or_else(|| {
        word.refuse("is not a window: write 22:00-06:00, weekdays such as Mon..Fri, or both; midnight is 00:00")
    })
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
        let other: Window = "mon-fri 22:00-6:00".parse().unwrap();
        assert_eq!(other, window);
        let weekend: Window = "sat,sun".parse().unwrap();
        assert_eq!(weekend.to_string().parse::<Window>().unwrap(), weekend);
        for (time, is_inside) in [
            ("2026-11-27T23:59:59", false), // Friday
            ("2026-11-28T00:00:00", true),
            ("2026-11-29T23:59:59", true),
            ("2026-11-30T00:00:00", false),
        ] {
            assert_eq!(weekend.contains(time.parse().unwrap()), is_inside, "{time}");
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
            "Mon Tue",
            "Mon 22:00-06:00 Tue",
            "a:b-c:d Mon",
        ] {
            assert!(text.parse::<Window>().is_err(), "{text}");
        }
    }
}
