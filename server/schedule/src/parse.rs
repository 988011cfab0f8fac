//! Parser of calendar events.

use std::str::FromStr;

use coldrise_block::{Error, ErrorKind, Result};
use jiff::tz::TimeZone;

use crate::calendar::{ALL_DAYS, Calendar, MAX_YEAR, every_second};
use crate::field::{Field, Item};

/// Maximum length of an expression, in bytes.
pub(crate) const MAX_BYTES: usize = 512;
const MICROS: u32 = 1_000_000;

/// Words and what they stand for.
const SHORTHANDS: [(&str, &str); 11] = [
    ("minutely", "*-*-* *:*:00"),
    ("hourly", "*-*-* *:00:00"),
    ("daily", "*-*-* 00:00:00"),
    ("weekly", "Mon *-*-* 00:00:00"),
    ("monthly", "*-*-01 00:00:00"),
    ("quarterly", "*-01,04,07,10-01 00:00:00"),
    ("semiannually", "*-01,07-01 00:00:00"),
    ("semi-annually", "*-01,07-01 00:00:00"),
    ("biannually", "*-01,07-01 00:00:00"),
    ("yearly", "*-01-01 00:00:00"),
    ("annually", "*-01-01 00:00:00"),
];

const DAYS: [&str; 7] =
    ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"];

/// A word of the expression and where it starts.
#[derive(Clone, Copy)]
pub(crate) struct Word<'a> {
    pub(crate) text: &'a str,
    whole: &'a str,
    at: usize,
}

impl<'a> Word<'a> {
    fn part(self, from: usize, to: usize) -> Word<'a> {
        Word { text: self.text.get(from..to).unwrap_or_default(), at: self.at + from, ..self }
    }

    /// The parts between separators.
    fn split(self, separator: &'a str) -> Vec<Word<'a>> {
        let mut at = self.at;
        let parts = self.text.split(separator).map(|text| {
            let word = Word { text, at, ..self };
            at += text.len() + separator.len();
            word
        });
        parts.collect()
    }

    pub(crate) fn refuse(self, what: &str) -> Error {
        let before = self.whole.get(..self.at).unwrap_or_default().chars().count();
        let shown: String = self.text.chars().take(40).collect();
        Error::new(
            ErrorKind::InvalidInput,
            format!("{:?} at character {}: {shown:?} {what}", self.whole, before + 1),
        )
    }
}

/// The words of an expression.
///
/// # Errors
/// `InvalidInput` if it is too long or empty.
pub(crate) fn words(text: &str) -> Result<Vec<Word<'_>>> {
    if text.len() > MAX_BYTES {
        let what = format!("a time expression has at most {MAX_BYTES} bytes, not {}", text.len());
        return Err(Error::new(ErrorKind::InvalidInput, what));
    }
    let mut found = Vec::new();
    let mut at = 0;
    for piece in text.split(|c: char| c.is_ascii_whitespace()) {
        if !piece.is_empty() {
            found.push(Word { text: piece, whole: text, at });
        }
        at += piece.len() + 1;
    }
    if found.is_empty() {
        let what = "an empty time expression: write for example daily, or Mon..Fri 22:00";
        return Err(Error::new(ErrorKind::InvalidInput, what));
    }
    Ok(found)
}

impl Calendar {
    /// Parses a calendar event: weekdays, date, time and time zone, all optional, or a word such
    /// as `daily`.
    ///
    /// # Errors
    /// `InvalidInput`; the message says where and what is allowed.
    pub fn parse(text: &str) -> Result<Calendar> {
        calendar(text)
    }
}

impl FromStr for Calendar {
    type Err = Error;

    fn from_str(text: &str) -> Result<Calendar> {
        Calendar::parse(text)
    }
}

fn calendar(text: &str) -> Result<Calendar> {
    let words = words(text)?;
    let first = words[0];
    let shorthand = SHORTHANDS.iter().find(|(name, _)| name.eq_ignore_ascii_case(first.text));
    let mut event = match shorthand {
        Some((_, meaning)) => calendar(meaning)?,
        None if first.text.starts_with('@') => since_1970(first)?,
        None => Calendar {
            weekdays: ALL_DAYS,
            years: Field::default(),
            months: Field::default(),
            days: Field::default(),
            is_from_end: false,
            hours: Field::value(0),
            minutes: Field::value(0),
            seconds: Field::value(0),
            zone: None,
        },
    };
    let is_whole = shorthand.is_some() || first.text.starts_with('@');
    let mut rest = words.as_slice();
    if is_whole {
        rest = &rest[1..];
    } else {
        // Each kind of word is optional, in this order.
        if let Some(word) = take(&mut rest, is_name) {
            event.weekdays = weekdays(word)?;
        }
        if let Some(word) = take(&mut rest, |text| text.contains(['-', '~']) && !is_name(text)) {
            date(&mut event, word)?;
        }
        if let Some(word) = take(&mut rest, |text| text.contains(':')) {
            time(&mut event, word)?;
        }
        if rest.len() == words.len() {
            return Err(first.refuse("is not a weekday, date (*-*-01) or time (22:00)"));
        }
    }
    if let Some((word, others)) = rest.split_first() {
        if event.zone.is_some() {
            return Err(word.refuse("follows a time that is in UTC already"));
        }
        event.zone = Some(zone(*word)?);
        if let Some(word) = others.first() {
            return Err(word.refuse("is too much: allowed are weekdays, date, time, time zone"));
        }
    }
    Ok(event)
}

