//! The time of day.

use std::time::{SystemTime, UNIX_EPOCH};

/// The time now, in milliseconds since 1970, UTC; 0 if the clock is set before 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
