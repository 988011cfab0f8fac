//! One part of a calendar event, such as its months: a list of values, ranges and repetitions.

use std::fmt::Write;

/// Values `start`, `start + step`, … up to `stop`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Item {
    pub(crate) start: u32,
    /// The last value; `None` if a repetition continues to the part's maximum.
    pub(crate) stop: Option<u32>,
    /// 0 for a single value.
    pub(crate) step: u32,
}

impl Item {
    /// The smallest value of this item that is at least `from`, up to `max`.
    fn next(&self, from: u32, max: u32) -> Option<u32> {
        let last = match (self.stop, self.step) {
            (Some(stop), _) => stop.min(max),
            (None, 0) => self.start.min(max),
            (None, _) => max,
        };
        let value = match (from.checked_sub(self.start), self.step) {
            (None | Some(0), _) => self.start,
            (Some(_), 0) => return None,
            (Some(ahead), step) => {
                self.start.checked_add(ahead.div_ceil(step).checked_mul(step)?)?
            }
        };
        (value <= last).then_some(value)
    }
}

/// A list of items; without items every value matches.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Field(pub(crate) Vec<Item>);

impl Field {
    /// A single value.
    pub(crate) fn value(value: u32) -> Field {
        Field(vec![Item { start: value, stop: None, step: 0 }])
    }

    /// The smallest matching value that is at least `from`, up to `max`.
    pub(crate) fn next(&self, from: u32, max: u32) -> Option<u32> {
        if self.0.is_empty() {
            return (from <= max).then_some(from);
        }
        self.0.iter().filter_map(|item| item.next(from, max)).min()
    }

    /// Whether a value matches.
    pub(crate) fn has(&self, value: u32) -> bool {
        self.next(value, value) == Some(value)
    }

    /// Whether a day matches that is counted from the end of a month of `days`: 1 is the
    /// last day. A repetition continues towards the end of the month.
    pub(crate) fn has_from_end(&self, day: u32, days: u32) -> bool {
        let from_end = |value: u32| (days + 1).checked_sub(value);
        self.0.iter().any(|item| {
            let first = from_end(item.stop.unwrap_or(item.start));
            let last = item.stop.map_or(Some(days), |_| from_end(item.start));
            let (Some(first), Some(last)) = (first, last) else { return false };
            Item { start: first, stop: (item.step > 0).then_some(last), step: item.step }
                .next(day, day)
                == Some(day)
        })
    }

    /// The text, with values of at least two digits. `unit` is the number of steps in 1, and
    /// fractions have six digits.
    pub(crate) fn show(&self, unit: u32) -> String {
        if self.0.is_empty() {
            return "*".to_owned();
        }
        let number = |value: u32, width: usize| match value % unit {
            0 => format!("{:0width$}", value / unit),
            fraction => format!("{:0width$}.{fraction:06}", value / unit),
        };
        let mut text = String::new();
        for (i, item) in self.0.iter().enumerate() {
            // Writing into a String cannot fail.
            let _ = write!(text, "{}{}", if i == 0 { "" } else { "," }, number(item.start, 2));
            if let Some(stop) = item.stop {
                let _ = write!(text, "..{}", number(stop, 2));
            }
            // A range names its step only if it is not 1.
            if item.step > 0 && !(item.stop.is_some() && item.step == unit) {
                let _ = write!(text, "/{}", number(item.step, 1));
            }
        }
        text
    }
}
