//! Starting runs: what `coldrise` does on the command line, as typed requests.
//!
//! Every part of a request is parsed as what it stands for before it becomes an argument, and arguments
//! are a list: no shell is involved, and no text can turn into an option.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use axum::extract::State;
use axum::http::{header, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::Json;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::{Inventory, Retention, SessionDetails};
use coldrise_runs::RunId;
use coldrise_store::{Address, DiskName, DisplayName, MachineName, PointSelector, SessionName};
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::{Body, Names};
use super::problem::{blocking, Answer, Problem};
use super::production::{Attach, Detach, Move, Recover, Rollback};
use super::recoveries::{Boot, Serve};
use super::runs::find;
use crate::access::{Identity, Permission};
use crate::invalid::invalid;
use crate::jobs::NewRun;
use crate::service::{Service, SharedService};

/// Maximum number of addresses in a request.
const MAX_ADDRESSES: usize = 1000;
/// Where operators restore to, below the state folder.
const RESTORES: &str = "restores";

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(start)).routes(routes!(cancel))
}

/// What to run.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
enum Start {
    /// Back up disks of a machine. Administrators only: it reads any file that the service can read.
    /// Others start jobs.
    Backup {
        machine: String,
        /// What people call the machine; as its configuration says if absent.
        display_name: Option<String>,
        /// [FORMAT:]SOURCE by disk, such as `{"vda": "raw:/dev/vg0/web01"}`.
        disks: BTreeMap<String, String>,
        /// Bytes per second that it reads from the sources at most; no limit if absent.
        #[schema(minimum = 65536)]
        rate_bytes_per_second: Option<u64>,
    },
    /// Boot a point in isolation, and store the evidence with it.
    CheckBoot {
        /// MACHINE/POINT.
        address: String,
        /// The rung to reach: started, firmware, kernel, userspace, login or service.
        until: Option<String>,
    },
    /// Boot a machine from its backup, on this host. It runs until it is switched off, or the run is
    /// cancelled; the session stays. See /sessions/{session}/screen.
    Boot(Boot),
    /// Serve all points and sessions over NBD or NFS, until the run is cancelled.
    Serve(Serve),
    /// Run a machine from its backup under its own hypervisor. The run serves its disks, until the machine is
    /// off; cancelled, it suspends the machine first. With `undo`, end such a machine and its session.
    Recover(Recover),
    /// Move the disks of a running machine from its session to production storage. Safe to cancel until they
    /// switch.
    Move(Move),
    /// Make existing disks equal to a point: only what differs is written.
    Rollback(Rollback),
    /// Attach a disk to a running QEMU, until it is detached, or the run is cancelled.
    Attach(Attach),
    /// Detach an attached disk. Unmount it in the guest first.
    Detach(Detach),
    /// Check stored data: of an address, or of everything.
    Verify {
        address: Option<String>,
        /// Percent of the data to read; all if absent.
        sample: Option<u8>,
    },
    /// Publish a point for writing.
    Publish {
        /// MACHINE/POINT.
        address: String,
        /// The session's name; one is made up if absent.
        session: Option<String>,
    },
    /// Make a restore point of what a session has captured.
    Seal { session: String },
    /// End a session: seal it first, or discard what it has captured.
    Unpublish {
        session: String,
        #[serde(default)]
        discard: bool,
    },
    /// Write a disk to an image file.
    Restore {
        /// MACHINE/POINT/DISK or live/SESSION/DISK.
        address: String,
        /// A file name, which appears in the service's folder for restored images; for administrators
        /// also an absolute path, a device or an NBD URI.
        target: String,
        /// raw, qcow2, vhd, vhdx or vmdk; from the target's extension if absent.
        format: Option<String>,
        /// Replace an existing file.
        #[serde(default)]
        replace: bool,
    },
    /// Remove points.
    Forget { addresses: Vec<String> },
    /// Keep points: neither prune nor forget removes them.
    Protect { addresses: Vec<String> },
    /// Take the protection off points.
    Unprotect { addresses: Vec<String> },
    /// Serve points no longer, and count them in no rule.
    Quarantine { addresses: Vec<String> },
    /// Take points out of quarantine.
    Release { addresses: Vec<String> },
    /// Remove points by rules.
    Prune {
        rules: Retention,
        /// Names of machines; all if absent.
        machines: Option<Vec<String>>,
    },
    /// Free the space of removed points.
    Gc,
    /// Fold captured writes of sealed points into chunks: of an address, or of all.
    Fold { address: Option<String> },
}