/// The next word, if it is of that kind.
fn take<'a>(rest: &mut &[Word<'a>], is_kind: impl Fn(&str) -> bool) -> Option<Word<'a>> {
    let (word, others) = rest.split_first().filter(|(word, _)| is_kind(word.text))?;
    *rest = others;
    Some(*word)
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
}

fn zone(word: Word<'_>) -> Result<TimeZone> {
    if word.text.eq_ignore_ascii_case("UTC") {
        return Ok(TimeZone::UTC);
    }
    let found = if is_name(word.text) { TimeZone::get(word.text).ok() } else { None };
    found.ok_or_else(|| word.refuse("is not a time zone, such as UTC or Europe/Berlin"))
}

/// `@` and seconds since 1970.
fn since_1970(word: Word<'_>) -> Result<Calendar> {
    let refused = || word.refuse("is not @ with whole seconds since 1970, until 2199");
    let digits = word.part(1, word.text.len()).text;
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let time = digits.parse().ok().filter(|_| is_number);
    let time = time.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    let time = TimeZone::UTC.to_datetime(time.ok_or_else(refused)?);
    if i64::from(time.year()) > i64::from(MAX_YEAR) {
        return Err(refused());
    }
    let mut event = calendar(&time.strftime("%Y-%m-%d %H:%M:%S").to_string())?;
    event.zone = Some(TimeZone::UTC);
    Ok(event)
}

/// `Mon`, `mon..fri,Sunday`; as bits, of which bit 0 is Monday.
pub(crate) fn weekdays(word: Word<'_>) -> Result<u8> {
    let day = |word: Word<'_>| {
        let name = word.text.to_ascii_lowercase();
        let is_day = |day: &str| *day == name || day[..3] == name;
        DAYS.iter().position(|day| is_day(day)).ok_or_else(|| {
            word.refuse("is not a weekday: write Mon to Sun, lists (Mon,Fri) and ranges (Mon..Fri)")
        })
    };
    let mut bits = 0;
    let end = word.text.strip_suffix(',').unwrap_or(word.text).len();
    for part in word.part(0, end).split(",") {
        let separator = if part.text.contains("..") { ".." } else { "-" };
        let ends = part.split(separator);
        let (first, last) = match ends.as_slice() {
            [one] => (day(*one)?, day(*one)?),
            [first, last] => (day(*first)?, day(*last)?),
            _ => return Err(part.refuse("is not a range of weekdays, such as Mon..Fri")),
        };
        if first > last {
            return Err(part.refuse("ends before it begins: weeks go from Mon to Sun"));
        }
        bits |= (first..=last).map(|day| 1 << day).sum::<u8>();
    }
    Ok(bits)
}

/// `2026-11-23`, `*-*-01`, `11-23`, `*-02~1`.
fn date(event: &mut Calendar, word: Word<'_>) -> Result<()> {
    let refused = || {
        word.refuse(
            "is not a date: write YEAR-MONTH-DAY, MONTH-DAY, or ~ before a day from the end",
        )
    };
    let tilde = word.text.find('~');
    let (front, back) = match tilde {
        Some(at) => (word.part(0, at), Some(word.part(at + 1, word.text.len()))),
        None => (word, None),
    };
    let mut parts = front.split("-");
    parts.extend(back);
    let day = parts.pop().ok_or_else(refused)?;
    let month = parts.pop().ok_or_else(refused)?;
    if let Some(year) = parts.pop() {
        event.years = field(year, &Part { name: "year", min: 1970, max: MAX_YEAR, unit: 1 })?;
    }
    if !parts.is_empty() {
        return Err(refused());
    }
    event.is_from_end = tilde.is_some() && day.text != "*";
    // From the end, as in systemd: a day that every month has.
    let max = if event.is_from_end { 28 } else { 31 };
    event.months = field(month, &Part { name: "month", min: 1, max: 12, unit: 1 })?;
    let name = if event.is_from_end { "day from the end" } else { "day" };
    event.days = field(day, &Part { name, min: 1, max, unit: 1 })?;
    Ok(())
}

