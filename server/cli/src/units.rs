//! Sizes, durations, counts and times of day in the output.

pub(crate) use coldrise_block::now_ms;
pub(crate) use coldrise_block::units::*;

/// Formats a time in UTC, to the second.
pub(crate) fn show_moment(unix_ms: u64) -> String {
    let seconds = i64::try_from(unix_ms / 1000).unwrap_or(i64::MAX);
    match jiff::Timestamp::from_second(seconds) {
        Ok(moment) => moment.to_string(),
        Err(_) => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_of_day_are_shown_in_utc() {
        assert_eq!(super::show_moment(1_795_168_800_999), "2026-11-20T10:00:00Z");
    }
}
