//! Hosts of libvirt that are reached over SSH.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosts::{
    HostAddress, HostReport, Hosts, KnownHost, Seen, add_host, check, parse_host_name,
};
use coldrise_hypervisors::libvirt::{check_no_machines_on, remove_left};
use coldrise_store::MachineName;
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::{Body, Names};
use super::problem::{Answer, Problem, blocking};
use super::settings;
use crate::access::Permission;
use crate::jobs::{JobKind, MachineNames, any_matches};
use crate::service::{Service, SharedService};

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(hosts))
        .routes(routes!(add, remove))
        .routes(routes!(check_now))
}

/// The hosts, and what lets this repository log in there.
#[derive(Serialize, utoipa::ToSchema)]
struct KvmHosts {
    hosts: Vec<KvmHost>,
    /// The line for `~/.ssh/authorized_keys` of each host's user.
    authorized_keys: String,
}

/// A host of libvirt.
#[derive(Serialize, utoipa::ToSchema)]
struct KvmHost {
    name: String,
    /// ssh://USER@HOST:PORT.
    address: String,
    /// Of its SSH key, as `ssh-keygen -l` shows it.
    fingerprint: String,
    added_at_ms: u64,
    /// `null` before the first login.
    last_check: Option<KvmHostCheck>,
    /// `null` before the first contact.
    contact: Option<KvmHostContact>,
}

/// The last login of any command at a host, with the result of the last check.
#[derive(Serialize, utoipa::ToSchema)]
struct KvmHostCheck {
    at_ms: u64,
    is_ok: bool,
    /// Why it failed.
    error: Option<String>,
}

/// What was seen on a host.
#[derive(Serialize, utoipa::ToSchema)]
struct KvmHostContact {
    at_ms: u64,
    libvirt: String,
    qemu: String,
    /// The names of its machines, running or not.
    machines: Vec<String>,
    /// Those that no enabled job backs up from this host.
    unprotected: Vec<String>,
    /// The folder of scratch files there.
    scratch: String,
    scratch_free_bytes: u64,
    /// What works only in part, and why.
    shortcomings: Vec<String>,
}

impl KvmHost {
    fn of(service: &Service, host: &KnownHost, seen: Option<Seen>) -> Result<KvmHost> {
        let jobs = service.database.jobs()?;
        let protects = |name: &String| {
            let names = MachineNames::of(name);
            jobs.iter().map(|stored| &stored.job).any(|job| {
                let is_here = job.hosts.iter().any(|other| other == host.name.as_str());
                job.enabled
                    && matches!(job.kind, JobKind::Backup | JobKind::ProtectLive)
                    && is_here
                    && any_matches(&job.machines, &names)
            })
        };
        let last_check = seen.as_ref().map(|seen| KvmHostCheck {
            at_ms: seen.checked_at_ms,
            is_ok: seen.error.is_none(),
            error: seen.error.clone(),
        });
        let contact = seen.and_then(|seen| seen.contact).map(|seen| KvmHostContact {
            at_ms: seen.at_ms,
            libvirt: seen.libvirt,
            qemu: seen.qemu,
            unprotected: seen.machines.iter().filter(|name| !protects(name)).cloned().collect(),
            machines: seen.machines,
            scratch: seen.scratch,
            scratch_free_bytes: seen.scratch_free_bytes,
            shortcomings: seen.shortcomings,
        });
        Ok(KvmHost {
            name: host.name.to_string(),
            address: host.address.to_string(),
            fingerprint: host.key.fingerprint(),
            added_at_ms: host.added_at_ms,
            last_check,
            contact,
        })
    }
}

/// A host to add.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct NewKvmHost {
    /// ssh://USER@HOST or ssh://USER@HOST:PORT.
    address: String,
    /// Accept this SSH key only: SHA256:…. Default: the key that the host shows now.
    #[serde(default)]
    fingerprint: Option<String>,
}

fn known(service: &Service) -> Result<Hosts> {
    Ok(Hosts::of(&service.inventory()?.repository()?))
}