/// `22:00`, `*:0/15`, `22:00:30.5`.
fn time(event: &mut Calendar, word: Word<'_>) -> Result<()> {
    let parts = word.split(":");
    let (hour, minute, second) = match parts.as_slice() {
        [hour, minute] => (hour, minute, None),
        [hour, minute, second] => (hour, minute, Some(second)),
        _ => return Err(word.refuse("is not a time: write HOUR:MINUTE or HOUR:MINUTE:SECOND")),
    };
    event.hours = field(*hour, &Part { name: "hour", min: 0, max: 23, unit: 1 })?;
    event.minutes = field(*minute, &Part { name: "minute", min: 0, max: 59, unit: 1 })?;
    if let Some(second) = second {
        let part = Part { name: "second", min: 0, max: 60 * MICROS - 1, unit: MICROS };
        event.seconds = field(*second, &part)?;
        if event.seconds.0.is_empty() {
            // Every second, not every microsecond.
            event.seconds = every_second();
        }
    }
    Ok(())
}

/// The syntax of a part of an event.
struct Part {
    name: &'static str,
    min: u32,
    max: u32,
    /// Steps in 1: a million for seconds.
    unit: u32,
}

impl Part {
    fn refuse(&self, word: Word<'_>) -> Error {
        let (min, max) = (self.min / self.unit, self.max / self.unit);
        word.refuse(&format!(
            "is not a {}: write {min} to {max}, lists (1,5), ranges (1..5), steps (0/15, 1..9/2), or *",
            self.name
        ))
    }

    fn number(&self, word: Word<'_>) -> Result<u32> {
        let refused = || self.refuse(word);
        let (whole, fraction) = match word.text.split_once('.') {
            Some((whole, fraction)) if self.unit > 1 => (whole, Some(fraction)),
            _ => (word.text, None),
        };
        let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !is_digits(whole) || fraction.is_some_and(|fraction| !is_digits(fraction)) {
            return Err(refused());
        }
        let mut value = whole.parse::<u32>().ok().and_then(|value| value.checked_mul(self.unit));
        if let Some(fraction) = fraction {
            // Rounded to microseconds.
            let seven: String = fraction.chars().chain("0000000".chars()).take(7).collect();
            let millionths = seven.parse::<u32>().map_err(|_| refused())?.saturating_add(5) / 10;
            value = value.and_then(|value| value.checked_add(millionths));
        }
        value.ok_or_else(refused)
    }

    /// A number that is a value, not a step. It may be too large or too small.
    fn value(&self, word: Word<'_>) -> Result<u32> {
        Ok(match (self.name, self.number(word)?) {
            ("year", value @ 0..70) => value + 2000,
            ("year", value @ 70..100) => value + 1900,
            (_, value) => value,
        })
    }

    fn check(&self, value: u32, word: Word<'_>) -> Result<()> {
        let is_within = (self.min..=self.max).contains(&value);
        is_within.then_some(()).ok_or_else(|| self.refuse(word))
    }
}

fn field(word: Word<'_>, part: &Part) -> Result<Field> {
    if word.text == "*" {
        return Ok(Field::default());
    }
    let mut items = Vec::new();
    for listed in word.split(",") {
        items.push(item(listed, part)?);
    }
    items.sort();
    items.dedup();
    Ok(Field(items))
}

fn item(word: Word<'_>, part: &Part) -> Result<Item> {
    let slash = word.text.find('/');
    let range = word.part(0, slash.unwrap_or(word.text.len()));
    let (first, last) = match range.text.find("..") {
        Some(at) => (range.part(0, at), Some(range.part(at + 2, range.text.len()))),
        None => (range, None),
    };
    let start = part.value(first)?;
    part.check(start, first)?;
    let mut stop = last.map(|last| part.value(last)).transpose()?;
    if stop.is_some_and(|stop| stop < start) {
        return Err(range.refuse("ends before it begins"));
    }
    if part.unit > 1 && slash.is_none() && stop.is_some_and(|stop| stop - start < part.unit) {
        return Err(range.refuse("is shorter than a second: leave out the second value"));
    }
    let mut step = if stop.is_some() { part.unit } else { 0 };
    if let Some(at) = slash {
        let word = word.part(at + 1, word.text.len());
        step = part.number(word)?;
        if step == 0 {
            return Err(word.refuse("is not a step: write 1 or more"));
        }
        let is_from_end = part.name == "day from the end";
        let room = if is_from_end { start - part.min } else { part.max - start };
        if stop.is_none() && step > room {
            return Err(word.refuse("is too large a step: the second value does not exist"));
        }
    }
    // The last value that is reached.
    if let Some(last) = stop {
        let reached = start + (last - start) / step * step;
        part.check(reached, range)?;
        stop = (reached > start).then_some(reached);
        if stop.is_none() {
            step = 0;
        }
    }
    Ok(Item { start, stop, step })
}
