//! `coldrise boot`: boots a machine from its backup.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coldrise_block::{Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind};
use coldrise_host::confinement::{NetworkReach, Reach};
use coldrise_host::{installed_program, kvm_works};
use coldrise_hypervisors::moves::move_state;
use coldrise_recovery::startable_session;
use coldrise_session::keep_files_private;
use coldrise_session::{SessionDocument, SessionNotes, check_offered, incoming_sentence};
use coldrise_store::{
    Address, Configuration, MachinePart, MarkRules, Repository, SessionName, default_cache_bytes,
};
use rustix::process::Signal;
use serde::Serialize;

use super::marks::set_rules;
use super::skipped_files;
use crate::hardware::{Hardware, HardwareOptions, Network};
use crate::invocation::Invocation;
use crate::report::{Report, print_remark};
use crate::units::{parse_size, show_count};
use coldrise_hosting::boot_check::lacking_memory;
use coldrise_hosting::boot_console::BootConsole;
use coldrise_hosting::child;
use coldrise_hosting::disk_server::{self, DiskServer, Protocol};
use coldrise_hosting::leftovers;
use coldrise_hosting::netns;
use coldrise_hosting::qemu::{self, Console};
use coldrise_hosting::qemu_process::QemuProcess;
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::tpm::Tpm;
use coldrise_hosting::uefi;
use coldrise_hosting::{Origin, QemuHost, QemuPlace};
use coldrise_runs::process_run;

/// How long QEMU may take to end.
const END_PATIENCE: Duration = Duration::from_secs(30);

/// Boot a machine from its backup, in QEMU on this host.
///
/// A restore point is first published as a new session; an existing session is booted directly.
/// Memory, processors, firmware and disk bus come from the configuration stored with the point,
/// unless options override them. The session captures the machine's writes. The machine has no
/// network without --network user.
///
/// The disks are served to this machine only. With --over nfs as root, the machine and its
/// server share a private network namespace. With --network user they use the host's network,
/// which must then have no other NFS server.
///
/// QEMU can open its own files only (Landlock), not the repository or the passphrase; with
/// --display it is not confined.
///
/// The console is this terminal: Ctrl-A X ends QEMU, Ctrl-C goes to the machine. With --headless, the
/// screen and the serial port are sockets in the run's folder, and coldrised shows them.
#[derive(Debug, Args)]
pub(crate) struct BootArguments {
    /// MACHINE/POINT, live/SESSION or live/SESSION@TIME.
    #[arg(value_name = "MACHINE/POINT|live/SESSION")]
    address: Address,

    /// Protocol between the machine and its disks. nfs needs nfs-ganesha and QEMU's NFS driver.
    #[arg(long, value_enum, default_value = "nbd")]
    over: Protocol,

    /// Name of the new session, if a restore point is booted.
    #[arg(long, value_name = "SESSION")]
    name: Option<SessionName>,

    /// Which time marks of the session are kept: off, or INTERVAL=AGE,…. Default:
    /// 1s=10m,10s=1h,1m=1d.
    #[arg(long, value_name = "RULE", value_parser = MarkRules::parse)]
    marks: Option<MarkRules>,

    #[command(flatten)]
    hardware: HardwareOptions,

    /// Network of the machine. Default: from the configuration, else none.
    #[arg(long, value_enum)]
    network: Option<Network>,

    /// Show the machine's screen in a window instead of its serial console here.
    #[arg(long)]
    display: bool,

    /// Use no terminal: the screen, the serial port and QEMU's monitor become sockets in the folder
    /// of this run, where coldrised finds them. Refuses to start without enough free memory.
    #[arg(long, conflicts_with = "display")]
    headless: bool,

    /// Memory for decoded chunks, such as 64M or 2G; 0 disables the cache. Default: one eighth
    /// of the memory. The cache shrinks while little memory is available.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache: Option<u64>,

    /// After shutdown, seal the session into a restore point and end it.
    #[arg(long, conflicts_with = "discard")]
    seal: bool,

    /// After shutdown, end the session and discard its captured writes.
    #[arg(long)]
    discard: bool,
}

#[derive(Serialize)]
struct Booted {
    session: String,
    address: Option<String>,
    /// To where its disks were moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    moved: Option<String>,
    discarded: bool,
    elapsed_ms: u64,
}

