//! The boots of one round, side by side.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{PointDocument, Repository};

use super::judge;
use crate::boot_goal::{GoalOptions, print_stage};
use crate::hardware::Hardware;
use crate::invocation::Invocation;
use coldrise_hosting::QemuHost;
use coldrise_hosting::boot_check::Answer;
use coldrise_hosting::boot_check::{BootStage, Trial};
use coldrise_hosting::signals::ChildSignals;

/// Settings that all boots share.
pub(super) struct Boots<'a> {
    pub(super) invocation: &'a Invocation,
    pub(super) repository: &'a Arc<Repository>,
    pub(super) qemu: &'a QemuHost,
    pub(super) machines: &'a [(&'a PointDocument, Hardware)],
    pub(super) goal: &'a GoalOptions,
}

impl Boots<'_> {
    /// Boots the points side by side, and returns when all have ended. A point whose boot ends with
    /// an error is unproven.
    ///
    /// # Errors
    /// `Interrupted`; the first error if no boot of the round had an answer.
    pub(super) fn round(
        &self,
        points: &[usize],
        until: BootStage,
        signals: &mut ChildSignals,
    ) -> Result<Vec<(usize, Answer)>> {
        let ended: Vec<(usize, Result<Answer>)> = std::thread::scope(|scope| {
            let running: Vec<_> = points
                .iter()
                .enumerate()
                .map(|(slot, point)| (*point, scope.spawn(move || self.boot(*point, slot, until))))
                .collect();
            let panicked = || Error::new(ErrorKind::Internal, "a boot panicked");
            let join = |(point, thread): (usize, std::thread::ScopedJoinHandle<'_, _>)| {
                (point, thread.join().unwrap_or_else(|_| Err(panicked())))
            };
            running.into_iter().map(join).collect()
        });
        if signals.was_asked_to_end() {
            let text = "interrupted: the machines were ended; the results of ended boots are kept";
            return Err(Error::new(ErrorKind::Interrupted, text));
        }
        let has_answer = ended.iter().any(|(_, answer)| answer.is_ok());
        let mut answers = Vec::with_capacity(ended.len());
        for (point, answer) in ended {
            let answer = match answer {
                Err(error) if !has_answer => return Err(error),
                Err(error) => {
                    self.tell(point, &format!("no verdict: {}", error.full_message()));
                    Answer::Unproven
                }
                Ok(answer) => answer,
            };
            answers.push((point, answer));
        }
        Ok(answers)
    }

    /// Each boot has a thread of its own, with its own view of the signals.
    fn boot(&self, index: usize, slot: usize, until: BootStage) -> Result<Answer> {
        let Some((point, hardware)) = self.machines.get(index) else {
            return Err(Error::new(ErrorKind::Internal, "no such point"));
        };
        let mut signals = ChildSignals::catch()?;
        let goal = self.goal.goal(point, hardware, self.qemu)?;
        let label = point.point.to_string();
        let trial = Trial {
            caller: self.invocation.caller()?,
            on_stage: &|reached| print_stage(self.invocation, Some(&label), reached),
            repository: self.repository,
            qemu: self.qemu,
            point,
            hardware: *hardware,
            goal,
            slot: Some(slot),
        };
        let (document, _) = trial.run(&mut signals)?;
        let answer = judge(&document, until);
        let reached = document.stages.last().map_or("nothing", |reached| reached.stage.as_str());
        self.tell(
            index,
            &match answer {
                Answer::Good => format!("good: {reached} reached"),
                Answer::Bad => format!("bad: {}", document.failure.as_deref().unwrap_or(reached)),
                Answer::Unproven => format!("not proven: only {reached} reached"),
            },
        );
        Ok(answer)
    }

    fn tell(&self, index: usize, text: &str) {
        if let Some((point, _)) = self.machines.get(index) {
            self.invocation.remark(&format!("{}: {text}", point.point));
        }
    }
}
