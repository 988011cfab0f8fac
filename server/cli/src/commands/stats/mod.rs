//! `coldrise stats`: the repository's contents, savings and reclaimable space.

mod text;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::{MachineStats, Stats};
use coldrise_session::Catalog;
use coldrise_store::{CatalogDamage, MachineName};

use crate::gc_estimate::unknown_space;
use crate::invocation::Invocation;
use crate::report::Report;
use coldrise_hosting::signals::cancel_flag;

/// Show the contents of the repository, its savings, and the space that deletions would free.
///
/// Chunk sizes marked "about" are estimates: the average of the file that contains the chunk.
/// Everything else is counted. The command reads every page of every chunk map, and no chunk.
/// Lost or damaged restore points and sessions are named and not counted; the exit code is then
/// 1.
#[derive(Debug, Args)]
pub(crate) struct StatsArguments {
    /// Show each restore point of this machine.
    #[arg(value_name = "MACHINE")]
    machine: Option<MachineName>,
}

impl StatsArguments {
    /// Whether they ask for the whole repository.
    pub(crate) fn is_of_all(&self) -> bool {
        self.machine.is_none()
    }
}

/// The report of a whole repository.
pub(crate) fn report(stats: &Stats) -> Report {
    let mut answer = Report::answer(stats, text::of_repository(stats));
    answer.exit_code = exit_code(&stats.damaged_documents);
    answer
}

pub(crate) fn run(invocation: &Invocation, arguments: &StatsArguments) -> Result<Report> {
    let repository = invocation.open()?;
    if let Some(machine) = &arguments.machine {
        // An error for an unknown machine names the existing ones.
        Catalog::new(&repository).check_machine(machine)?;
    }
    let Some(machine) = &arguments.machine else {
        let (mut stats, unknown) = Stats::read(&repository, &*cancel_flag()?)?;
        if let Some(why) = unknown {
            invocation.remark(&unknown_space(&why));
        }
        stats.elapsed_ms = invocation.elapsed_ms();
        return Ok(report(&stats));
    };
    let (by_machine, usage) = MachineStats::read_all(&repository)?;
    let mut by_machine = by_machine.into_iter();
    let Some(stats) = by_machine.find(|stats| stats.machine == machine.as_str()) else {
        let text = format!("the last restore point of {machine} was forgotten a moment ago");
        return Err(Error::new(ErrorKind::NotFound, text));
    };
    for damaged in &usage.damaged {
        invocation.remark(&text::damage(damaged));
    }
    let mut answer = Report::answer(&stats, text::of_machine(&stats));
    answer.exit_code = exit_code(&usage.damaged);
    Ok(answer)
}

fn exit_code(damaged: &[CatalogDamage]) -> u8 {
    if damaged.is_empty() { 0 } else { coldrise_runs::exit_code(ErrorKind::Corrupt) }
}
