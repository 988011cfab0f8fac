//! The stages of a boot.

use std::time::Instant;

pub use coldrise_inventory::BootStage;

/// A stage, and the proof of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// The stage.
    pub stage: BootStage,
    /// Since QEMU's start.
    pub after_ms: u64,
    /// The proof: the source and its words.
    pub evidence: String,
}

/// The stages that a machine has reached, from the lowest on, without gaps.
pub(crate) struct Stages {
    began: Instant,
    reached: Vec<Reached>,
}

impl Stages {
    /// Nothing is reached yet; the time starts now.
    pub(super) fn new() -> Stages {
        Stages { began: Instant::now(), reached: Vec::new() }
    }

    /// Time since the start, in milliseconds.
    pub(super) fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Enters a stage, unless it is reached already. It implies those below it.
    pub(super) fn reach(&mut self, stage: BootStage, evidence: impl Into<String>) {
        if self.has(stage) {
            return;
        }
        let after_ms = self.elapsed_ms();
        for lower in BootStage::ALL.into_iter().filter(|lower| *lower < stage) {
            if !self.has(lower) {
                let evidence = format!("implied by {}", stage.word());
                self.reached.push(Reached { stage: lower, after_ms, evidence });
            }
        }
        self.reached.push(Reached { stage, after_ms, evidence: evidence.into() });
    }

    pub(super) fn has(&self, stage: BootStage) -> bool {
        self.reached.last().is_some_and(|last| last.stage >= stage)
    }

    /// When the stage was reached, in milliseconds since the start.
    pub(super) fn after_ms(&self, stage: BootStage) -> Option<u64> {
        self.reached.iter().find(|reached| reached.stage == stage).map(|reached| reached.after_ms)
    }

    /// From the lowest on.
    pub(super) fn reached(&self) -> &[Reached] {
        &self.reached
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_implies_those_below_it() {
        let mut stages = Stages::new();
        stages.reach(BootStage::Started, "QEMU runs");
        stages.reach(BootStage::Userspace, "DHCP");
        stages.reach(BootStage::Kernel, "too late");
        let words: Vec<_> =
            stages.reached().iter().map(|r| (r.stage.word(), r.evidence.as_str())).collect();
        let implied = "implied by userspace";
        let expected = [
            ("started", "QEMU runs"),
            ("firmware", implied),
            ("kernel", implied),
            ("userspace", "DHCP"),
        ];
        assert_eq!(words, expected);
        assert!(stages.has(BootStage::Kernel) && !stages.has(BootStage::Login));
    }
}
