//! Parses and formats sizes, times and shares.

use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
pub(crate) use coldrise_ingest::parse_size;

/// Parses a duration: a whole number with s, m or h, of at most 30 days.
///
/// # Errors
/// `InvalidInput`; the message says what is allowed.
pub(crate) fn parse_duration(text: &str) -> Result<Duration> {
    let number = |unit| text.strip_suffix(unit).map(str::parse::<u32>);
    let seconds = match (number('s'), number('m'), number('h')) {
        (Some(Ok(seconds)), _, _) => Some(u64::from(seconds)),
        (_, Some(Ok(minutes)), _) => Some(u64::from(minutes) * 60),
        (_, _, Some(Ok(hours))) => Some(u64::from(hours) * 3600),
        _ => None,
    };
    let seconds = seconds.filter(|seconds| (1..=30 * 24 * 3600).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| {
        let shown: String = text.chars().take(40).collect();
        let text = format!("{shown:?} is not a duration: use 90s, 15m or 2h, up to 720h");
        Error::new(ErrorKind::InvalidInput, text)
    })
}

/// The time now, in milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0)
}

/// Formats a size with a binary unit and at most four digits, such as `40.0 GiB`.
pub(crate) fn show_size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be shown as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Formats a duration: `41 ms`, `3.2 s`, `4 min 12 s`, `2 h 5 min`.
pub(crate) fn show_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{} ms", duration.as_millis()),
        1..=59 => format!("{:.1} s", duration.as_secs_f64()),
        60..=3599 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Formats an age in whole units: `5 min`, `36 h`, `400 d`.
pub(crate) fn show_age(seconds: u64) -> String {
    const HOUR: u64 = 3600;
    const DAY: u64 = 24 * HOUR;
    match seconds {
        0..HOUR => format!("{} min", seconds / 60),
        HOUR..172_800 => format!("{} h", seconds / HOUR),
        _ => format!("{} d", seconds / DAY),
    }
}

/// Formats a count: `1 session`, `2 sessions`.
pub(crate) fn show_count(count: u64, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{plural}")
}

/// Formats a time in UTC, to the second.
pub(crate) fn show_moment(unix_ms: u64) -> String {
    let seconds = i64::try_from(unix_ms / 1000).unwrap_or(i64::MAX);
    match jiff::Timestamp::from_second(seconds) {
        Ok(moment) => moment.to_string(),
        Err(_) => "unknown".to_owned(),
    }
}

/// The time, in milliseconds since 1970; 0 before that.
pub(crate) fn now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_units() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4K", 4096),
            ("64k", 65536),
            ("64KiB", 65536),
            ("1M", 1 << 20),
            ("2G", 2 << 30),
            ("1T", 1 << 40),
            ("1.5T", 3 << 39),
            ("0.25G", 256 << 20),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for text in [
            "",
            "K",
            "-1",
            "1.5",
            "1.G",
            ".5G",
            "1.2.3G",
            "64 K",
            "1Q",
            "99999999999T",
            "0x10",
            "\u{666}",
        ] {
            assert_eq!(parse_size(text).unwrap_err().kind(), ErrorKind::InvalidInput, "{text}");
        }
    }

    #[test]
    fn durations_are_read() {
        for (text, seconds) in [("90s", 90), ("15m", 900), ("720h", 2_592_000)] {
            assert_eq!(parse_duration(text).unwrap().as_secs(), seconds, "{text}");
        }
        for text in ["", "s", "0s", "90", "-1s", "721h", "1.5h", "1d", "\u{666}s", "99999999999s"] {
            assert_eq!(parse_duration(text).unwrap_err().kind(), ErrorKind::InvalidInput, "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_with_at_most_four_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (40 << 30, "40.0 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(show_size(bytes), text);
        }
    }

    #[test]
    fn times_are_shown_as_people_say_them() {
        for (ms, text) in
            [(41, "41 ms"), (3_210, "3.2 s"), (252_000, "4 min 12 s"), (7_500_000, "2 h 5 min")]
        {
            assert_eq!(show_duration(Duration::from_millis(ms)), text);
        }
        for (seconds, text) in
            [(59, "0 min"), (3599, "59 min"), (3600, "1 h"), (172_799, "47 h"), (172_800, "2 d")]
        {
            assert_eq!(show_age(seconds), text);
        }
        assert_eq!(show_moment(1_795_168_800_999), "2026-11-20T10:00:00Z");
    }
}
