//! Which time marks of a session are kept: `1s=10m,10s=1h,1m=1d`.

use std::fmt;
use std::time::Duration;

use coldrise_block::units::parse_duration;
use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Most steps of a rule.
const MAX_STEPS: usize = 8;
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
/// A rule for less space doubles the intervals of old marks this many times before those of the next younger ones.
const HEAD_START: u32 = 6;
/// Most doublings of the shortest interval.
const MOST_DOUBLINGS: u32 = 16;

/// One mark for each interval, up to an age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    interval: Duration,
    age: Duration,
}

/// Which time marks of a session are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MarkRules {
    /// Longer intervals up to higher ages; empty: no marks.
    steps: Vec<Step>,
}

impl Default for MarkRules {
    /// Each second for 10 minutes, each 10 seconds for an hour, each minute for a day.
    fn default() -> Self {
        let step = |interval, age| Step {
            interval: Duration::from_secs(interval),
            age: Duration::from_secs(age),
        };
        MarkRules { steps: vec![step(1, 600), step(10, 3600), step(60, 86_400)] }
    }
}

impl MarkRules {
    /// Parses `INTERVAL=AGE,…` with growing intervals and ages, or `off`.
    ///
    /// # Errors
    /// `InvalidInput`, naming the allowed form.
    pub fn parse(text: &str) -> Result<Self> {
        let refused = |why: &str| {
            let shown: String = text.chars().take(80).collect();
            let message = format!(
                "{shown:?} is not a rule for marks: {why}; use off, or INTERVAL=AGE,… such as {}",
                MarkRules::default()
            );
            Error::new(ErrorKind::InvalidInput, message)
        };
        if text == "off" {
            return Ok(MarkRules::off());
        }
        let mut steps: Vec<Step> = Vec::new();
        for part in text.split(',') {
            let (interval, age) =
                part.split_once('=').ok_or_else(|| refused("each part has one ="))?;
            let step = Step {
                interval: span(interval).ok_or_else(|| refused("an interval is 1s, 5m or 2h"))?,
                age: span(age).ok_or_else(|| refused("an age is 10m, 2h or 3d, at most 366d"))?,
            };
            if step.interval > step.age {
                return Err(refused("an interval is not longer than its age"));
            }
            if let Some(last) = steps.last() {
                if step.interval <= last.interval || step.age <= last.age {
                    return Err(refused("intervals and ages grow from part to part"));
                }
            }
            steps.push(step);
        }
        if steps.len() > MAX_STEPS {
            return Err(refused("it has at most 8 parts"));
        }
        Ok(MarkRules { steps })
    }

    /// Makes no marks.
    pub fn off() -> MarkRules {
        MarkRules { steps: Vec::new() }
    }

    /// True if no marks are made.
    pub fn is_off(&self) -> bool {
        self.steps.is_empty()
    }

    /// The shortest interval; `None` if no marks are made.
    pub fn interval(&self) -> Option<Duration> {
        self.steps.first().map(|step| step.interval)
    }

    /// The age at which a mark ends.
    pub fn longest(&self) -> Duration {
        self.steps.last().map_or(Duration::ZERO, |step| step.age)
    }

    /// The rule for less space. Each level doubles the intervals of the oldest marks; those of younger ones follow some levels
    /// later, so that what was written last stays fine for longest. A part whose intervals are longer than its age is left
    /// out, unless it is the first one.
    pub fn reduced(&self, level: u32) -> MarkRules {
        let Some(first) = self.steps.first() else { return MarkRules::off() };
        let mut steps = vec![Step {
            interval: doubled(first.interval, self.doublings(level)).min(first.age),
            ..*first
        }];
        for (number, step) in self.steps.iter().enumerate().skip(1) {
            let behind = HEAD_START * (self.steps.len() - 1 - number) as u32;
            let interval = doubled(step.interval, level.saturating_sub(behind));
            if interval <= step.age {
                steps.push(Step { interval, ..*step });
            }
        }
        MarkRules { steps }
    }

    /// How many times the shortest interval is doubled at this level.
    pub fn doublings(&self, level: u32) -> u32 {
        level.saturating_sub(self.head_start())
    }

    /// The highest level.
    pub fn most_reduced(&self) -> u32 {
        self.head_start() + MOST_DOUBLINGS
    }

    fn head_start(&self) -> u32 {
        HEAD_START * self.steps.len().saturating_sub(1) as u32
    }

    /// For each mark, the oldest first, whether it is kept at `now_ns`. Of several marks in one
    /// interval the first stays, so later calls keep a part of what an earlier one kept. The newest
    /// mark stays.
    pub fn kept(&self, times_ns: &[u64], now_ns: u64) -> Vec<bool> {
        let mut last_kept = None;
        let keeps = |(i, &time_ns): (usize, &u64)| {
            let age_ns = u128::from(now_ns.saturating_sub(time_ns));
            let is_newest = i + 1 == times_ns.len();
            let step = self.steps.iter().find(|step| age_ns <= step.age.as_nanos());
            let Some(step) = step else { return is_newest && !self.is_off() };
            let interval_ns = step.interval.as_nanos();
            let window = |time_ns: u64| u128::from(time_ns) / interval_ns;
            let is_kept = is_newest || last_kept.is_none_or(|last| window(last) != window(time_ns));
            if is_kept {
                last_kept = Some(time_ns);
            }
            is_kept
        };
        times_ns.iter().enumerate().map(keeps).collect()
    }
}

