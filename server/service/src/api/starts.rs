//! Starting runs: what `coldrise` does on the command line, as typed requests.
//!
//! Every part of a request is parsed as what it stands for before it becomes an argument; see [`CommandLine`].

use std::collections::BTreeSet;
use std::path::{Component, Path};

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_formats::Format;
use coldrise_inventory::{Inventory, SessionDetails};
use coldrise_requests::{CommandLine, Protected, Request, sealable, session_name};
use coldrise_runs::RunId;
use coldrise_store::{Address, DiskName, DisplayName, MachineName, SessionName};
use serde::Serialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::{Body, Names};
use super::problem::{Answer, Problem, blocking};
use super::runs::find;
use super::{libvirt_starts, recoveries};
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

/// A checked request.
pub(super) struct Command {
    pub(super) kind: &'static str,
    pub(super) machine: Option<String>,
    /// Without the global options.
    pub(super) line: CommandLine,
}

impl Command {
    /// A request as a command of the same options.
    ///
    /// # Errors
    /// `InvalidInput` if the command would refuse it.
    pub(super) fn new<R: Args + Serialize>(
        kind: &'static str,
        machine: impl Into<Option<String>>,
        request: &R,
    ) -> Result<Command> {
        coldrise_requests::check(request)?;
        Ok(Command { kind, machine: machine.into(), line: CommandLine::new(kind).with(request) })
    }
}

/// Checks a request, and that the caller may make it.
fn command(request: Request, service: &Service, caller: &Identity) -> Result<Command> {
    use Permission::{Administer, Operate, ReadContent};
    match request {
        Request::Backup(backup) => {
            // A source can be anything, such as another machine's disk.
            caller.allow_all(Administer)?;
            let machine: MachineName = backup.machine.parse()?;
            backup.display_name.as_deref().map(DisplayName::parse).transpose()?;
            for (disk, source) in backup.disks.iter().filter_map(|word| word.split_once('=')) {
                disk.parse::<DiskName>()?;
                crate::jobs::check_source(source)?;
                service.options.refuse_own_files(source)?;
            }
            if backup.disks.is_empty() {
                return Err(invalid("disks: give at least one"));
            }
            crate::jobs::check_rate(backup.rate_bytes_per_second)?;
            // Its parser knows --from, which requests do not have.
            let line = CommandLine::new("backup").with(&backup);
            Ok(Command { kind: "backup", machine: Some(machine.to_string()), line })
        }
        Request::ProtectLive(live) => {
            // It reads any machine that the service can read.
            caller.allow_all(Administer)?;
            let machine = match live.protected()? {
                Protected::Machine(machine, _) => machine,
                Protected::Session(name) => {
                    let repository = service.inventory()?.repository()?;
                    coldrise_session::session(&repository, &name)?.document.machine
                }
            };
            libvirt_starts::check_host(service, live.on.as_deref())?;
            Command::new("protect-live", machine.to_string(), &live)
        }
        Request::CheckBoot(check) => {
            let machine = origin(service, caller, &check.address)?;
            if check.check_port == Some(0) {
                return Err(invalid("check_port: 1 to 65535"));
            }
            libvirt_starts::check_host(service, check.on.as_deref())?;
            Command::new("check-boot", machine, &check)
        }
        Request::Boot(boot) => recoveries::boot(boot, service, caller),
        Request::Serve(serve) => recoveries::serve(serve, service, caller),
        Request::Recover(recover) => libvirt_starts::recover(recover, service, caller),
        Request::Move(wanted) => libvirt_starts::start_move(wanted, service, caller),
        Request::Rollback(rollback) => libvirt_starts::rollback(rollback, service, caller),
        Request::Attach(attach) => libvirt_starts::attach(attach, service, caller),
        Request::Detach(detach) => libvirt_starts::detach(detach, service, caller),
        Request::Verify(verify) => {
            let machine = anything(service, caller, verify.address.as_deref())?;
            if verify.sample.is_some_and(|percent| !(percent > 0.0 && percent <= 100.0)) {
                return Err(invalid("sample: give a percentage above 0, up to 100"));
            }
            Command::new("verify", machine, &verify)
        }
        Request::Publish(publish) => {
            let machine = origin(service, caller, &publish.address)?;
            new_session(service, publish.session.as_deref())?;
            Command::new("publish", machine, &publish)
        }
        Request::Seal(seal) => {
            let found = live(service, caller, Operate, &sealed_session(&seal.session)?)?;
            Command::new("seal", found.machine, &seal)
        }
        Request::Unpublish(unpublish) => {
            // The captured writes of a session exist nowhere else.
            let permission = if unpublish.discard { Administer } else { Operate };
            let found = live(service, caller, permission, &session_name(&unpublish.session)?)?;
            Command::new("unpublish", found.machine, &unpublish)
        }
        Request::Restore(mut restore) => {
            caller.allow(Operate)?;
            caller.allow(ReadContent)?;
            let machine = match restore.is_ova()? {
                true => disks(service, caller, &restore.address)?,
                false => disk(service, caller, &restore.address)?,
            };
            restore.target = restore_target(service, caller, &restore.target)?;
            let is_format = |word: &str| word == "ova" || word.parse::<Format>().is_ok();
            if restore.format.as_deref().is_some_and(|word| !is_format(word)) {
                return Err(invalid("format: give raw, qcow2, vhd, vhdx, vmdk or ova"));
            }
            Command::new("restore", machine, &restore)
        }
        Request::Forget(of) => {
            Command::new("forget", points(caller, Administer, &of.addresses)?, &of)
        }
        Request::Protect(of) => {
            Command::new("protect", points(caller, Operate, &of.addresses)?, &of)
        }
        Request::Unprotect(of) => {
            Command::new("unprotect", points(caller, Administer, &of.addresses)?, &of)
        }
        Request::Quarantine(of) => {
            Command::new("quarantine", points(caller, Administer, &of.addresses)?, &of)
        }
        Request::Release(of) => {
            Command::new("release", points(caller, Administer, &of.addresses)?, &of)
        }
        Request::Prune(prune) => {
            let names = prune.machines.as_deref().unwrap_or_default();
            if names.is_empty() {
                caller.allow_all(Administer)?;
            }
            for name in names {
                caller.allow_machine(Administer, name)?;
                name.parse::<MachineName>()?;
            }
            let machine = if names.len() == 1 { names.first().cloned() } else { None };
            Command::new("prune", machine, &prune)
        }
        Request::Gc(gc) => {
            caller.allow_all(Administer)?;
            Command::new("gc", None::<String>, &gc)
        }
        Request::Fold(fold) => {
            let machine = anything(service, caller, fold.addresses.first().map(String::as_str))?;
            Command::new("fold", machine, &fold)
        }
    }
}

