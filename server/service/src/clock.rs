//! The time of day, as the database and the calendar take it.

/// Now, in milliseconds since 1970.
pub(crate) fn now_ms() -> i64 {
    i64::try_from(coldrise_block::now_ms()).unwrap_or(i64::MAX)
}
