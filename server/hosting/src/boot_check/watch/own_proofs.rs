//! Proofs that the user prepared: programs on the machine's virtio ports, and a command.

use coldrise_qmp::Event;

use super::super::agent::Agent;
use super::super::command::{Answer, RunningCheck};
use super::super::machine::{AGENT, WORD};
use super::super::stages::BootStage;
use super::{Watch, quoted};

/// Without a login, a machine counts as up this long after its first program, in milliseconds; on
/// slow hosts later.
const LEAST_SETTLE_MS: u64 = 60_000;

impl Watch<'_> {
    /// Only programs of the system open these ports.
    pub(super) fn look_at_port(&mut self, event: &Event, agent: &mut Agent) {
        let is_open = event.fields["open"] == true;
        let port = event.fields["id"].as_str().filter(|port| [AGENT, WORD].contains(port));
        let Some(port) = port.filter(|_| event.name == "VSERPORT_CHANGE") else { return };
        if port == AGENT {
            agent.set_open(is_open);
        }
        if is_open {
            let evidence = format!("a program of the machine opened the port {port}");
            self.stages.reach(BootStage::Userspace, evidence);
        }
    }

    /// The machine's own check writes `ok ...` or `failed TEXT` to its port.
    pub(super) fn look_at_word(&mut self, bytes: &[u8]) {
        let mut lines = Vec::new();
        self.word.feed(bytes, |line| lines.push(line.to_owned()));
        for line in lines {
            let evidence = quoted("the machine's own check", &line);
            match line.split_whitespace().next() {
                Some("ok") => self.stages.reach(BootStage::Service, evidence),
                Some("failed") => self.fail(evidence),
                _ => {}
            }
        }
    }

    /// Starts the user's command when the machine is ready for it, and hears its answer.
    pub(super) fn look_at_own_check(&mut self) {
        let Some(check) = &self.goal.own_check else { return };
        let is_asked = self.note.is_some() || self.stages.has(BootStage::Service);
        if is_asked || self.running_check.is_none() && !self.is_ready() {
            return;
        }
        let answer = match &mut self.running_check {
            Some(running) => running.poll(),
            None => match RunningCheck::start(check) {
                Ok(running) => {
                    self.running_check = Some(running);
                    None
                }
                Err(why) => Some(Answer::Unknown(why)),
            },
        };
        match answer {
            None => {}
            Some(Answer::Passed) => {
                self.stages.reach(BootStage::Service, "the command of --check succeeded")
            }
            Some(Answer::Failed(why)) => self.fail(quoted("the command of --check failed", &why)),
            Some(Answer::Unknown(why)) => {
                self.note = Some(quoted("the command of --check could not run", &why));
            }
        }
    }

    /// Whether the user's command can judge the machine: its port accepts connections, or, without
    /// --check-port, it shows a login or has run programs for some time.
    fn is_ready(&self) -> bool {
        if self.goal.forward.is_some() {
            return self.port_answers;
        }
        let has_settled = self.stages.after_ms(BootStage::Userspace).is_some_and(|after_ms| {
            let settle_ms = LEAST_SETTLE_MS.max(after_ms.saturating_mul(2));
            self.stages.elapsed_ms() >= after_ms.saturating_add(settle_ms)
        });
        self.stages.has(BootStage::Login) || has_settled
    }
}
