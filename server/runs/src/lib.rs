//! Long commands as folders: who runs what, its log, its result.
//!
//! ```text
//! RUNS/20261123T014500Z-4f2a-backup/     mode 0700, files 0600
//!   plan.json     what was asked, by whom, when; without secrets
//!   lock          flock, held while the run lives
//!   control       Unix socket: status, cancel
//!   log, log.1    one JSON object per line; log.1 is the older half, each at most 8 MiB
//!   output, output.1   of a detached run: what its process prints, bounded
//!   result.json   written whole at the end
//!   machine.json, serial, machine/   of a machine that the run has booted ([`MachineFiles`])
//!   files.json, use, machine/port    of a machine that reads file systems ([`FilesRecord`])
//! ```
//!
//! The folder is the truth; nothing else records a run. A run is *running* exactly while its
//! lock is held. With a free lock its result decides: *ok*, *failed* or *cancelled*. Without
//! a readable result it is *lost*: its process was killed, or the host went down.
//!
//! A new run is prepared under the name `.ID.new` and renamed when it is locked and its plan is
//! written. So readers never see half a run. The log is not synced: after a power cut its end
//! may be missing, and so may the result.
//!
//! A service plans runs as `.ID.planned` ([`RunsFolder::plan`]) and starts processes that begin
//! them ([`Starter`]) and outlive it. It sees their changes by [`Watch`].
//!
//! A run never fails because of its folder: [`Run::begin`] and all methods of [`Run`] warn once and continue.
//! Readers trust no content of a folder: sizes are bounded, only regular files are opened,
//! symlinks are not followed.
#![forbid(unsafe_code)]

mod control;
mod documents;
mod exit_code;
mod folder;
mod follow;
mod history;
mod id;
mod log;
mod machine;
mod output;
mod page;
mod planned;
pub mod process_run;
mod redact;
mod run;
mod run_files;
mod starter;
mod watch;
mod written;

#[cfg(test)]
mod planned_tests;
#[cfg(test)]
mod tests;

pub use documents::{Failure, LogLine, MachineRecord, Outcome, Plan, RunRecord, State, Who};
pub use exit_code::{BOOT_FAILED, BOOT_NOT_PROVEN, exit_code};
pub use folder::{RunList, RunsFolder};
pub use follow::Follow;
pub use id::RunId;
pub use machine::files::{FilesPoint, FilesRecord};
pub use machine::{MachineFiles, MachineSocket};
pub use planned::{Planned, Request};
pub use redact::{redact, redact_arguments};
pub use run::Run;
pub use starter::Starter;
pub use watch::Watch;