/// A checked request.
pub(super) struct Command {
    pub(super) kind: &'static str,
    pub(super) machine: Option<String>,
    /// Options, without the global ones, then `--` and the rest.
    pub(super) arguments: Vec<String>,
}

impl Command {
    pub(super) fn new(kind: &'static str, machine: Option<String>) -> Command {
        Command { kind, machine, arguments: vec![kind.to_owned()] }
    }

    pub(super) fn option(mut self, name: &str, value: Option<impl ToString>) -> Command {
        if let Some(value) = value {
            self.arguments.push(format!("--{name}={}", value.to_string()));
        }
        self
    }

    pub(super) fn flag(mut self, name: &str, is_set: bool) -> Command {
        self.arguments.extend(is_set.then(|| format!("--{name}")));
        self
    }

    pub(super) fn words(mut self, words: impl IntoIterator<Item = String>) -> Command {
        self.arguments.push("--".to_owned());
        self.arguments.extend(words);
        self
    }
}

impl Start {
    fn command(self, service: &Service, caller: &Identity) -> Result<Command> {
        use Permission::{Administer, Operate, ReadContent};
        match self {
            Start::Backup { machine, display_name, disks, rate_bytes_per_second: rate } => {
                // A source can be anything, such as another machine's disk.
                caller.allow_all(Administer)?;
                let machine: MachineName = machine.parse()?;
                let mut words = vec![machine.to_string()];
                for (disk, source) in disks {
                    let disk: DiskName = disk.parse()?;
                    crate::jobs::check_source(&source)?;
                    service.options.refuse_own_files(&source)?;
                    words.push(format!("{disk}={source}"));
                }
                if words.len() == 1 {
                    return Err(invalid("disks: give at least one"));
                }
                crate::jobs::check_rate(rate)?;
                let name = display_name.map(|name| DisplayName::parse(&name)).transpose()?;
                let command = Command::new("backup", Some(machine.to_string()));
                Ok(command.option("display-name", name).option("rate", rate).words(words))
            }
            Start::CheckBoot { address, until } => {
                let (machine, address) = point(caller, Operate, &address)?;
                let until = until.map(|rung| word(&rung)).transpose()?;
                let command = Command::new("check-boot", Some(machine));
                Ok(command.option("until", until).words([address]))
            }
            Start::Boot(boot) => boot.command(service, caller),
            Start::Serve(serve) => serve.command(service, caller),
            Start::Recover(recover) => recover.command(service, caller),
            Start::Move(wanted) => wanted.command(service, caller),
            Start::Rollback(rollback) => rollback.command(service, caller),
            Start::Attach(attach) => attach.command(service, caller),
            Start::Detach(detach) => detach.command(service, caller),
            Start::Verify { address, sample } => {
                let (machine, words) = anything(caller, address)?;
                if sample.is_some_and(|percent| percent == 0 || percent > 100) {
                    return Err(invalid("sample: give 1 to 100 percent"));
                }
                Ok(Command::new("verify", machine).option("sample", sample).words(words))
            }
            Start::Publish { address, session } => {
                let (machine, address) = point(caller, Operate, &address)?;
                let session = new_session(service, session)?;
                let command = Command::new("publish", Some(machine));
                Ok(command.option("name", session).words([address]))
            }
            Start::Seal { session } => {
                let found = live(service, caller, Operate, &session.parse()?)?;
                Ok(Command::new("seal", Some(found.machine)).words([found.session]))
            }
            Start::Unpublish { session, discard } => {
                // What a session has captured exists nowhere else.
                let permission = if discard { Administer } else { Operate };
                let found = live(service, caller, permission, &session.parse()?)?;
                Ok(Command::new("unpublish", Some(found.machine))
                    .flag("discard", discard)
                    .words([found.session]))
            }
            Start::Restore { address, target, format, replace } => {
                caller.allow(Operate)?;
                caller.allow(ReadContent)?;
                let (machine, address) = disk(service, caller, &address)?;
                let target = restore_target(service, caller, &target)?;
                let format = format.map(|format| word(&format)).transpose()?;
                let command = Command::new("restore", Some(machine)).option("format", format);
                Ok(command.flag("force", replace).words([address, target]))
            }
            Start::Forget { addresses } => points("forget", caller, Administer, &addresses),
            Start::Protect { addresses } => points("protect", caller, Operate, &addresses),
            Start::Unprotect { addresses } => points("unprotect", caller, Administer, &addresses),
            Start::Quarantine { addresses } => points("quarantine", caller, Administer, &addresses),
            Start::Release { addresses } => points("release", caller, Administer, &addresses),
            Start::Prune { rules, machines } => {
                let names = machines.unwrap_or_default();
                if names.is_empty() {
                    caller.allow_all(Administer)?;
                }
                for name in &names {
                    caller.allow_machine(Administer, name)?;
                    name.parse::<MachineName>()?;
                }
                let machine = if names.len() == 1 { names.first().cloned() } else { None };
                let arguments = crate::jobs::prune(&rules, names.iter().map(String::as_str));
                Ok(Command { kind: "prune", machine, arguments })
            }
            Start::Gc => {
                caller.allow_all(Administer)?;
                Ok(Command::new("gc", None))
            }
            Start::Fold { address } => {
                let (machine, words) = anything(caller, address)?;
                Ok(Command::new("fold", machine).words(words))
            }
        }
    }
}

