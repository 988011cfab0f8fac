//! The progress of a fetch, at its receiver.

use coldrise_block::{Error, ErrorKind, Phase, ProgressState, Result};
use coldrise_store::MachineName;

use super::fetch::{FetchReport, Fetched};
use super::messages::{Failure, broken};
use super::{CopyProgress, CopyStep, CopySummary, MachineCopy, Traffic};

/// Maximum length of a disk's label, in bytes: the names of a machine, a point and a disk.
const MAX_LABEL_BYTES: usize = 400;

/// Gathers it. All of it was said by the other side, and is only shown.
pub(super) struct FetchProgress<'a> {
    progress: &'a dyn CopyProgress,
    prefix: &'a str,
    machines: Vec<MachineCopy>,
    /// The number of these machines that are finished.
    done: usize,
    traffic: Traffic,
    ended: Option<Result<()>>,
}

impl<'a> FetchProgress<'a> {
    pub(super) fn new(progress: &'a dyn CopyProgress, prefix: &'a str) -> FetchProgress<'a> {
        let (machines, done, traffic, ended) = Default::default();
        FetchProgress { progress, prefix, machines, done, traffic, ended }
    }

    /// Whether nothing more comes.
    pub(super) fn is_over(&self) -> bool {
        self.ended.is_some()
    }

    /// `added` points were added on this line.
    pub(super) fn hear(&mut self, report: FetchReport, added: usize) -> Result<()> {
        match report {
            FetchReport::Machines(machines) => {
                if !self.machines.is_empty() {
                    return Err(broken("the list of machines was sent twice"));
                }
                for (machine, there) in &machines {
                    self.machines.push(MachineCopy::new(machine.clone(), self.own(there)?));
                }
                self.progress.reached(&CopyStep::Machines(&machines));
            }
            FetchReport::Progress {
                disk,
                is_finishing,
                done_bytes,
                total_bytes,
                read_bytes,
                stored_bytes,
                traffic,
            } => {
                if disk.len() > MAX_LABEL_BYTES || disk.chars().any(char::is_control) {
                    return Err(broken("no name of a disk"));
                }
                self.traffic = traffic;
                let phase = if is_finishing { Phase::Finishing } else { Phase::Storing };
                let disk = disk.as_str();
                self.progress.update(&ProgressState {
                    phase,
                    disk,
                    done_bytes,
                    total_bytes,
                    read_bytes,
                    stored_bytes,
                });
            }
            FetchReport::Point { machine, point, traffic } => {
                let before: usize = self.machines.iter().map(|machine| machine.copied.len()).sum();
                let known = self.machines.iter_mut().find(|known| known.machine == machine);
                let Some(known) = known.filter(|_| before < added) else {
                    return Err(broken("a point was sent that was not announced"));
                };
                self.traffic = traffic;
                self.progress.reached(&CopyStep::Point { machine: &machine, point: &point });
                known.copied.push(point);
            }
            FetchReport::Machine(mut machine) => {
                machine.far_machine = self.own(&machine.far_machine)?;
                self.progress.reached(&CopyStep::Machine(&machine));
                match self.machines.get_mut(self.done) {
                    Some(next) if next.machine == machine.machine => *next = *machine,
                    _ => return Err(broken("a machine was sent out of order")),
                }
                self.done += 1;
            }
        }
        Ok(())
    }

    pub(super) fn end(&mut self, result: std::result::Result<Traffic, Failure>) -> Result<()> {
        self.ended = Some(match result {
            Ok(_) if self.done < self.machines.len() => {
                return Err(broken("it ended before all machines were sent"));
            }
            Ok(traffic) => {
                self.traffic = traffic;
                Ok(())
            }
            Err(failure) => Err(failure.error()),
        });
        Ok(())
    }

    fn own(&self, machine: &MachineName) -> Result<MachineName> {
        format!("{}{machine}", self.prefix).parse()
    }

    /// The result, once the line has ended.
    pub(super) fn result(mut self, received: Result<()>) -> Fetched {
        let traffic = self.traffic;
        let whole = |copied| Fetched { copied, loss: None, traffic };
        let loss = match (self.ended.take(), received) {
            (Some(ended), _) => {
                return whole(ended.map(|()| CopySummary { machines: self.machines }));
            }
            (None, Err(error)) if error.kind() != ErrorKind::Io => return whole(Err(error)),
            (None, Err(error)) => error,
            (None, Ok(())) => {
                let text = "the other site has ended the copy";
                Error::new(ErrorKind::Io, text).advise("run it again to continue")
            }
        };
        let again = || Error::new(loss.kind(), loss.full_message());
        for machine in self.machines.iter_mut().skip(self.done) {
            machine.error = Some(again());
        }
        let copied = match self.machines.is_empty() {
            true => Err(again()),
            false => Ok(CopySummary { machines: self.machines }),
        };
        Fetched { copied, loss: Some(again()), traffic }
    }
}