/// The disks to boot from.
enum Subject {
    Origin(Origin),
    Session(Box<SessionDocument>),
}

impl Subject {
    fn find(
        invocation: &Invocation,
        repository: &Arc<Repository>,
        address: &Address,
        arguments: &BootArguments,
    ) -> Result<Subject> {
        match address {
            Address::Point { machine, selector, disk: None } => {
                let origin = Origin::find(invocation.caller()?, repository, machine, selector)?;
                check_offered(origin.document().clone())?;
                Ok(Subject::Origin(origin))
            }
            Address::Live { session, disk: None } => {
                if arguments.name.is_some() {
                    return Err(Error::new(
                        ErrorKind::InvalidInput,
                        "--name is for a point that is published; a session has its name",
                    ));
                }
                Ok(Subject::Session(Box::new(startable_session(repository, session)?)))
            }
            _ => Err(no_single_disk(&arguments.address)),
        }
    }

    fn configuration(&self) -> Option<&Configuration> {
        match self {
            Subject::Origin(origin) => origin.configuration(),
            Subject::Session(session) => session.configuration.as_ref(),
        }
    }

    fn parts(&self) -> &[MachinePart] {
        match self {
            Subject::Origin(origin) => &origin.document().parts,
            Subject::Session(session) => &session.parts,
        }
    }

    fn disk_count(&self) -> usize {
        match self {
            Subject::Origin(origin) => origin.document().disks.len(),
            Subject::Session(session) => session.disks.len(),
        }
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: BootArguments) -> Result<Report> {
    // The screen and the packets of the machine lie in a folder for temporary files.
    keep_files_private();
    let is_alone = arguments.over == Protocol::Nfs
        && arguments.network != Some(Network::User)
        && netns::enter(process_run::discard)?;
    disk_server::check(arguments.over)?;
    let mut signals = ChildSignals::catch()?;
    let repository = invocation.open()?;
    if arguments.address.disk().is_some() {
        return Err(no_single_disk(&arguments.address));
    }
    let point = invocation.point_of_mark(&repository, &arguments.address)?;
    let subject = Subject::find(invocation, &repository, &point.address, &arguments)?;
    let hardware = hardware(invocation, &subject, &arguments, is_alone)?;
    let on = QemuHost::here()?;
    qemu::check(&on, &hardware, subject.disk_count())?;
    check_memory(invocation, &arguments, &on, &hardware)?;
    leftovers::remove(&repository);
    let scratch = ScratchFolder::new(ScratchKind::Boot)?;
    let sockets = match arguments.headless {
        true => Some(BootConsole::new(process_run::machine_files()?, scratch.path())?),
        false => None,
    };
    let session = match subject {
        Subject::Session(session) => {
            if let Some(text) = incoming_sentence(&repository, &session)? {
                invocation.remark(&text);
            }
            set_rules(&repository, &session.name, arguments.marks.clone())?;
            *session
        }
        Subject::Origin(origin) => {
            let (name, marks) = (arguments.name.clone(), arguments.marks.clone());
            origin.publish(invocation.caller()?, &repository, name, marks)?
        }
    };
    point.keep();
    let place = Place { scratch: scratch.path(), sockets };
    let status =
        boot(invocation, &repository, &mut signals, &arguments, &hardware, &session, place)
            .and_then(|status| {
                if status.success() {
                    Ok(())
                } else {
                    let text = format!("{} ended ({status})", qemu::PROGRAM);
                    Err(Error::new(ErrorKind::ToolFailed, text))
                }
            });
    // The machine's writes are not lost: the message says where they are.
    status.map_err(|error| {
        let (kind, message, name) = (error.kind(), error.full_message(), &session.name);
        let kept = format!("session {name} is kept: boot live/{name} again, or unpublish it");
        let moved = move_state(&repository, name).ok().flatten();
        let moved = moved.filter(|moved| moved.check_session_counts().is_err());
        let place = moved.map_or(kept, |moved| moved.sentence);
        Error::new(kind, format!("{message}; {place}"))
    })?;
    finish(invocation, &repository, &session.name, &arguments)
}

fn no_single_disk(address: &Address) -> Error {
    let text = format!("{address}: a machine boots with all its disks: leave out the disk");
    Error::new(ErrorKind::InvalidInput, text)
}

/// Where the files and sockets of the machine lie.
struct Place<'a> {
    /// Private to the machine and its servers.
    scratch: &'a Path,
    /// In place of a terminal.
    sockets: Option<BootConsole>,
}