/// A word of the command line, which checks its meaning.
fn word(text: &str) -> Result<String> {
    let is_word = !text.is_empty()
        && text.len() <= 32
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    is_word.then(|| text.to_owned()).ok_or_else(|| invalid("give a word of small letters"))
}

/// The machine and the text of MACHINE/POINT.
pub(super) fn point(
    caller: &Identity,
    permission: Permission,
    text: &str,
) -> Result<(String, String)> {
    match text.parse::<Address>()? {
        Address::Point { machine, selector, disk: None } => {
            caller.allow_machine(permission, machine.as_str())?;
            let address = show(&machine, &selector);
            Ok((machine.to_string(), address))
        }
        _ => Err(invalid("give MACHINE/POINT")),
    }
}

pub(super) fn show(machine: &MachineName, selector: &PointSelector) -> String {
    format!("{machine}/{selector}")
}

/// The machine and the text of MACHINE/POINT/DISK or live/SESSION/DISK.
pub(super) fn disk(service: &Service, caller: &Identity, text: &str) -> Result<(String, String)> {
    match text.parse::<Address>()? {
        Address::Point { machine, selector, disk: Some(disk) } => {
            caller.allow_machine(Permission::Operate, machine.as_str())?;
            Ok((machine.to_string(), format!("{}/{disk}", show(&machine, &selector))))
        }
        Address::Live { session, disk: Some(disk) } => {
            let found = live(service, caller, Permission::Operate, &session)?;
            Ok((found.machine, format!("live/{session}/{disk}")))
        }
        _ => Err(invalid("give MACHINE/POINT/DISK or live/SESSION/DISK")),
    }
}

/// A session that the caller may see.
///
/// # Errors
/// `Forbidden` without the permission; `NotFound`, which names no other session.
pub(super) fn live(
    service: &Service,
    caller: &Identity,
    permission: Permission,
    session: &SessionName,
) -> Result<SessionDetails> {
    caller.allow(permission)?;
    let mut sessions = service.inventory()?.sessions()?.sessions.into_iter();
    sessions
        .find(|found| found.session == session.as_str() && caller.sees(&found.machine))
        .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no session {session}")))
}

/// The name of a new session.
///
/// # Errors
/// `AlreadyExists`: whoever asks must not land on the machine of another session.
pub(super) fn new_session(service: &Service, name: Option<String>) -> Result<Option<SessionName>> {
    let name = name.map(|name| name.parse::<SessionName>()).transpose()?;
    // While the repository is away the run itself finds out.
    let sessions = service.inventory().and_then(Inventory::sessions).unwrap_or_default().sessions;
    let is_taken = |name: &&SessionName| sessions.iter().any(|s| s.session == name.as_str());
    match name.as_ref().filter(is_taken) {
        Some(name) => {
            let text = format!("there is already a session {name}: choose another name");
            Err(Error::new(ErrorKind::AlreadyExists, text))
        }
        None => Ok(name),
    }
}

