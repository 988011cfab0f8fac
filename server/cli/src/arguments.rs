//! The command line. The comments here are also the help and the man pages.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::commands;

const EXIT_CODES: &str = "\
Addresses:
  MACHINE/POINT[/DISK]  a restore point; POINT is 20261120T100000Z, latest or latest~1
                        (latest skips points in quarantine or from a wrong clock)
  live/SESSION[/DISK]   a published session

Exit codes:
  0 done   1 failed   2 wrong usage   3 incomplete: run it again   10 no repository
  11 busy   12 wrong passphrase   13 the machine failed to boot   14 boot not proven
  130 interrupted";

/// Back up virtual machines and boot them instantly.
///
/// Coldrise keeps restore points of virtual machines in one repository. It serves any of them
/// as a writable disk, at once and without conversion. It captures the machine's writes
/// separately; the restore point never changes.
#[derive(Debug, Parser)]
#[command(
    name = "coldrise",
    bin_name = "coldrise",
    version,
    max_term_width = 100,
    after_help = EXIT_CODES,
    propagate_version = true
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: GlobalOptions,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, Default, PartialEq, Args)]
pub(crate) struct GlobalOptions {
    /// The repository's directory; without it, COLDRISE_REPO from the environment.
    #[arg(long, global = true, value_name = "DIR", help_heading = "Global options")]
    pub(crate) repo: Option<PathBuf>,

    /// Read the passphrase from FILE; a trailing newline is ignored.
    ///
    /// Without this option and --passphrase-command, COLDRISE_PASSPHRASE_FILE or
    /// COLDRISE_PASSPHRASE_COMMAND from the environment applies; else, in a unit of systemd, its
    /// credential `coldrise_passphrase`.
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    pub(crate) passphrase_file: Option<PathBuf>,

    /// Run this shell command and read the passphrase from its output.
    #[arg(long, global = true, value_name = "COMMAND", help_heading = "Global options")]
    #[arg(conflicts_with = "passphrase_file")]
    pub(crate) passphrase_command: Option<String>,

    /// Run the command on the service at URL (https://HOST:PORT) instead of on this host.
    ///
    /// For lists, show, and commands that the service runs for others; see docs/service.md. Without
    /// this option, COLDRISE_SERVER from the environment applies.
    #[arg(long, global = true, value_name = "URL", help_heading = "Global options")]
    #[arg(conflicts_with_all = ["repo", "passphrase_file", "passphrase_command"])]
    pub(crate) server: Option<String>,

    /// Read the token for --server from FILE; without it, COLDRISE_TOKEN_FILE.
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    pub(crate) token_file: Option<PathBuf>,

    /// Trust this certificate of the service (PEM) instead of the system's authorities; without it,
    /// COLDRISE_SERVER_CERTIFICATE.
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    pub(crate) server_certificate: Option<PathBuf>,

    /// Print one JSON object as the last line of stdout.
    ///
    /// Long commands also print lines with "event":"progress". An error is the object
    /// {"error":{"kind":…,"message":…}}; the message is also printed on stderr.
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,

    /// Print only results and errors.
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,

    /// Print details on stderr.
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    #[arg(help_heading = "Global options")]
    pub(crate) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Init(commands::init::InitArguments),
    Backup(commands::backup::BackupArguments),
    Copy(commands::copy::CopyArguments),
    Copies(commands::copies::CopiesArguments),
    Host(commands::host::HostArguments),
    Link(commands::link::LinkArguments),
    Bucket(commands::bucket::BucketArguments),
    List(commands::list::ListArguments),
    Show(commands::show::ShowArguments),
    Stats(commands::stats::StatsArguments),
    Plan(commands::plan::PlanArguments),
    Diff(commands::diff::DiffArguments),
    Publish(commands::publish::PublishArguments),
    /// List the published sessions.
    Sessions,
    Marks(commands::marks::MarksArguments),
    Seal(commands::seal::SealArguments),
    Unpublish(commands::unpublish::UnpublishArguments),
    Serve(commands::serve::ServeArguments),
    Recover(commands::recover::RecoverArguments),
    #[command(name = "move")]
    Move(commands::moves::MoveArguments),
    Mount(commands::mount::MountArguments),
    Boot(commands::boot::BootArguments),
    CheckBoot(commands::check_boot::CheckBootArguments),
    Bisect(commands::bisect::BisectArguments),
    Files(commands::files::FilesArguments),
    Restore(commands::restore::RestoreArguments),
    Attach(commands::attach::AttachArguments),
    Detach(commands::attach::DetachArguments),
    Attest(commands::attest::AttestArguments),
    Rollback(commands::rollback::RollbackArguments),
    ProtectLive(commands::protect_live::ProtectLiveArguments),
    Protect(commands::protect::ProtectArguments),
    Unprotect(commands::protect::UnprotectArguments),
    Quarantine(commands::quarantine::QuarantineArguments),
    Release(commands::quarantine::ReleaseArguments),
    Forget(commands::forget::ForgetArguments),
    Prune(commands::prune::PruneArguments),
    Verify(commands::verify::VerifyArguments),
    Repair(commands::repair::RepairArguments),
    Fold(commands::fold::FoldArguments),
    Gc(commands::gc::GcArguments),
    Key(commands::key::KeyArguments),
    Runs(commands::runs::RunsArguments),
    Run(commands::run::RunArguments),
    /// Check this machine and the repository, and suggest fixes.
    ///
    /// Each line says ok, warn or fail. The exit code is 1 if any line says fail, but 10 or 12 if
    /// the repository does not open (see below). If none is named, only the machine is checked.
    Doctor,
    Completion(commands::completion::CompletionArguments),
    Man(commands::man::ManArguments),
}

#[cfg(test)]
mod tests {
    use super::Arguments;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_argument_is_documented() {
        fn look(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
            for argument in command.get_arguments() {
                let what = format!("{} {}", command.get_name(), argument.get_id());
                assert!(argument.get_help().is_some(), "{what} has no help");
            }
            command.get_subcommands().for_each(look);
        }
        look(&Arguments::command());
    }
}