impl Place<'_> {
    /// The folder that QEMU may change.
    fn of_qemu(&self) -> PathBuf {
        self.sockets.as_ref().map_or_else(|| self.scratch.to_owned(), BootConsole::folder)
    }
}

/// A machine without a console must not take the memory of others. A person may know better.
fn check_memory(
    invocation: &Invocation,
    arguments: &BootArguments,
    on: &QemuHost,
    hardware: &Hardware,
) -> Result<()> {
    match lacking_memory(on, hardware, 1)? {
        Some(text) if arguments.headless => {
            Err(Error::new(ErrorKind::Incomplete, format!("not booted: {text}")))
        }
        Some(text) => {
            invocation.remark(&format!("warning: {text}"));
            Ok(())
        }
        None => Ok(()),
    }
}

/// Serves the session to its machine until the machine is off.
fn boot(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    signals: &mut ChildSignals,
    arguments: &BootArguments,
    hardware: &Hardware,
    session: &SessionDocument,
    place: Place<'_>,
) -> Result<ExitStatus> {
    let console = match (&place.sockets, arguments.display) {
        (Some(_), _) => Console::Observed,
        (None, true) => Console::Window,
        (None, false) => Console::Serial,
    };
    if let Some(sockets) = &place.sockets {
        sockets.tell(invocation.caller()?, hardware, &session.name)?;
    }
    let cache_bytes = arguments.cache.unwrap_or_else(default_cache_bytes);
    let mut server = DiskServer::start(
        arguments.over,
        invocation.caller()?,
        &[session],
        place.scratch,
        cache_bytes,
        signals,
    )?;
    let disks = session.disks.iter().map(|disk| server.node(&session.name, &disk.name));
    let caller = invocation.caller()?;
    let qemu_place = QemuPlace::here(place.of_qemu(), place.scratch)?;
    let flash = uefi::prepare(caller, repository, session, hardware, &qemu_place)?;
    let kvm = kvm_works();
    let (stops, flash) = (session.is_incoming(), flash.as_ref());
    let mut words = qemu::arguments(hardware, kvm.is_ok(), console, disks.collect(), stops, flash);
    let tpm = Tpm::start(caller, session, &qemu_place)?;
    words.extend(tpm.iter().flat_map(Tpm::words));
    words.extend(move_monitor(repository, session, &place)?);
    if let Err(why) = kvm {
        invocation.remark(&format!("without KVM the machine is slow: {why}"));
    }
    invocation.remark(&format!(
        "booting {}/{} as session {}: {}, {} MiB",
        session.machine,
        session.point,
        session.name,
        show_count(u64::from(hardware.cpus), "processor"),
        hardware.memory_mib
    ));
    let reach = reach(arguments, hardware, place.of_qemu());
    let ran = run_machine(invocation, &words, reach, place.sockets, &mut server, signals);
    // However the machine ended, the session is flushed and closed.
    let stopped = server.stop();
    let kept =
        flash.map_or(Ok(()), |flash| uefi::keep(repository, &session.name, &flash.variables));
    let kept = kept.and(tpm.map_or(Ok(()), |tpm| tpm.finish(repository, &session.name)));
    let status = ran?;
    stopped?;
    kept?;
    Ok(status)
}

/// QEMU's arguments for the monitor that `coldrise move` uses. The session remembers its socket.
fn move_monitor(
    repository: &Arc<Repository>,
    session: &SessionDocument,
    place: &Place<'_>,
) -> Result<[OsString; 2]> {
    let socket = place.of_qemu().join(qemu::MOVE_MONITOR);
    SessionNotes::of(repository, &session.name)?.set_monitor(&socket)?;
    // Addresses of sockets have at most 107 bytes: without a terminal, QEMU runs in its folder.
    let name = match place.sockets {
        Some(_) => PathBuf::from(qemu::MOVE_MONITOR),
        None => socket,
    };
    let name = name.display().to_string().replace(',', ",,");
    Ok(["-qmp".into(), format!("unix:{name},server=on,wait=off").into()])
}

