//! Machines, restore points, sessions, space, damage: what the repository holds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::{
    ActivityTotals, DamageListing, Listing, MachineSummary, MarksDetails, PointDetails, PointPage,
    PointQuery, Retention, RetentionPlan, SessionDetails, SessionListing, Stats,
};
use coldrise_session::ActivityDetail;
use coldrise_store::{MachineName, PointName, PointSelector, SessionName};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::console::{self, Machine};
use super::hypervisors::{self, VsphereMachine};
use super::input::{Body, Fields, Names};
use super::problem::{Answer, Problem, blocking};
use super::recovered::{self, Moved, Recovered};
use super::starts::live;
use crate::access::{Identity, Permission};
use crate::searched::searched;
use crate::service::SharedService;

/// Statistics are read again after this time at the earliest: they read every chunk map.
const SPACE_AGE: Duration = Duration::from_secs(60);
/// Maximum number of machines in a preview.
const MAX_MACHINES: usize = 10_000;

/// The statistics that were read last. The lock is held while they are read: callers wait for one
/// reading.
static SPACE: Mutex<Option<(Instant, Arc<String>)>> = Mutex::new(None);

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(machines))
        .routes(routes!(display_names))
        .routes(routes!(machine))
        .routes(routes!(all_points))
        .routes(routes!(points))
        .routes(routes!(point))
        .routes(routes!(screenshot))
        .routes(routes!(sessions))
        .routes(routes!(session))
        .routes(routes!(session_activity))
        .routes(routes!(session_history))
        .routes(routes!(session_marks))
        .routes(routes!(space))
        .routes(routes!(damage))
        .routes(routes!(preview_retention))
}

/// A machine that the caller may see.
pub(super) fn named(
    caller: &Identity,
    permission: Permission,
    machine: &str,
) -> Result<MachineName> {
    caller.allow_machine(permission, machine)?;
    machine.parse()
}

