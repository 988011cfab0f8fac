//! Sizes, durations and counts, as people write and read them.

use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};

/// Parses a size: a whole number of bytes, or a number with K, M, G or T of binary
/// kilobytes and so on (`64K` is 65,536 bytes; `64KiB` is accepted too, and `1.5T`).
///
/// # Errors
/// `InvalidInput`; the message says what is allowed.
pub fn parse_size(text: &str) -> Result<u64> {
    let refused = || {
        let shown: String = text.chars().take(40).collect();
        Error::new(
            ErrorKind::InvalidInput,
            format!("{shown:?} is not a size: use a number of bytes, or one with K, M, G or T"),
        )
    };
    let digits = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let (number, unit) = text.split_at(digits);
    let (number, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let shift = match unit.to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return Err(refused()),
    };
    let is_fraction = (1..=6).contains(&fraction.len()) && fraction.parse::<u64>().is_ok();
    // A fraction of a byte is an error.
    if !is_fraction || (shift == 0 && fraction != "0") {
        return Err(refused());
    }
    let unit_bytes = 1_u64 << shift;
    let millionths: u64 = format!("{fraction:0<6}").parse().map_err(|_| refused())?;
    let part = (u128::from(unit_bytes) * u128::from(millionths) / 1_000_000) as u64;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number {
        return Err(refused());
    }
    let whole = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_bytes));
    whole.and_then(|whole| whole.checked_add(part)).ok_or_else(|| {
        let text = format!("{text} is too large: sizes are below 16777216T");
        Error::new(ErrorKind::InvalidInput, text)
    })
}

/// Parses a duration: a whole number with s, m or h, of at most 30 days.
///
/// # Errors
/// `InvalidInput`; the message says what is allowed.
pub fn parse_duration(text: &str) -> Result<Duration> {
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

/// Formats a size with a binary unit and at most four digits, such as `40.0 GiB`.
pub fn show_size(bytes: u64) -> String {
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
pub fn show_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{} ms", duration.as_millis()),
        1..=59 => format!("{:.1} s", duration.as_secs_f64()),
        60..=3599 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Formats an age in whole units: `5 min`, `36 h`, `400 d`.
pub fn show_age(seconds: u64) -> String {
    const HOUR: u64 = 3600;
    const DAY: u64 = 24 * HOUR;
    match seconds {
        0..HOUR => format!("{} min", seconds / 60),
        HOUR..172_800 => format!("{} h", seconds / HOUR),
        _ => format!("{} d", seconds / DAY),
    }
}

/// Formats a count: `1 session`, `2 sessions`.
pub fn show_count(count: u64, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{plural}")
}

/// Whether a character of a machine or file may go to a terminal: it neither commands it nor changes the
/// direction of text, nor ends a line.
pub fn is_printable(c: char) -> bool {
    let turns =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    !c.is_control() && !turns && !matches!(c, '\u{2028}' | '\u{2029}')
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
    fn durations_are_shown_in_two_units_at_most() {
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
    }
}
