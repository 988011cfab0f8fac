//! Waiting times after failures.

use std::time::Duration;

const FIRST: Duration = Duration::from_secs(60);
const LONGEST: Duration = Duration::from_secs(3600);

/// Time to wait before the next attempt after `failures` in a row: 1, 2, 4 … 60 minutes,
/// plus up to a quarter, so that jobs that failed together do not start together again. `random` is any
/// number; equal ones give equal times.
pub fn back_off(failures: u32, random: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(6);
    let base = (FIRST * (1 << doublings)).min(LONGEST);
    base + base / 4 * (random % 1000) / 1000
}

#[cfg(test)]
mod tests {
    use super::back_off;

    #[test]
    fn waiting_doubles_up_to_an_hour_with_a_quarter_of_jitter() {
        let minutes: Vec<u64> = (0..9).map(|n| back_off(n, 0).as_secs() / 60).collect();
        assert_eq!(minutes, [1, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(back_off(u32::MAX, 999).as_secs(), 4499);
    }
}
