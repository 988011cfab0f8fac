//! The commands, one file each.

pub(crate) mod attach;
pub(crate) mod attest;
pub(crate) mod backup;
mod backup_live;
pub(crate) mod bisect;
pub(crate) mod boot;
pub(crate) mod bucket;
pub(crate) mod check_boot;
pub(crate) mod completion;
pub(crate) mod copies;
pub(crate) mod copy;
pub(crate) mod diff;
mod doctor;
pub(crate) mod files;
pub(crate) mod fold;
pub(crate) mod forget;
pub(crate) mod gc;
pub(crate) mod host;
pub(crate) mod init;
pub(crate) mod key;
pub(crate) mod link;
pub(crate) mod list;
pub(crate) mod man;
pub(crate) mod marks;
pub(crate) mod mount;
pub(crate) mod moves;
mod picture;
pub(crate) mod plan;
pub(crate) mod protect;
pub(crate) mod protect_live;
pub(crate) mod prune;
pub(crate) mod publish;
pub(crate) mod quarantine;
pub(crate) mod recover;
pub(crate) mod repair;
pub(crate) mod restore;
mod restore_ova;
mod restore_parts;
pub(crate) mod rollback;
pub(crate) mod run;
pub(crate) mod runs;
pub(crate) mod seal;
pub(crate) mod serve;
pub(crate) mod sessions;
pub(crate) mod show;
mod skipped_files;
pub(crate) mod stats;
pub(crate) mod unpublish;
pub(crate) mod verify;

use coldrise_block::Result;

use crate::arguments::Command;
use crate::invocation::Invocation;
use crate::report::Report;

/// Runs a command.
///
/// # Errors
/// The errors of the command; the kind determines the exit code.
pub(crate) fn run(invocation: &Invocation, command: Command) -> Result<Report> {
    match command {
        Command::Init(arguments) => init::run(invocation, &arguments),
        Command::Backup(arguments) => backup::run(invocation, arguments),
        Command::Copy(arguments) => copy::run(invocation, arguments),
        Command::Copies(arguments) => copies::run(invocation, &arguments),
        Command::Host(arguments) => host::run(invocation, arguments),
        Command::Link(arguments) => link::run(invocation, arguments),
        Command::Bucket(arguments) => bucket::run(invocation, &arguments),
        Command::List(arguments) => list::run(invocation, &arguments),
        Command::Show(arguments) => show::run(invocation, &arguments),
        Command::Stats(arguments) => stats::run(invocation, &arguments),
        Command::Plan(arguments) => plan::run(invocation, &arguments),
        Command::Diff(arguments) => diff::run(invocation, &arguments),
        Command::Publish(arguments) => publish::run(invocation, arguments),
        Command::Sessions => sessions::run(invocation),
        Command::Marks(arguments) => marks::run(invocation, &arguments),
        Command::Seal(arguments) => seal::run(invocation, &arguments),
        Command::Unpublish(arguments) => unpublish::run(invocation, &arguments),
        Command::Serve(arguments) => serve::run(invocation, arguments),
        Command::Boot(arguments) => boot::run(invocation, arguments),
        Command::CheckBoot(arguments) => check_boot::run(invocation, &arguments),
        Command::Bisect(arguments) => bisect::run(invocation, &arguments),
        Command::Recover(arguments) => recover::run(invocation, arguments),
        Command::Move(arguments) => moves::run(invocation, arguments),
        Command::Files(arguments) => files::run(invocation, &arguments),
        Command::Mount(arguments) => mount::run(invocation, arguments),
        Command::Restore(arguments) => restore::run(invocation, &arguments),
        Command::Attach(arguments) => attach::attach(invocation, &arguments),
        Command::Detach(arguments) => attach::detach(invocation, &arguments),
        Command::Attest(arguments) => attest::run(invocation, arguments),
        Command::Rollback(arguments) => rollback::run(invocation, arguments),
        Command::ProtectLive(arguments) => protect_live::run(invocation, arguments),
        Command::Protect(arguments) => protect::protect(invocation, &arguments),
        Command::Unprotect(arguments) => protect::unprotect(invocation, &arguments),
        Command::Quarantine(arguments) => quarantine::quarantine(invocation, &arguments),
        Command::Release(arguments) => quarantine::release(invocation, &arguments),
        Command::Forget(arguments) => forget::run(invocation, &arguments),
        Command::Prune(arguments) => prune::run(invocation, &arguments),
        Command::Verify(arguments) => verify::run(invocation, &arguments),
        Command::Repair(arguments) => repair::run(invocation, &arguments),
        Command::Fold(arguments) => fold::run(invocation, &arguments),
        Command::Gc(arguments) => gc::run(invocation, &arguments),
        Command::Key(arguments) => key::run(invocation, &arguments),
        // main() has put the planned command in its place.
        Command::Run(_) => Err(run::refuse("run")),
        Command::Runs(arguments) => runs::run(invocation, &arguments),
        Command::Doctor => doctor::run(invocation),
        Command::Completion(arguments) => completion::run(&arguments),
        Command::Man(arguments) => man::run(&arguments),
    }
}
