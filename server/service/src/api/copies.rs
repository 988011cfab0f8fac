//! Where copies are, and how far behind.

use axum::Json;
use axum::extract::State;
use coldrise_block::{Error, ErrorKind};
use coldrise_inventory::IncomingDetails;
use coldrise_replica::TargetCopies;
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::Fields;
use super::problem::{Answer, Problem, blocking};
use crate::access::Permission;
use crate::clock::now_ms;
use crate::copies::{BehindDay, CopyRate};
use crate::service::SharedService;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(copies)).routes(routes!(history)).routes(routes!(incoming))
}

/// Show where copies are and how far behind, as `coldrise copies --json` does.
///
/// One entry per link to which this site sends, and per directory to which points were copied. A caller that is limited to
/// some machines sees these, and the sums over them.
#[utoipa::path(get, path = "/copies", tag = "copies",
    responses((status = 200, body = [TargetCopies]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn copies(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<Vec<TargetCopies>>> {
    caller.allow(Permission::View)?;
    let read = blocking(move || {
        // The reason if the repository is away.
        service.inventory()?.repository()?;
        let targets = service.copies.targets().unwrap_or_default();
        if caller.sees_all() {
            return Ok(targets.as_ref().clone());
        }
        let seen = targets.iter().map(|target| target.limited_to(|name| caller.sees(name)));
        Ok(seen.filter(|target| !target.machines.is_empty()).collect())
    });
    read.await.map(Json)
}

/// Show the points that are still on their way here from other sites, as `coldrise list --json` does.
///
/// They can be booted and recovered by their addresses; missing parts are fetched from the other site when they are read.
#[utoipa::path(get, path = "/coming", operation_id = "coming", tag = "copies",
    responses((status = 200, body = [IncomingDetails]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn incoming(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<Vec<IncomingDetails>>> {
    caller.allow(Permission::View)?;
    let read = blocking(move || {
        // The reason if the repository is away.
        service.inventory()?.repository()?;
        let all = service.copies.incoming();
        Ok(all.iter().filter(|one| caller.sees(&one.machine)).cloned().collect())
    });
    read.await.map(Json)
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct CopyHistoryQuestion {
    /// The target, as GET /copies names it.
    target: String,
}

/// The past of the copies at a target.
#[derive(Serialize, utoipa::ToSchema)]
struct CopyHistory {
    /// The rates of the last 15 minutes, the oldest first, about every 10 s while a copy runs.
    rates: Vec<CopyRate>,
    /// How far behind it was at most on each of the last 400 days (UTC), the oldest first. Days on which the service did not
    /// run are missing.
    days: Vec<BehindDay>,
}

/// Show the rates of the last minutes, and how far behind a target was on each day.
#[utoipa::path(get, path = "/copies/history", tag = "copies", params(CopyHistoryQuestion),
    responses((status = 200, body = CopyHistory), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn history(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Fields(question): Fields<CopyHistoryQuestion>,
) -> Answer<Json<CopyHistory>> {
    caller.allow_all(Permission::View)?;
    let read = blocking(move || {
        let id = service.inventory()?.id()?;
        let target = question.target;
        let targets = service.copies.targets().unwrap_or_default();
        if !targets.iter().any(|known| known.target == target) {
            let text = "there are no copies at this target: see GET /copies";
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let days = service.database.behind(&id, &target, now_ms())?;
        Ok(CopyHistory { rates: service.copies.rates(&target), days })
    });
    read.await.map(Json)
}