/// The machine of MACHINE/POINT.
pub(super) fn point(caller: &Identity, permission: Permission, text: &str) -> Result<String> {
    match text.parse::<Address>()? {
        Address::Point { machine, disk: None, .. } => {
            caller.allow_machine(permission, machine.as_str())?;
            Ok(machine.to_string())
        }
        _ => Err(invalid("give MACHINE/POINT")),
    }
}

/// The machine of MACHINE/POINT or live/SESSION@TIME.
pub(super) fn origin(service: &Service, caller: &Identity, text: &str) -> Result<String> {
    match text.parse::<Address>()? {
        Address::Marked { session, disk: None, .. } => {
            Ok(live(service, caller, Permission::Operate, &session)?.machine)
        }
        _ => point(caller, Permission::Operate, text),
    }
}

/// The session of a request to seal.
fn sealed_session(text: &str) -> Result<SessionName> {
    match sealable(text)? {
        Address::Live { session, .. } | Address::Marked { session, .. } => Ok(session),
        Address::Point { .. } => Err(invalid("session: give SESSION or live/SESSION@TIME")),
    }
}

/// The machine of MACHINE/POINT/DISK or live/SESSION/DISK.
pub(super) fn disk(service: &Service, caller: &Identity, text: &str) -> Result<String> {
    match text.parse::<Address>()? {
        Address::Point { machine, disk: Some(_), .. } => {
            caller.allow_machine(Permission::Operate, machine.as_str())?;
            Ok(machine.to_string())
        }
        Address::Live { session, disk: Some(_) }
        | Address::Marked { session, disk: Some(_), .. } => {
            Ok(live(service, caller, Permission::Operate, &session)?.machine)
        }
        _ => Err(invalid("give MACHINE/POINT/DISK or live/SESSION/DISK")),
    }
}

/// The machine of a point or session, with or without a disk.
fn disks(service: &Service, caller: &Identity, text: &str) -> Result<String> {
    match text.parse::<Address>()? {
        Address::Point { machine, .. } => {
            caller.allow_machine(Permission::Operate, machine.as_str())?;
            Ok(machine.to_string())
        }
        Address::Live { session, .. } | Address::Marked { session, .. } => {
            Ok(live(service, caller, Permission::Operate, &session)?.machine)
        }
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

/// Checks the name of a new session.
///
/// # Errors
/// `AlreadyExists`: a caller must not land on the machine of another session.
pub(super) fn new_session(service: &Service, name: Option<&str>) -> Result<()> {
    let Some(name) = name.map(str::parse::<SessionName>).transpose()? else { return Ok(()) };
    // While the repository is away the run itself finds out.
    let sessions = service.inventory().and_then(Inventory::sessions).unwrap_or_default().sessions;
    if sessions.iter().any(|session| session.session == name.as_str()) {
        let text = format!("there is already a session {name}: choose another name");
        return Err(Error::new(ErrorKind::AlreadyExists, text));
    }
    Ok(())
}

/// The machine of an optional address, which may be its name; everything without.
fn anything(service: &Service, caller: &Identity, address: Option<&str>) -> Result<Option<String>> {
    let Some(text) = address else {
        caller.allow_all(Permission::Operate)?;
        return Ok(None);
    };
    if let Ok(machine) = text.parse::<MachineName>() {
        caller.allow_machine(Permission::Operate, machine.as_str())?;
        return Ok(Some(machine.to_string()));
    }
    disks(service, caller, text).map(Some)
}

/// The machine of points; `None` if they are of several.
fn points(
    caller: &Identity,
    permission: Permission,
    addresses: &[String],
) -> Result<Option<String>> {
    if addresses.is_empty() || addresses.len() > MAX_ADDRESSES {
        return Err(invalid("addresses: give 1 to 1000 times MACHINE/POINT"));
    }
    let machines = addresses.iter().map(|text| point(caller, permission, text));
    let machines = machines.collect::<Result<BTreeSet<_>>>()?;
    Ok(machines.first().filter(|_| machines.len() == 1).cloned())
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
#[utoipa::path(post, path = "/runs", tag = "runs", request_body = Request,
    responses((status = 202, body = Started), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn start(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Body(request): Body<Request>,
) -> Answer<Response> {
    let run = blocking(move || {
        let command = command(request, &service, &caller)?;
        service.queue.enqueue(NewRun {
            kind: command.kind.to_owned(),
            machine: command.machine,
            arguments: command.line.words(),
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
