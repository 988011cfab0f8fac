//! Counters of the content that was offered to another site.
//!
//! ```text
//! offered ─┬─ unchanged    equal to the base: not read, or only compared
//!          ├─ zeroes
//!          ├─ known        is there already: only its name was sent
//!          └─ content ─┬─ delta          equal to the base's content at the same place
//!                      ├─ compression    what remained was made smaller by this
//!                      └─ packed         sent
//! ```

use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// Counters of a copy over a line, in bytes. Pieces that were offered twice, because a line broke, count twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Traffic {
    /// Equal to the base.
    pub unchanged_bytes: u64,
    /// Holes and zeroes.
    pub zero_bytes: u64,
    /// The other site had it: named only.
    pub known_bytes: u64,
    /// The other site did not have it. Before delta and compression.
    pub content_bytes: u64,
    /// The part of it that is equal to the base's content at the same place.
    pub delta_bytes: u64,
    /// The bytes sent for it, without names and headers.
    pub packed_bytes: u64,
    /// All that was given to the network, with names and the headers of TLS.
    pub sent_bytes: u64,
}

impl Traffic {
    /// All that was offered: of each disk its size.
    pub fn offered_bytes(&self) -> u64 {
        let parts = [self.unchanged_bytes, self.zero_bytes, self.known_bytes, self.content_bytes];
        // The counters may be another site's.
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// The bytes saved by compression, after the delta.
    pub fn compression_bytes(&self) -> u64 {
        self.content_bytes.saturating_sub(self.delta_bytes).saturating_sub(self.packed_bytes)
    }

    fn with(self, other: Traffic, join: fn(u64, u64) -> u64) -> Traffic {
        Traffic {
            unchanged_bytes: join(self.unchanged_bytes, other.unchanged_bytes),
            zero_bytes: join(self.zero_bytes, other.zero_bytes),
            known_bytes: join(self.known_bytes, other.known_bytes),
            content_bytes: join(self.content_bytes, other.content_bytes),
            delta_bytes: join(self.delta_bytes, other.delta_bytes),
            packed_bytes: join(self.packed_bytes, other.packed_bytes),
            sent_bytes: join(self.sent_bytes, other.sent_bytes),
        }
    }
}

impl Add for Traffic {
    type Output = Traffic;

    fn add(self, other: Traffic) -> Traffic {
        self.with(other, u64::saturating_add)
    }
}

impl Sub for Traffic {
    type Output = Traffic;

    fn sub(self, earlier: Traffic) -> Traffic {
        self.with(earlier, u64::saturating_sub)
    }
}

impl std::iter::Sum for Traffic {
    fn sum<I: Iterator<Item = Traffic>>(all: I) -> Traffic {
        all.fold(Traffic::default(), Add::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offered_bytes_are_the_sum_of_their_parts() {
        let one = Traffic {
            unchanged_bytes: 1000,
            zero_bytes: 200,
            known_bytes: 30,
            content_bytes: 100,
            delta_bytes: 60,
            packed_bytes: 10,
            sent_bytes: 20,
        };
        assert_eq!((one.offered_bytes(), one.compression_bytes()), (1330, 30));
        // Random content grows by its headers.
        assert_eq!(Traffic { packed_bytes: 50, ..one }.compression_bytes(), 0);
        let all: Traffic = [one, one].into_iter().sum();
        assert_eq!((all - one, all.offered_bytes()), (one, 2660));
    }
}
