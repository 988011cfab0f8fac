//! Sizes as people write them.

use coldrise_block::{Error, ErrorKind, Result};

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