fn doubled(interval: Duration, times: u32) -> Duration {
    interval.saturating_mul(1_u32.checked_shl(times).unwrap_or(u32::MAX))
}

fn span(text: &str) -> Option<Duration> {
    // Longer than other options: a rule for less space has intervals of months.
    let whole = [('s', 1), ('m', 60), ('h', 3600), ('d', 24 * 3600)].into_iter();
    let mut whole = whole.filter_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)));
    let span =
        match whole.find_map(|(number, seconds)| Some((number.parse::<u32>().ok()?, seconds))) {
            Some((number, seconds)) => Duration::from_secs(u64::from(number) * seconds),
            None => parse_duration(text).ok()?,
        };
    (span > Duration::ZERO && span <= LONGEST).then_some(span)
}

impl fmt::Display for MarkRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_off() {
            return f.write_str("off");
        }
        for (i, step) in self.steps.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{}={}", Shown(step.interval), Shown(step.age))?;
        }
        Ok(())
    }
}

struct Shown(Duration);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            seconds if seconds % 86_400 == 0 => write!(f, "{}d", seconds / 86_400),
            seconds if seconds % 3600 == 0 => write!(f, "{}h", seconds / 3600),
            seconds if seconds % 60 == 0 => write!(f, "{}m", seconds / 60),
            seconds => write!(f, "{seconds}s"),
        }
    }
}

impl std::str::FromStr for MarkRules {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        MarkRules::parse(text)
    }
}

impl TryFrom<String> for MarkRules {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        MarkRules::parse(&text)
    }
}

impl From<MarkRules> for String {
    fn from(rules: MarkRules) -> String {
        rules.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_shown_as_they_are_written() {
        assert_eq!(MarkRules::default().to_string(), "1s=10m,10s=1h,1m=1d");
        for text in ["off", "1s=10m,10s=1h,1m=1d", "5s=1h", "90s=366d"] {
            assert_eq!(MarkRules::parse(text).unwrap().to_string(), text);
        }
        for refused in
            ["", "1s", "1s=", "=1h", "10m=1s", "0s=1h", "1s=1h,1s=2h", "1s=2h,10s=1h", "1s=367d"]
        {
            let error = MarkRules::parse(refused).unwrap_err();
            assert!(error.to_string().contains("1s=10m,10s=1h,1m=1d"), "{refused}: {error}");
        }
    }

    /// Applies the rule each second for a time.
    fn after(rules: &MarkRules, seconds: u64) -> Vec<u64> {
        let mut marks = Vec::new();
        for second in 1..=seconds {
            marks.push(second * 1_000_000_000);
            let kept = rules.kept(&marks, second * 1_000_000_000);
            let mut kept = kept.into_iter();
            marks.retain(|_| kept.next().unwrap());
        }
        marks.iter().map(|mark| mark / 1_000_000_000).collect()
    }

    #[test]
    fn marks_become_fewer_with_their_age_and_end() {
        let rules = MarkRules::parse("1s=10s,5s=30s,20s=100s").unwrap();
        let marks = after(&rules, 1000);
        let aged = |from, to| marks.iter().filter(move |m| (from..=to).contains(&(1000 - **m)));
        assert_eq!(aged(0, 10).count(), 11);
        assert_eq!(aged(11, 30).copied().collect::<Vec<_>>(), [970, 975, 980, 985]);
        assert_eq!(aged(31, 100).copied().collect::<Vec<_>>(), [900, 920, 940, 960]);
        assert_eq!(marks.len(), 11 + 4 + 4);
    }

    #[test]
    fn with_less_space_old_marks_become_fewer_first() {
        let rules = MarkRules::default();
        let reduced = |level| rules.reduced(level).to_string();
        assert_eq!(reduced(0), "1s=10m,10s=1h,1m=1d");
        assert_eq!(reduced(1), "1s=10m,10s=1h,2m=1d");
        assert_eq!(reduced(7), "1s=10m,20s=1h,128m=1d");
        // Two days is more than a day.
        assert_eq!(reduced(11), "1s=10m,320s=1h");
        assert_eq!(reduced(13), "2s=10m,1280s=1h");
        assert_eq!(reduced(rules.most_reduced()), "10m=10m");
        assert_eq!(MarkRules::parse("1s=366d").unwrap().reduced(16).to_string(), "65536s=366d");
        assert!(MarkRules::off().reduced(5).is_off());
        let long = MarkRules::parse("1s=10m,10s=1h,1m=90d").unwrap();
        for level in 0..60 {
            for text in [reduced(level), long.reduced(level).to_string()] {
                assert_eq!(MarkRules::parse(&text).unwrap().to_string(), text);
            }
        }
        // Marks of an hour: all seconds of the last ten minutes, some before.
        let marks = after(&rules.reduced(11), 4000);
        assert_eq!(marks.iter().filter(|mark| **mark >= 3400).count(), 601);
        assert!((8..=10).contains(&(marks.len() - 601)), "{}", marks.len());
    }

    #[test]
    fn the_newest_mark_stays_whatever_its_age() {
        let rules = MarkRules::parse("1s=10s").unwrap();
        assert_eq!(rules.kept(&[1, 2], u64::MAX), [false, true]);
        assert_eq!(MarkRules::parse("off").unwrap().kept(&[1, 2], 3), [false, false]);
    }
}