/// A point's name, `latest` or `latest~1`.
pub(super) fn selector(point: &str) -> Result<PointSelector> {
    PointSelector::parse(point)
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct MachineFilter {
    /// Words that must all be in the name or in the display name, in any case.
    #[param(max_length = 1024)]
    search: Option<String>,
}

impl MachineFilter {
    fn accepts(&self, machine: &MachineSummary) -> bool {
        let display_name = machine.display_name.as_deref().unwrap_or_default();
        let text = searched(&format!("{} {display_name}", machine.machine));
        let words = searched(self.search.as_deref().unwrap_or_default());
        words.split_whitespace().all(|word| text.contains(word))
    }
}

/// List machines, each with its state: newest and last good point, boot checks, counts.
#[utoipa::path(get, path = "/machines", tag = "machines", params(MachineFilter),
    responses((status = 200, body = [MachineSummary]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn machines(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Fields(filter): Fields<MachineFilter>,
) -> Answer<Json<Vec<MachineSummary>>> {
    caller.allow(Permission::View)?;
    let listed = blocking(move || {
        let mut machines = service.inventory()?.machines()?;
        machines.retain(|machine| caller.sees(&machine.machine) && filter.accepts(machine));
        Ok(machines)
    });
    listed.await.map(Json)
}

/// List the display names of the machines that have one, by the machine's name.
#[utoipa::path(get, path = "/display-names", tag = "machines",
    responses((status = 200, body = BTreeMap<String, String>), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn display_names(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<BTreeMap<String, String>>> {
    caller.allow(Permission::View)?;
    let listed = blocking(move || {
        let mut names = service.inventory()?.display_names()?;
        names.retain(|machine, _| caller.sees(machine));
        Ok(names)
    });
    listed.await.map(Json)
}

/// Show the state of a machine.
#[utoipa::path(get, path = "/machines/{machine}", tag = "machines", params(("machine" = String, Path)),
    responses((status = 200, body = MachineSummary), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn machine(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(machine): Names<String>,
) -> Answer<Json<MachineSummary>> {
    let machine = named(&caller, Permission::View, &machine)?;
    blocking(move || service.inventory()?.machine(&machine)).await.map(Json)
}

/// List all points of all machines, as `coldrise list --json` does.
#[utoipa::path(get, path = "/points", tag = "machines",
    responses((status = 200, body = Listing), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn all_points(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Response> {
    caller.allow(Permission::View)?;
    let listed = blocking(move || {
        let mut listing = service.inventory()?.listing(None)?;
        if !caller.sees_all() {
            listing.machines.retain(|machine| caller.sees(&machine.machine));
            listing.lost.retain(|lost| {
                caller.sees(lost.split_once('/').map_or(lost.as_str(), |(machine, _)| machine))
            });
        }
        // A large list: made on this thread, not on one that serves connections.
        let text = serde_json::to_vec(&listing)
            .map_err(|error| Error::with_source(ErrorKind::Internal, "the list", error))?;
        drop(listing);
        coldrise_store::return_free_memory();
        Ok(text)
    });
    let json = (header::CONTENT_TYPE, "application/json");
    Ok(([json], listed.await?).into_response())
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct PageFilter {
    /// Points later than this one only, such as 20261120T100000Z.
    after: Option<String>,
    /// Points earlier than this one only.
    before: Option<String>,
    /// The newest of these only.
    #[param(minimum = 1)]
    limit: Option<usize>,
}

/// List points of a machine, the oldest first.
#[utoipa::path(get, path = "/machines/{machine}/points", tag = "machines", params(("machine" = String, Path), PageFilter),
    responses((status = 200, body = PointPage), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn points(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(machine): Names<String>,
    Fields(filter): Fields<PageFilter>,
) -> Answer<Json<PointPage>> {
    let machine = named(&caller, Permission::View, &machine)?;
    let name = |text: Option<String>| text.map(|text| text.parse::<PointName>()).transpose();
    let query = PointQuery {
        after: name(filter.after)?,
        before: name(filter.before)?,
        limit: filter.limit,
    };
    blocking(move || service.inventory()?.points(&machine, &query)).await.map(Json)
}

/// Show a point: its disks, origin, boot check with all evidence. POINT can be `latest` or `latest~1`.
#[utoipa::path(get, path = "/machines/{machine}/points/{point}", tag = "machines",
    params(("machine" = String, Path), ("point" = String, Path)),
    responses((status = 200, body = PointDetails), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn point(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names((machine, point)): Names<(String, String)>,
) -> Answer<Json<PointDetails>> {
    let (machine, point) = (named(&caller, Permission::View, &machine)?, selector(&point)?);
    blocking(move || service.inventory()?.point(&machine, &point)).await.map(Json)
}

/// Get the picture of the screen at the end of the point's last boot check.
#[utoipa::path(get, path = "/machines/{machine}/points/{point}/screenshot.png", tag = "machines",
    params(("machine" = String, Path), ("point" = String, Path)),
    responses((status = 200, body = Vec<u8>, content_type = "image/png"), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn screenshot(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names((machine, point)): Names<(String, String)>,
) -> Answer<Response> {
    let (machine, point) = (named(&caller, Permission::ReadContent, &machine)?, selector(&point)?);
    let picture = blocking(move || service.inventory()?.boot_screenshot(&machine, &point)).await?;
    match picture {
        Some(picture) => Ok(([(header::CONTENT_TYPE, "image/png")], picture).into_response()),
        None => {
            let text = "this point has no picture: check its boot first";
            Err(Problem::new(StatusCode::NOT_FOUND, ErrorKind::NotFound, text))
        }
    }
}

/// List published sessions, with what they have captured.
#[utoipa::path(get, path = "/sessions", tag = "sessions",
    responses((status = 200, body = SessionListing), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn sessions(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<SessionListing>> {
    caller.allow(Permission::View)?;
    let listed = blocking(move || {
        let mut listing = service.inventory()?.sessions()?;
        listing.sessions.retain(|session| caller.sees(&session.machine));
        Ok(listing)
    });
    listed.await.map(Json)
}

/// A session, and the machine that runs on it.
#[derive(Serialize, utoipa::ToSchema)]
struct SessionAndMachine {
    #[serde(flatten)]
    session: SessionDetails,
    /// The machine that runs on it; `null` if none does.
    running: Option<Machine>,
    /// The machine that was recovered on it under libvirt; `null` if none was.
    recovered: Option<Recovered>,
    /// The machine that was recovered on it under vCenter or ESXi; `null` if none was.
    vsphere: Option<VsphereMachine>,
    /// The move of its disks to production storage, under way or done; `null` without one.
    moved: Option<Moved>,
}

/// Show a session, the machine that runs on it, and if it is served, by whom and what clients did with its disks.
#[utoipa::path(get, path = "/sessions/{session}", tag = "sessions", params(("session" = String, Path)),
    responses((status = 200, body = SessionAndMachine), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn session(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(session): Names<String>,
) -> Answer<Json<SessionAndMachine>> {
    read_session(service, caller, session, ActivityDetail::Totals).await.map(Json)
}

/// List the time marks of a session: the times to which it can go back.
#[utoipa::path(get, path = "/sessions/{session}/marks", tag = "sessions", params(("session" = String, Path)),
    responses((status = 200, body = MarksDetails), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn session_marks(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(session): Names<String>,
) -> Answer<Json<MarksDetails>> {
    let session = session.parse::<SessionName>()?;
    let marks = blocking(move || {
        live(&service, &caller, Permission::View, &session)?;
        service.inventory()?.session_marks(&session)
    });
    marks.await.map(Json)
}

/// Show a session as `/sessions/{session}` does, with a heat map of each disk of a served session.
#[utoipa::path(get, path = "/sessions/{session}/activity", tag = "sessions", params(("session" = String, Path)),
    responses((status = 200, body = SessionAndMachine), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn session_activity(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(session): Names<String>,
) -> Answer<Json<SessionAndMachine>> {
    read_session(service, caller, session, ActivityDetail::HeatMaps).await.map(Json)
}

/// List what clients did with a served session in the last 15 minutes: samples, the oldest first, one per 2 s in
/// which something happened.
#[utoipa::path(get, path = "/sessions/{session}/activity/history", tag = "sessions", params(("session" = String, Path)),
    responses((status = 200, body = [ActivityTotals]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn session_history(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(session): Names<String>,
) -> Answer<Json<Vec<ActivityTotals>>> {
    let read = blocking(move || {
        let session = live(&service, &caller, Permission::View, &session.parse()?)?;
        let mut samples = service.history.of(&session.session);
        // An earlier session of this name can have been another machine's.
        samples.retain(|sample| sample.machine == session.machine);
        Ok(samples)
    });
    read.await.map(Json)
}

async fn read_session(
    service: SharedService,
    caller: Identity,
    session: String,
    detail: ActivityDetail,
) -> Answer<SessionAndMachine> {
    caller.allow(Permission::View)?;
    blocking(move || {
        let name: SessionName = session.parse()?;
        let inventory = service.inventory()?;
        if !caller.sees_all() {
            // The error for an unknown session names all; this caller may not see all.
            live(&service, &caller, Permission::View, &name)?;
        }
        let running = console::machine(&service, &name)?;
        let session = inventory.session(&name, detail)?;
        let (recovered, moved) = recovered::read(&service, &name)?;
        let vsphere = hypervisors::machine(&service, &name)?;
        Ok(SessionAndMachine { session, running, recovered, vsphere, moved })
    })
    .await
}

/// Show the space of the repository, as `coldrise stats --json` does.
///
/// This reads every chunk map: minutes in a large repository. It is read at most once a minute.
#[utoipa::path(get, path = "/repository/space", tag = "repository",
    responses((status = 200, body = Stats), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn space(State(service): State<SharedService>, Caller(caller): Caller) -> Answer<Response> {
    caller.allow_all(Permission::View)?;
    let read = blocking(move || {
        let mut known = SPACE.lock();
        if let Some((_, text)) = known.as_ref().filter(|(at, _)| at.elapsed() < SPACE_AGE) {
            return Ok(text.clone());
        }
        let stats = service.inventory()?.space(&AtomicBool::new(false))?;
        let text = serde_json::to_string(&stats)
            .map_err(|error| Error::with_source(ErrorKind::Internal, "the statistics", error))?;
        let text = Arc::new(text);
        *known = Some((Instant::now(), text.clone()));
        Ok(text)
    });
    let json = (header::CONTENT_TYPE, "application/json");
    Ok(([json], read.await?.to_string()).into_response())
}

/// List known damage and what it affects. Reads no disk; a verify run does.
#[utoipa::path(get, path = "/repository/damage", tag = "repository",
    responses((status = 200, body = DamageListing), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn damage(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<DamageListing>> {
    caller.allow_all(Permission::View)?;
    blocking(move || service.inventory()?.damage()).await.map(Json)
}

/// Rules, and the machines that they are tried on.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct RetentionQuestion {
    rules: Retention,
    /// Names of machines; all if absent.
    #[schema(max_items = 10000)]
    machines: Option<Vec<String>>,
}

/// Show which points retention rules would keep and remove now, and why. Changes nothing.
#[utoipa::path(post, path = "/retention/preview", tag = "repository", request_body = RetentionQuestion,
    responses((status = 200, body = RetentionPlan), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn preview_retention(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Body(question): Body<RetentionQuestion>,
) -> Answer<Json<RetentionPlan>> {
    caller.allow(Permission::View)?;
    let names = question.machines.unwrap_or_default();
    if names.is_empty() {
        caller.allow_all(Permission::View)?;
    }
    if names.len() > MAX_MACHINES {
        let text = format!("machines: at most {MAX_MACHINES}");
        return Err(Error::new(ErrorKind::InvalidInput, text).into());
    }
    let machines = names
        .iter()
        .map(|name| named(&caller, Permission::View, name))
        .collect::<Result<Vec<_>>>()?;
    blocking(move || {
        service.inventory()?.retention_preview(&question.rules.rules(), &machines, None)
    })
    .await
    .map(Json)
}