/// Checks a host, records what was found, also an error, and removes what lost machines left there.
pub(crate) fn check_host_of(service: &Service, host: &KnownHost) -> Result<HostReport> {
    let repository = service.inventory()?.repository()?;
    check(&Hosts::of(&repository), host, |connected| match remove_left(&repository, connected) {
        Ok(left) => {
            left.removed.iter().for_each(|text| tracing::info!("{text}"));
            left.staying
        }
        Err(error) => vec![error.full_message()],
    })
}

fn checked(service: &Service, hosts: &Hosts, host: &KnownHost) -> Result<KvmHost> {
    let _ = check_host_of(service, host);
    KvmHost::of(service, host, hosts.seen(&host.name)?)
}

/// List the hosts of libvirt that are reached over SSH.
#[utoipa::path(get, path = "/kvm-hosts", tag = "hosts",
    responses((status = 200, body = KvmHosts), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn hosts(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<KvmHosts>> {
    caller.allow_all(Permission::Operate)?;
    let list = move || {
        let hosts = known(&service)?;
        let shown = hosts.all()?.into_iter().map(|host| {
            let seen = hosts.seen(&host.name)?;
            KvmHost::of(&service, &host, seen)
        });
        let shown = shown.collect::<Result<_>>()?;
        Ok(KvmHosts { hosts: shown, authorized_keys: hosts.authorized_keys_line()? })
    };
    blocking(list).await.map(Json)
}

/// Add a host, remember its SSH key, and check it. `last_check` of the answer says how the check went.
#[utoipa::path(post, path = "/kvm-hosts/{name}", tag = "hosts", params(("name" = String, Path)), request_body = NewKvmHost,
    responses((status = 201, body = KvmHost), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn add(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
    Body(new): Body<NewKvmHost>,
) -> Answer<(StatusCode, Json<KvmHost>)> {
    let change = move |service: &Service| {
        let (hosts, name) = (known(service)?, parse_host_name(&name)?);
        let address: HostAddress = new.address.parse()?;
        let (host, _) = add_host(&hosts, &name, &address, new.fingerprint.as_deref())?;
        checked(service, &hosts, &host)
    };
    let added = settings::change(service, &caller, change).await?;
    Ok((StatusCode::CREATED, Json(added)))
}

/// Refuses a host that a job names: its machines would no longer be backed up.
fn refuse_used(service: &Service, name: &MachineName) -> Result<()> {
    let jobs = service.database.jobs()?.into_iter().map(|stored| stored.job);
    let using = jobs.filter(|job| job.named_hosts().any(|host| host == name.as_str()));
    let using: Vec<String> = using.map(|job| job.name).collect();
    if using.is_empty() {
        return check_no_machines_on(&service.inventory()?.repository()?, name);
    }
    let text = format!("host {name} is named by jobs: {}", using.join(", "));
    Err(Error::new(ErrorKind::Busy, text).advise("take it out of their hosts, or delete them"))
}

/// Remove a host that no job names and where no recovered machine runs. Nothing changes on the host itself.
#[utoipa::path(delete, path = "/kvm-hosts/{name}", tag = "hosts", params(("name" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn remove(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
) -> Answer<StatusCode> {
    let change = move |service: &Service| {
        let name = parse_host_name(&name)?;
        refuse_used(service, &name)?;
        known(service)?.remove(&name)
    };
    settings::change(service, &caller, change).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Connect to a host now. `last_check` of the answer says how it went.
#[utoipa::path(post, path = "/kvm-hosts/{name}/check", tag = "hosts", params(("name" = String, Path)),
    responses((status = 200, body = KvmHost), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn check_now(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
) -> Answer<Json<KvmHost>> {
    let change = move |service: &Service| {
        let hosts = known(service)?;
        let host = hosts.find(&parse_host_name(&name)?)?;
        checked(service, &hosts, &host)
    };
    settings::change(service, &caller, change).await.map(Json)
}
