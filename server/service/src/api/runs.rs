//! Runs: every long command of this host, from any caller.

use axum::Json;
use axum::extract::State;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_runs::{LogLine, RunId, RunRecord, State as RunState};
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::{Fields, Names};
use super::problem::{Answer, Problem, blocking};
use crate::access::{Identity, Permission, Role};
use crate::clock::now_ms;
use crate::service::{Service, SharedService};

/// Maximum number of ended runs in a list, and of those that a filter looks at.
const MAX_RUNS: usize = 1000;
/// Size of a piece of a log, in bytes.
const LOG_PIECE_BYTES: u64 = 256 << 10;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(runs)).routes(routes!(run)).routes(routes!(log))
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct RunFilter {
    /// Maximum number of ended runs, 1 to 1000.
    #[param(minimum = 1, maximum = 1000)]
    count: Option<usize>,
    /// Runs of this machine only.
    machine: Option<String>,
    /// Runs in this state only: running, ok, failed, cancelled or lost.
    state: Option<String>,
    /// Runs of this job only.
    job: Option<String>,
}

/// Runs, running ones first, then the newest first.
#[derive(Serialize, utoipa::ToSchema)]
struct Runs {
    runs: Vec<RunRecord>,
    /// Whether there may be older ones.
    has_more: bool,
}

/// Whether the caller sees a run: those without a machine concern all machines.
fn sees(caller: &Identity, run: &RunRecord) -> bool {
    // Logs of boot checks have lines of the machine's serial port.
    let command = run.plan.as_ref().map(|plan| plan.command.as_str());
    if caller.role == Role::Backup && command != Some("backup") {
        return false;
    }
    match run.plan.as_ref().and_then(|plan| plan.machine.as_deref()) {
        Some(machine) => caller.sees(machine),
        None => caller.sees_all(),
    }
}

/// List runs, running ones first, then the newest first.
#[utoipa::path(get, path = "/runs", tag = "runs", params(RunFilter),
    responses((status = 200, body = Runs), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn runs(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Fields(filter): Fields<RunFilter>,
) -> Answer<Json<Runs>> {
    caller.allow(Permission::ViewRuns)?;
    let count = filter.count.unwrap_or(100).clamp(1, MAX_RUNS);
    let is_filtered = filter.machine.is_some() || filter.state.is_some() || filter.job.is_some();
    // The newest of a filter, or of a caller's machines, may lie far behind those of others.
    let is_part = is_filtered || !caller.sees_all() || caller.role == Role::Backup;
    let looked_at = if is_part { MAX_RUNS } else { count };
    let reader = service.clone();
    let listed = blocking(move || reader.runs.list(looked_at)).await?;
    let is_chosen = |run: &RunRecord| {
        let plan = run.plan.as_ref();
        let is = |wanted: &Option<String>, found: Option<&str>| {
            wanted.as_deref().is_none_or(|wanted| Some(wanted) == found)
        };
        sees(&caller, run)
            && is(&filter.state, Some(run.state.word()))
            && is(&filter.machine, plan.and_then(|plan| plan.machine.as_deref()))
            && is(&filter.job, plan.and_then(|plan| plan.job.as_deref()))
    };
    let mut has_more = listed.hidden > 0;
    let mut left = count;
    let mut runs: Vec<RunRecord> = listed.runs.into_iter().filter(is_chosen).collect();
    runs.retain(|run| {
        let is_ended = run.state != RunState::Running;
        let fits = !is_ended || left > 0;
        left = left.saturating_sub(usize::from(is_ended));
        has_more |= !fits;
        fits
    });
    let runs = blocking(move || {
        runs.iter_mut().try_for_each(|run| add_end(&service, run))?;
        Ok(runs)
    });
    Ok(Json(Runs { runs: runs.await?, has_more }))
}

/// Adds when a lost run was found lost: its folder does not say it.
fn add_end(service: &Service, run: &mut RunRecord) -> Result<()> {
    if run.state == RunState::Lost {
        let found_ms = service.database.found_lost_ms(&run.id)?.unwrap_or_else(now_ms);
        run.ended_at_ms = u64::try_from(found_ms).ok();
    }
    Ok(())
}

/// The run, if the caller sees it.
///
/// # Errors
/// `InvalidInput` for a malformed id; `NotFound`.
pub(super) fn find(service: &Service, caller: &Identity, id: &str) -> Result<(RunId, RunRecord)> {
    caller.allow(Permission::ViewRuns)?;
    let id: RunId = id.parse()?;
    let mut run = service.runs.read(&id)?;
    add_end(service, &mut run)?;
    if !sees(caller, &run) {
        return Err(Error::new(ErrorKind::NotFound, format!("there is no run {id}")));
    }
    Ok((id, run))
}

/// Show a run.
#[utoipa::path(get, path = "/runs/{id}", tag = "runs", params(("id" = String, Path)),
    responses((status = 200, body = RunRecord), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn run(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(id): Names<String>,
) -> Answer<Json<RunRecord>> {
    blocking(move || find(&service, &caller, &id)).await.map(|(_, run)| Json(run))
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct LogPlace {
    /// Where to begin, as `next` of the answer before; the beginning if absent.
    offset: Option<u64>,
}

/// A piece of a log.
#[derive(Serialize, utoipa::ToSchema)]
struct LogPiece {
    lines: Vec<LogLine>,
    /// The offset of the next piece. It stays when there is no more yet.
    next: u64,
}

/// Read the log of a run, piece by piece.
#[utoipa::path(get, path = "/runs/{id}/log", tag = "runs", params(("id" = String, Path), LogPlace),
    responses((status = 200, body = LogPiece), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn log(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(id): Names<String>,
    Fields(place): Fields<LogPlace>,
) -> Answer<Json<LogPiece>> {
    let piece = blocking(move || {
        let (id, _) = find(&service, &caller, &id)?;
        let (lines, next) =
            service.runs.log_from(&id, place.offset.unwrap_or(0), LOG_PIECE_BYTES)?;
        Ok(LogPiece { lines, next })
    });
    piece.await.map(Json)
}
