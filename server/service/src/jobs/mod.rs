//! Jobs, and the queue that starts all runs of the service.
//!
//! ```text
//!  API ──────────────┐ enqueue
//!  schedule (tick) ──┼────────▶ queue (database) ──choose──▶ plan ─▶ start ─▶ run (process)
//!  ended (retry, ────┘              ▲                                           │
//!         prune, boot check)        └────────── observe ◀── its folder ◀────────┘
//! ```
//!
//! Order of the steps, so that a kill at any moment loses no run and makes none twice:
//!
//! 1. A row with the run's id is committed (`waiting`). A due job gives its rows and moves its next
//!    time in one transaction.
//! 2. The row becomes `starting`; then the run is planned under this id, then started; then the row
//!    becomes `started`. To plan or to start an id twice is harmless.
//! 3. When the run has ended, one transaction removes the row, records the outcome and adds the rows
//!    that follow: a retry, a prune, a boot check.
//!
//! At its start the service looks at each row's run: one that lives is adopted, one that has ended
//! is recorded, and all others go through step 2 again.
//!
//! Runs that follow a machine (`protect_live`) have no occurrence: the tick queues one where none waits or works.
//!
//! Only the thread of the [`Dispatcher`] starts runs and records their ends. All other threads add
//! rows or mark them cancelled.

mod commands;
mod conditions;
mod copy;
mod dispatcher;
mod ended;
mod job;
mod pattern;
mod protect_live;
#[cfg(test)]
mod protect_live_tests;
pub(crate) mod queue;
mod rows;
mod rules;
mod schedule;
mod store;
#[cfg(test)]
mod tests;

pub(crate) use commands::{backup, check_rate, check_source};
pub(crate) use conditions::{Condition, KnownMachine, Severity, conditions};
pub(crate) use dispatcher::Dispatcher;
pub(crate) use ended::copy_failures;
pub(crate) use job::{Job, JobKind};
pub(crate) use pattern::{MachineNames, any_matches};
pub(crate) use protect_live::protect_live;
pub(crate) use queue::{NewRun, Queue};
pub(crate) use rows::{QueueRow, RowState};
pub(crate) use schedule::{Known, due_between, preview};
pub(crate) use store::{Outcome, StoredJob};