/// An optional address: of a machine's point or disk; everything without.
fn anything(caller: &Identity, address: Option<String>) -> Result<(Option<String>, Vec<String>)> {
    let Some(text) = address else {
        caller.allow_all(Permission::Operate)?;
        return Ok((None, Vec::new()));
    };
    if let Ok(machine) = text.parse::<MachineName>() {
        caller.allow_machine(Permission::Operate, machine.as_str())?;
        return Ok((Some(machine.to_string()), vec![text]));
    }
    let (machine, address) = point(caller, Permission::Operate, &text)?;
    Ok((Some(machine), vec![address]))
}

fn points(
    kind: &'static str,
    caller: &Identity,
    permission: Permission,
    addresses: &[String],
) -> Result<Command> {
    if addresses.is_empty() || addresses.len() > MAX_ADDRESSES {
        return Err(invalid("addresses: give 1 to 1000 times MACHINE/POINT"));
    }
    let found: Vec<_> =
        addresses.iter().map(|text| point(caller, permission, text)).collect::<Result<_>>()?;
    let machine = found.first().map(|(machine, _)| machine.clone());
    let is_one = found.iter().all(|(other, _)| Some(other) == machine.as_ref());
    let command = Command::new(kind, machine.filter(|_| is_one));
    Ok(command.words(found.into_iter().map(|(_, address)| address)))
}

/// Where a restore writes: a plain name lies in the service's folder for restored images.
fn restore_target(service: &Service, caller: &Identity, target: &str) -> Result<String> {
    let mut parts = Path::new(target).components();
    let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    if is_name && !target.starts_with('-') && !target.contains(':') {
        let folder = service.options.state.join(RESTORES);
        let folder = std::path::absolute(&folder)
            .map_err(|error| Error::io(format!("finding {}", folder.display()), error))?;
        std::fs::create_dir_all(&folder)
            .map_err(|error| Error::io(format!("creating {}", folder.display()), error))?;
        return Ok(folder.join(target).to_string_lossy().into_owned());
    }
    caller.allow_all(Permission::Administer)?;
    service.options.refuse_own_files(target)?;
    if target.starts_with('/') || target.starts_with("nbd") {
        return Ok(target.to_owned());
    }
    Err(invalid("target: give a file name, an absolute path or an NBD URI"))
}

/// A run that was entered into the queue.
#[derive(Serialize, utoipa::ToSchema)]
struct Started {
    /// The run; GET /runs/{id} shows it once it has begun, GET /queue while it waits.
    run: String,
}

/// Start a run. It waits in the queue while others must end first.
///
/// Send an `Idempotency-Key`, so that a repeated request starts one run.
#[utoipa::path(post, path = "/runs", tag = "runs", request_body = Start,
    responses((status = 202, body = Started), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn start(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Body(start): Body<Start>,
) -> Answer<Response> {
    let run = blocking(move || {
        let command = start.command(&service, &caller)?;
        service.queue.enqueue(NewRun {
            kind: command.kind.to_owned(),
            machine: command.machine,
            arguments: command.arguments,
            requested_by: Some(caller.name),
            job: None,
        })
    });
    let run: RunId = run.await?;
    let place = format!("/api/v1/runs/{run}");
    let started = Started { run: run.to_string() };
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, place)], Json(started)).into_response())
}

/// Cancel a run, as Ctrl-C does. It ends soon afterwards.
#[utoipa::path(post, path = "/runs/{id}/cancel", tag = "runs", params(("id" = String, Path)),
    responses((status = 202), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn cancel(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(id): Names<String>,
) -> Answer<StatusCode> {
    blocking(move || {
        caller.allow(Permission::Operate)?;
        let id: RunId = id.parse()?;
        // A waiting run has no folder yet.
        match find(&service, &caller, id.as_str()) {
            Err(error) if error.kind() == ErrorKind::NotFound && caller.sees_all() => {}
            found => drop(found?),
        }
        service.queue.cancel(&id)
    })
    .await?;
    Ok(StatusCode::ACCEPTED)
}
