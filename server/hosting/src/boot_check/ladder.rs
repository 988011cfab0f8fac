//! The rungs that a booting machine climbs.

use std::time::Instant;

pub use coldrise_inventory::BootStage as Rung;

/// A rung, and the proof of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// The rung.
    pub rung: Rung,
    /// Since QEMU's start.
    pub after_ms: u64,
    /// What proves it: the source and its words.
    pub evidence: String,
}

/// The rungs that a machine has reached, from the lowest on, without gaps.
pub(crate) struct Ladder {
    began: Instant,
    reached: Vec<Reached>,
}

impl Ladder {
    /// Nothing is reached yet; the time starts now.
    pub fn new() -> Ladder {
        Ladder { began: Instant::now(), reached: Vec::new() }
    }

    /// Time since the start, in milliseconds.
    pub fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Enters a rung, unless it is reached already. It implies those below it.
    pub fn reach(&mut self, rung: Rung, evidence: impl Into<String>) {
        if self.has(rung) {
            return;
        }
        let after_ms = self.elapsed_ms();
        for lower in Rung::ALL.into_iter().filter(|lower| *lower < rung) {
            if !self.has(lower) {
                let evidence = format!("implied by {}", rung.word());
                self.reached.push(Reached { rung: lower, after_ms, evidence });
            }
        }
        self.reached.push(Reached { rung, after_ms, evidence: evidence.into() });
    }

    pub fn has(&self, rung: Rung) -> bool {
        self.reached.last().is_some_and(|last| last.rung >= rung)
    }

    /// When the rung was reached, in milliseconds since the start.
    pub fn after_ms(&self, rung: Rung) -> Option<u64> {
        self.reached.iter().find(|reached| reached.rung == rung).map(|reached| reached.after_ms)
    }

    /// From the lowest on.
    pub fn reached(&self) -> &[Reached] {
        &self.reached
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rung_implies_those_below_it() {
        let mut ladder = Ladder::new();
        ladder.reach(Rung::Started, "QEMU runs");
        ladder.reach(Rung::Userspace, "DHCP");
        ladder.reach(Rung::Kernel, "too late");
        let words: Vec<_> =
            ladder.reached().iter().map(|r| (r.rung.word(), r.evidence.as_str())).collect();
        let implied = "implied by userspace";
        let expected = [
            ("started", "QEMU runs"),
            ("firmware", implied),
            ("kernel", implied),
            ("userspace", "DHCP"),
        ];
        assert_eq!(words, expected);
        assert!(ladder.has(Rung::Kernel) && !ladder.has(Rung::Login));
    }
}