/// The stored configuration, overridden by options.
fn hardware(
    invocation: &Invocation,
    subject: &Subject,
    arguments: &BootArguments,
    is_alone: bool,
) -> Result<Hardware> {
    let options = &arguments.hardware;
    let mut hardware = options.apply(invocation, subject.configuration(), subject.parts())?;
    hardware.network = arguments.network.unwrap_or(hardware.network);
    if is_alone && hardware.network == Network::User {
        invocation.remark(
            "warning: over NFS the machine's only network is the one to its server; give --network user \
             to use the host's",
        );
        hardware.network = Network::None;
    }
    Ok(hardware)
}

/// Starts QEMU and waits for its end.
fn run_machine(
    invocation: &Invocation,
    words: &[std::ffi::OsString],
    reach: Option<Reach>,
    mut sockets: Option<BootConsole>,
    server: &mut DiskServer,
    signals: &mut ChildSignals,
) -> Result<ExitStatus> {
    let command = match &sockets {
        Some(sockets) => sockets.command(words),
        None => {
            let mut command = Command::new(qemu::PROGRAM);
            command.args(words);
            command
        }
    };
    let mut machine = QemuProcess::start(command, Signal::TERM, reach, print_remark)?;
    let served = sockets.as_mut().map_or(Ok(()), |sockets| sockets.serve(&mut machine));
    let machine = machine.child();
    let ended = served.and_then(|()| wait(invocation, machine, server, signals));
    if ended.is_err() {
        child::end(machine, qemu::PROGRAM, END_PATIENCE, None)?;
    }
    ended
}

/// A window needs files all over the system, so QEMU with a window is not confined.
fn reach(arguments: &BootArguments, hardware: &Hardware, folder: PathBuf) -> Option<Reach> {
    let connects = arguments.over == Protocol::Nfs || hardware.network == Network::User;
    let network = if connects { NetworkReach::Any } else { NetworkReach::Port(None) };
    (!arguments.display).then(|| Reach {
        program: installed_program(qemu::PROGRAM),
        files: Vec::new(),
        folders: vec![folder],
        network,
    })
}

fn wait(
    invocation: &Invocation,
    machine: &mut Child,
    server: &mut DiskServer,
    signals: &mut ChildSignals,
) -> Result<ExitStatus> {
    loop {
        // Check before the first wait: the machine may have ended already. Check again after
        // the server, whose restart consumes signals that arrive meanwhile.
        if let Some(status) = machine.try_wait().context(|| "looking after QEMU")? {
            return Ok(status);
        }
        server.look_after(invocation.caller()?, signals)?;
        if let Some(status) = machine.try_wait().context(|| "looking after QEMU")? {
            return Ok(status);
        }
        if signals.wait() {
            return Err(Error::new(ErrorKind::Interrupted, "interrupted: the machine was ended"));
        }
    }
}

fn finish(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    session: &SessionName,
    arguments: &BootArguments,
) -> Result<Report> {
    let sealed = if arguments.seal || arguments.discard {
        coldrise_session::unpublish(repository, session, arguments.discard)?
    } else {
        None
    };
    if let Some(sealed) = &sealed {
        skipped_files::tell(&sealed.left_out);
    }
    let moved = move_state(repository, session).ok().flatten();
    let booted = Booted {
        session: session.to_string(),
        moved: moved.as_ref().map(|moved| moved.sentence.clone()),
        address: sealed.map(|s| format!("{}/{}", s.point.machine, s.point.point)),
        discarded: arguments.discard,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = match (&booted.address, arguments.discard, arguments.seal) {
        (None, false, false) if booted.moved.is_some() => {
            format!("the machine is off; {}", booted.moved.as_deref().unwrap_or_default())
        }
        (Some(address), _, _) => format!("the machine is off; sealed as {address}"),
        (None, true, _) => "the machine is off; its writes were discarded".to_owned(),
        (None, false, true) => "the machine is off; it wrote nothing".to_owned(),
        (None, false, false) => format!(
            "the machine is off; session {session} holds what it wrote\n  boot it again            \
             coldrise boot live/{session}\n  make a restore point     coldrise unpublish {session}\
             \n  discard its writes       coldrise unpublish {session} --discard"
        ),
    };
    Ok(Report::done(&booted, text))
}
