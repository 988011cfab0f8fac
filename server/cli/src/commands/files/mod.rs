//! `coldrise files`: lists, reads and compares files in restore points.

mod diff;
mod entries;
mod get;
mod ls;
mod versions;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use coldrise_block::{read_small_file, Context, Error, ErrorKind, Result};
use coldrise_files::{choose, AttachedDisks, Client, FileSystems, FilesAddress, Limits};
use coldrise_session::keep_files_private;
use coldrise_session::{check_offered, Catalog};
use coldrise_store::{Address, PointDocument, Repository};

use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::parse_duration;
use coldrise_hosting::files_machine::{keep, serve, KeptMachine};
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::tell_newer;
use coldrise_runs::process_run;

/// Time limit for the start of the machine. Without KVM and on a busy host it takes long.
const START_PATIENCE: Duration = Duration::from_secs(180);
/// The longest conversation.
const TIME_LIMIT: Duration = Duration::from_secs(24 * 3600);
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
/// volumes, Linux arrays and in LUKS containers.
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
    /// Open encrypted disks with the passphrase in FILE; a trailing newline is ignored.
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

    /// End the machine at once.
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

/// A conversation about one point.
struct Reading {
    machine: KeptMachine,
    /// The address with the point's own name, for people.
    point: String,
    /// The same as it was given.
    address: String,
    /// Whether the machine has all disks of the point.
    has_all_disks: bool,
    key: Vec<u8>,
    is_to_stay: bool,
}

impl Reading {
    /// The point of an address.
    fn point(
        invocation: &Invocation,
        repository: &Arc<Repository>,
        address: &FilesAddress,
    ) -> Result<PointDocument> {
        let catalog = Catalog::new(repository);
        let point = catalog.point(&address.machine, &address.selector)?;
        tell_newer(invocation.caller()?, &catalog, &address.selector, &point);
        check_offered(point)
    }

    /// Takes the machine of the address' point, which may be starting.
    fn start(
        invocation: &Invocation,
        point: &PointDocument,
        address: &FilesAddress,
        options: &ReadingOptions,
        signals: &mut ChildSignals,
    ) -> Result<Reading> {
        let key = options.key.read()?;
        // Whoever comes next has to show the key again.
        let is_to_stay = key.is_empty() && !options.once;
        let machine =
            KeptMachine::take(invocation.caller()?, point, &address.disks, options.stay, signals)?;
        Ok(Reading {
            has_all_disks: machine.disks().len() == point.disks.len(),
            machine,
            point: format!("{}/{}", point.machine, point.point),
            address: address.point(),
            key,
            is_to_stay,
        })
    }

    /// Finds the point of an address and takes its machine.
    fn of(
        invocation: &Invocation,
        address: &FilesAddress,
        options: &ReadingOptions,
        signals: &mut ChildSignals,
    ) -> Result<Reading> {
        let point = Reading::point(invocation, &invocation.open()?, address)?;
        Reading::start(invocation, &point, address, options, signals)
    }

    /// Talks with the machine, then leaves or ends it. `max_bytes` bounds the content that is taken;
    /// without it, the size of the disks does.
    fn talk<T>(
        self,
        signals: &mut ChildSignals,
        max_bytes: Option<u64>,
        talk: impl FnOnce(&mut Client<'_>, &FileSystems) -> Result<T>,
    ) -> Result<T> {
        let content_bytes = max_bytes.unwrap_or(self.machine.disk_bytes());
        let limits = Limits { content_bytes, time: TIME_LIMIT };
        let disks = self.machine.disks();
        let done = self.machine.connect(signals).and_then(|stream| {
            let look_after = || match signals.was_asked_to_end() {
                true => Err(Error::new(ErrorKind::Interrupted, "interrupted")),
                false => self.machine.look_after(),
            };
            let mut client = Client::greet(stream, START_PATIENCE, limits, look_after)?;
            let attached =
                AttachedDisks { address: &self.address, names: &disks, is_all: self.has_all_disks };
            let systems = FileSystems::read(&mut client, &attached, &self.key)?;
            talk(&mut client, &systems)
        });
        // A machine that has answered nonsense is not asked again.
        let is_sound = !done.as_ref().is_err_and(|error| error.kind() == ErrorKind::ToolFailed);
        match self.is_to_stay && is_sound {
            true => self.machine.leave(),
            false => self.machine.end(),
        }
        done
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
