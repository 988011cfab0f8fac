//! Jobs, the queue, and when jobs run.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosts::{Hosts, parse_host_name};
use coldrise_replica::{Links, parse_link_name};
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::{Body, Fields, Names};
use super::problem::{Answer, Problem, blocking};
use crate::access::{Identity, Permission};
use crate::clock::now_ms;
use crate::jobs::{
    Job, JobKind, MachineNames, Outcome, QueueRow, RowState, StoredJob, backup, preview,
    protect_live,
};
use crate::pattern::{Pattern, any_matches};
use crate::service::{Service, SharedService};

/// Number of next times that a job is shown with.
const SHOWN_TIMES: usize = 5;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(jobs, add_job))
        .routes(routes!(uncovered))
        .routes(routes!(job, replace_job, remove_job))
        .routes(routes!(start))
        .routes(routes!(queue, change_queue))
        .routes(routes!(cancel))
}

/// A job, its next times, and what became of its runs.
#[derive(Serialize, utoipa::ToSchema)]
struct ShownJob {
    #[serde(flatten)]
    job: Job,
    /// When it was made, in milliseconds since 1970.
    created_ms: i64,
    /// The next times at which it is due, at most 5, in milliseconds since 1970.
    next_ms: Vec<i64>,
    /// The last runs per machine and kind.
    outcomes: Vec<Outcome>,
}

fn show(service: &Service, stored: StoredJob) -> Result<ShownJob> {
    let outcomes = service.database.outcomes(Some(&stored.job.name))?;
    let mut next_ms: Vec<i64> = stored.next_due_ms.into_iter().collect();
    if let Some(first) = stored.next_due_ms {
        next_ms.extend(preview(&stored.job.schedule, first, SHOWN_TIMES - 1)?);
    }
    Ok(ShownJob { job: stored.job, created_ms: stored.created_ms, next_ms, outcomes })
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct JobFilter {
    /// Enabled jobs that back up this machine only.
    machine: Option<String>,
}

/// List jobs.
#[utoipa::path(get, path = "/jobs", tag = "jobs", params(JobFilter), responses((status = 200, body = [ShownJob]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn jobs(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Fields(filter): Fields<JobFilter>,
) -> Answer<Json<Vec<ShownJob>>> {
    caller.allow_all(Permission::View)?;
    let shown = blocking(move || {
        let jobs = service.database.jobs()?.into_iter();
        let names = filter.machine.map(|machine| {
            let known = known_names(&service).unwrap_or_default();
            known
                .into_iter()
                .find(|names| names.machine == machine)
                .unwrap_or(MachineNames::of(&machine))
        });
        let is_wanted =
            |stored: &StoredJob| names.as_ref().is_none_or(|names| stored.job.covers(names));
        jobs.filter(is_wanted).map(|stored| show(&service, stored)).collect()
    });
    shown.await.map(Json)
}

