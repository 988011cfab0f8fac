//! Limits on guessing: a bucket of attempts per address and per user.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Attempts of a full bucket, and the time in which one attempt comes back.
const CAPACITY: u32 = 10;
const REFILL: Duration = Duration::from_secs(6);
/// Maximum number of buckets. When there are more, full ones go, then all.
const MAX_BUCKETS: usize = 10_000;

/// Buckets by name: `address 192.0.2.1`, `user admin`.
#[derive(Default)]
pub(crate) struct LoginLimits(Mutex<HashMap<String, Bucket>>);

struct Bucket {
    /// Attempts that were taken and have not come back.
    used: u32,
    since: Instant,
}

impl Bucket {
    fn refill(&mut self, now: Instant) {
        let back = now.saturating_duration_since(self.since).as_secs() / REFILL.as_secs();
        self.used = self.used.saturating_sub(u32::try_from(back).unwrap_or(u32::MAX));
        self.since += REFILL * u32::try_from(back).unwrap_or(0);
    }
}

impl LoginLimits {
    /// Takes an attempt from each bucket. Returns `false` if one is empty.
    pub(crate) fn take(&self, names: &[String], now: Instant) -> bool {
        let mut buckets = self.0.lock();
        if buckets.len() >= MAX_BUCKETS {
            buckets.retain(|_, bucket| {
                bucket.refill(now);
                bucket.used > 0
            });
            if buckets.len() >= MAX_BUCKETS {
                buckets.clear();
            }
        }
        let mut is_allowed = true;
        for name in names {
            let bucket = buckets.entry(name.clone()).or_insert(Bucket { used: 0, since: now });
            bucket.refill(now);
            is_allowed &= bucket.used < CAPACITY;
            bucket.used = (bucket.used + 1).min(CAPACITY);
        }
        is_allowed
    }

    /// Gives the attempts back after a success.
    pub(crate) fn give_back(&self, names: &[String]) {
        let mut buckets = self.0.lock();
        for name in names {
            if let Some(bucket) = buckets.get_mut(name) {
                bucket.used = bucket.used.saturating_sub(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CAPACITY, LoginLimits, REFILL};
    use std::time::Instant;

    #[test]
    fn a_bucket_empties_and_refills() {
        let (limits, start) = (LoginLimits::default(), Instant::now());
        let names = ["user admin".to_owned(), "address 192.0.2.1".to_owned()];
        for _ in 0..CAPACITY {
            assert!(limits.take(&names, start));
        }
        assert!(!limits.take(&names, start));
        assert!(!limits.take(&names[1..], start), "the address's bucket is empty, too");
        assert!(limits.take(&["user viewer".to_owned()], start));
        assert!(limits.take(&names, start + REFILL));
        assert!(!limits.take(&names, start + REFILL));
        limits.give_back(&names);
        assert!(limits.take(&names, start + REFILL));
    }
}
