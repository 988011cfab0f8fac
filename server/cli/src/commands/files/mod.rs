//! `coldrise files`: lists, reads and compares files in restore points.

mod diff;
mod entries;
mod get;
mod ls;
mod versions;

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use coldrise_block::{Context, Error, ErrorKind, Result, read_small_file};
use coldrise_files::{Client, FileSystems, FilesAddress, choose};
use coldrise_session::keep_files_private;
use coldrise_store::{Address, PointDocument};

use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::parse_duration;
use coldrise_hosting::files_machine::{Reading, keep, serve};
use coldrise_hosting::signals::ChildSignals;
use coldrise_runs::process_run;

/// Maximum size of a key file, in bytes.
const MAX_KEY_BYTES: u64 = 60 << 10;
/// Number of messages about unreadable files that are printed.
const MAX_SHOWN_UNREAD: u64 = 20;

/// List, read, find and compare files in restore points, and find their versions.
///
/// A small machine of Coldrise's own (QEMU, without a network) mounts the file systems; this host's
/// kernel never does. The point stays as it is.
///
/// Addresses are MACHINE/POINT:/PATH for the file system of the system, MACHINE/POINT:vda1/PATH for another
/// one, and MACHINE/POINT: for the list of file systems. MACHINE/POINT/DISK:/PATH looks at one disk only,
/// MACHINE/POINT/DISK,DISK:/PATH at these: for a volume group or array that is in the machine twice.
///
/// Readable are ext2, ext3, ext4, XFS, Btrfs, NTFS, FAT, exFAT and ISO 9660, on disks, partitions, LVM
/// volumes and Linux arrays, also in LUKS containers and BitLocker volumes.
#[derive(Debug, Args)]
pub(crate) struct FilesArguments {
    #[command(subcommand)]
    command: FilesCommand,
}

#[derive(Debug, Subcommand)]
enum FilesCommand {
    Ls(ls::LsArguments),
    Get(get::GetArguments),
    Find(ls::FindArguments),
    Diff(diff::DiffArguments),
    Versions(versions::VersionsArguments),
    /// Keep the machine of a point in the background. The other commands start this one.
    #[command(hide = true)]
    Keep {
        /// MACHINE/POINT[/DISK[,DISK...]].
        #[arg(value_parser = OsStringValueParser::new().try_map(point_address))]
        address: FilesAddress,
        /// How long it stays after its last use, in milliseconds.
        idle_ms: u64,
    },
    /// Keep the machine of points for the service, which plans this as a run.
    #[command(hide = true)]
    Serve {
        /// MACHINE/POINT; several of one machine.
        #[arg(value_name = "ADDRESS", required = true)]
        addresses: Vec<Address>,
        /// Keep it this long after its last use.
        #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = parse_duration)]
        stay: Duration,
    },
}

/// The key of encrypted disks.
#[derive(Debug, Args)]
struct KeyOptions {
    /// Open encrypted disks with the passphrase or BitLocker recovery key in FILE; a trailing newline is ignored.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

/// Options of the commands that look at one or two points.
#[derive(Debug, Args)]
struct ReadingOptions {
    #[command(flatten)]
    key: KeyOptions,

    /// Keep the helper machine running this long for the next command, which then needs no start. With --key-file it ends
    /// at once.
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = parse_duration)]
    stay: Duration,

    /// End the helper machine with this command.
    #[arg(long, conflicts_with = "stay")]
    once: bool,
}

impl KeyOptions {
    fn read(&self) -> Result<Vec<u8>> {
        let Some(path) = &self.key_file else { return Ok(Vec::new()) };
        let mut key = read_small_file(path, MAX_KEY_BYTES).context(|| "the key file")?;
        if key.last() == Some(&b'\n') {
            key.pop();
        }
        match key.is_empty() {
            true => {
                Err(Error::new(ErrorKind::InvalidInput, format!("{} is empty", path.display())))
            }
            false => Ok(key),
        }
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: &FilesArguments) -> Result<Report> {
    keep_files_private();
    match &arguments.command {
        FilesCommand::Ls(arguments) => ls::list(invocation, arguments),
        FilesCommand::Find(arguments) => ls::find(invocation, arguments),
        FilesCommand::Get(arguments) => get::run(invocation, arguments),
        FilesCommand::Diff(arguments) => diff::run(invocation, arguments),
        FilesCommand::Versions(arguments) => versions::run(invocation, arguments),
        FilesCommand::Keep { address, idle_ms } => {
            keep(invocation.caller()?, address, Duration::from_millis(*idle_ms))
                .map(|()| Report::silent())
        }
        FilesCommand::Serve { addresses, stay } => {
            serve(invocation.caller()?, &process_run::machine_files()?, addresses, *stay)
                .map(|()| Report::silent())
        }
    }
}

/// Parses an address for clap.
fn address(text: std::ffi::OsString) -> std::result::Result<FilesAddress, Error> {
    FilesAddress::parse(&text)
}

/// Parses an address that ends before the file system.
fn point_address(mut text: std::ffi::OsString) -> std::result::Result<FilesAddress, Error> {
    text.push(":");
    FilesAddress::parse(&text)
}

impl ReadingOptions {
    /// Takes the machine of a point, which may be starting.
    fn start(
        &self,
        invocation: &Invocation,
        point: &PointDocument,
        address: &FilesAddress,
        signals: &mut ChildSignals,
    ) -> Result<Reading> {
        let (key, caller) = (self.key.read()?, invocation.caller()?);
        Reading::start(caller, point, address, key, self.stay, self.once, signals)
    }

    /// Finds the point of an address and takes its machine.
    fn find(
        &self,
        invocation: &Invocation,
        address: &FilesAddress,
        signals: &mut ChildSignals,
    ) -> Result<Reading> {
        let point = Reading::point(invocation.caller()?, &invocation.open()?, address)?;
        self.start(invocation, &point, address, signals)
    }
}

/// Adds the address to an error about its path.
fn about<T>(address: &FilesAddress, done: Result<T>) -> Result<T> {
    done.map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::InvalidInput => error.context(address.to_string()),
        _ => error,
    })
}

/// The number of the file system that an address names, and the path in it.
fn place<'a>(
    client: &mut Client<'_>,
    systems: &FileSystems,
    address: &'a FilesAddress,
) -> Result<(u64, &'a [u8])> {
    let device = choose(client, systems, address.system.as_deref())?;
    Ok((device, address.path.as_deref().unwrap_or(b"/")))
}

/// Counts what could not be read, and prints the first ones.
#[derive(Default)]
struct Unread(u64);

impl Unread {
    fn add(&mut self, invocation: &Invocation, text: &str) {
        self.0 += 1;
        if self.0 <= MAX_SHOWN_UNREAD {
            invocation.remark(&format!("warning: not read: {text}"));
        }
    }

    /// The exit code of a command that is otherwise done.
    fn exit_code(&self) -> u8 {
        u8::from(self.0 > 0)
    }
}