/// Add a job.
#[utoipa::path(post, path = "/jobs", tag = "jobs", request_body = Job,
    responses((status = 201, body = ShownJob), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn add_job(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Body(job): Body<Job>,
) -> Answer<(StatusCode, Json<ShownJob>)> {
    caller.allow_all(Permission::Administer)?;
    let added = blocking(move || {
        refuse_own_files(&service, &job)?;
        refuse_unknown_names(&service, &job)?;
        service.database.add_job(&job, now_ms())?;
        service.queue.tell(Some(&job.name));
        show(&service, service.database.job(&job.name)?)
    });
    Ok((StatusCode::CREATED, Json(added.await?)))
}

/// Show a job.
#[utoipa::path(get, path = "/jobs/{name}", tag = "jobs", params(("name" = String, Path)),
    responses((status = 200, body = ShownJob), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn job(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
) -> Answer<Json<ShownJob>> {
    caller.allow_all(Permission::View)?;
    blocking(move || show(&service, service.database.job(&name)?)).await.map(Json)
}

/// Replace a job. Its next time counts from now. If it is disabled, its waiting runs are cancelled; the runs that follow a machine
/// end if they are not as the job says now.
#[utoipa::path(put, path = "/jobs/{name}", tag = "jobs", params(("name" = String, Path)), request_body = Job,
    responses((status = 200, body = ShownJob), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn replace_job(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
    Body(job): Body<Job>,
) -> Answer<Json<ShownJob>> {
    caller.allow_all(Permission::Administer)?;
    let replaced = blocking(move || {
        if job.name != name {
            let text = "name: a job keeps its name; add another job, and delete this one";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        refuse_own_files(&service, &job)?;
        refuse_unknown_names(&service, &job)?;
        service.database.replace_job(&job, now_ms())?;
        service.queue.tell(Some(&name));
        show(&service, service.database.job(&name)?)
    });
    replaced.await.map(Json)
}

/// Delete a job, and cancel its waiting runs and those that follow a machine. The history of its runs stays.
#[utoipa::path(delete, path = "/jobs/{name}", tag = "jobs", params(("name" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn remove_job(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
) -> Answer<StatusCode> {
    caller.allow_all(Permission::Administer)?;
    blocking(move || {
        service.database.remove_job(&name)?;
        service.queue.tell(Some(&name));
        Ok(())
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct JobStart {
    /// Only these of its machines; all that the caller sees if absent.
    #[schema(max_items = 256)]
    machines: Option<Vec<Pattern>>,
}

/// The runs that were queued.
#[derive(Serialize, utoipa::ToSchema)]
struct QueuedRuns {
    runs: Vec<String>,
}

/// The permission to start a job.
fn permission(kind: JobKind) -> Permission {
    match kind {
        JobKind::Backup => Permission::Backup,
        JobKind::Verify | JobKind::CheckBoot | JobKind::Copy | JobKind::ProtectLive => {
            Permission::Operate
        }
        JobKind::Prune | JobKind::Gc => Permission::Administer,
    }
}

/// Start a job now, whatever its schedule and window.
///
/// One of kind protect-live makes a restore point of each machine that it follows; the others are followed again.
#[utoipa::path(post, path = "/jobs/{name}/start", tag = "jobs", params(("name" = String, Path)), request_body = JobStart,
    responses((status = 202, body = QueuedRuns), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn start(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
    Body(start): Body<JobStart>,
) -> Answer<(StatusCode, Json<QueuedRuns>)> {
    caller.allow(Permission::Backup)?;
    let runs = blocking(move || {
        let job = service.database.job(&name)?.job;
        match job.kind == JobKind::Backup {
            true => caller.allow(permission(job.kind))?,
            false => caller.allow_all(permission(job.kind))?,
        }
        let is_wanted = |machine: &str| {
            let is_named = start.machines.as_ref();
            caller.sees(machine) && is_named.is_none_or(|named| any_matches(named, machine))
        };
        let ids = service.queue.start_job(&name, &caller.name, &is_wanted, &service)?;
        Ok(QueuedRuns { runs: ids.iter().map(ToString::to_string).collect() })
    });
    Ok((StatusCode::ACCEPTED, Json(runs.await?)))
}

fn known_names(service: &Service) -> Result<Vec<MachineNames>> {
    Ok(service.known_machines()?.into_iter().map(|known| known.names).collect())
}

/// The queue.
#[derive(Serialize, utoipa::ToSchema)]
struct ShownQueue {
    /// Number of runs at once.
    parallel: usize,
    /// Runs that wait or were started, in their order.
    runs: Vec<QueueRow>,
}

/// Whether the caller sees a row: those without a machine concern all machines.
fn sees(caller: &Identity, row: &QueueRow) -> bool {
    row.machine.as_deref().map_or_else(|| caller.sees_all(), |machine| caller.sees(machine))
}

/// Refuses jobs that would store the service's own files: its passphrase, its keys.
fn refuse_own_files(service: &SharedService, job: &Job) -> Result<()> {
    if let Some(path) = job.to.as_ref().filter(|to| to.starts_with('/')) {
        service.options.refuse_own_files(path)?;
    }
    let words = match job.kind {
        JobKind::Backup => backup,
        JobKind::ProtectLive => protect_live,
        _ => return Ok(()),
    };
    let names = job.machines.iter().map(|machine| machine.as_str());
    let words = names.flat_map(|name| words(job, name, name));
    for word in words {
        if let Some((_, source)) = word.split_once('=') {
            service.options.refuse_own_files(source)?;
        }
    }
    Ok(())
}

/// Refuses hosts that the repository does not know, and links of jobs of kind protect-live. A disabled job may name them: so a job
/// can be disabled whose host was removed.
fn refuse_unknown_names(service: &Service, job: &Job) -> Result<()> {
    let link = job.to.as_ref().filter(|_| job.protects_live());
    if (job.named_hosts().next().is_none() && link.is_none()) || !job.enabled {
        return Ok(());
    }
    let repository = service.inventory()?.repository()?;
    let hosts = Hosts::of(&repository);
    job.named_hosts().try_for_each(|name| {
        let found = parse_host_name(name).and_then(|name| hosts.find(&name));
        let unknown = |error: Error| error.with_kind(ErrorKind::InvalidInput).context("hosts");
        found.map(drop).map_err(unknown)
    })?;
    let Some(link) = link else { return Ok(()) };
    let found = parse_link_name(link).and_then(|name| Links::of(&repository).find(&name));
    found.map(drop).map_err(|error| error.with_kind(ErrorKind::InvalidInput).context("to"))
}

/// Show the queue: runs that wait, with the reason, and runs that were started.
#[utoipa::path(get, path = "/queue", tag = "jobs", responses((status = 200, body = ShownQueue), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn queue(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<ShownQueue>> {
    caller.allow(Permission::ViewRuns)?;
    let shown = blocking(move || {
        let rows = service.database.queue_rows()?.into_iter();
        let runs = rows.filter(|row| row.state != RowState::Cancelled && sees(&caller, row));
        Ok(ShownQueue { parallel: service.queue.parallel()?, runs: runs.collect() })
    });
    shown.await.map(Json)
}

#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct QueueChange {
    /// Number of runs at once.
    #[schema(minimum = 1, maximum = 64)]
    parallel: usize,
}

/// Set the number of runs at once. Runs that recover something do not count.
#[utoipa::path(patch, path = "/queue", tag = "jobs", request_body = QueueChange,
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn change_queue(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Body(change): Body<QueueChange>,
) -> Answer<StatusCode> {
    caller.allow_all(Permission::Administer)?;
    blocking(move || service.queue.set_parallel(change.parallel)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Cancel a run of the queue. One that waits is recorded as cancelled, one that runs is asked to end.
#[utoipa::path(delete, path = "/queue/{run}", tag = "jobs", params(("run" = String, Path)),
    responses((status = 202), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn cancel(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(run): Names<String>,
) -> Answer<StatusCode> {
    caller.allow(Permission::Operate)?;
    blocking(move || {
        let rows = service.database.queue_rows()?;
        match rows.iter().find(|row| row.run == run && sees(&caller, row)) {
            Some(row) => service.queue.cancel(&row.run.parse()?),
            None => Err(Error::new(ErrorKind::NotFound, "there is no such run in the queue")),
        }
    })
    .await?;
    Ok(StatusCode::ACCEPTED)
}

/// List machines with points that no enabled job backs up.
#[utoipa::path(get, path = "/uncovered", tag = "jobs", responses((status = 200, body = [String]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn uncovered(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<Vec<String>>> {
    caller.allow(Permission::View)?;
    let found = blocking(move || {
        let mut found = service.database.uncovered(&service.known_machines()?)?;
        found.retain(|machine| caller.sees(machine));
        Ok(found)
    });
    found.await.map(Json)
}
