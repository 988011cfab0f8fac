//! Servers of hypervisors, and machines that were recovered there.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use coldrise_block::Result;
use coldrise_hypervisors::vsphere::VspherePhase;
use coldrise_store::SessionName;
use serde::Serialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::{Body, Names};
use super::problem::{Answer, Problem, blocking};
use super::{recovered, settings};
use crate::access::Permission;
use crate::hypervisors::{Hypervisor, HypervisorSettings, put, remove, test, vsphere_note};
use crate::service::{Service, SharedService};

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(hypervisors))
        .routes(routes!(put_hypervisor, remove_hypervisor))
        .routes(routes!(test_hypervisor))
}

/// List the servers where machines can be recovered, without their passwords.
#[utoipa::path(get, path = "/hypervisors", tag = "hypervisors",
    responses((status = 200, body = [Hypervisor]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn hypervisors(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<Vec<Hypervisor>>> {
    caller.allow(Permission::Operate)?;
    blocking(move || service.database.hypervisors()).await.map(Json)
}

/// Add a server, or change it. An absent password stays if address and user stay the same.
#[utoipa::path(put, path = "/hypervisors/{name}", tag = "hypervisors", params(("name" = String, Path)),
    request_body = HypervisorSettings,
    responses((status = 200, body = Hypervisor), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn put_hypervisor(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
    Body(new): Body<HypervisorSettings>,
) -> Answer<Json<Hypervisor>> {
    let change = move |service: &Service| put(service, &name, &new);
    settings::change(service, &caller, change).await.map(Json)
}

/// Remove a server and its stored password. Refused while a session needs it.
#[utoipa::path(delete, path = "/hypervisors/{name}", tag = "hypervisors", params(("name" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn remove_hypervisor(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
) -> Answer<StatusCode> {
    settings::change(service, &caller, move |service| remove(service, &name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Log in to a server now, and list its hosts and datastores. `last_test` of the answer says how it went.
#[utoipa::path(post, path = "/hypervisors/{name}/test", tag = "hypervisors", params(("name" = String, Path)),
    responses((status = 200, body = Hypervisor), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn test_hypervisor(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
) -> Answer<Json<Hypervisor>> {
    let change = move |service: &Service| test(service, &name);
    settings::change(service, &caller, change).await.map(Json)
}

/// How far a recovery under vCenter or ESXi is.
#[derive(Clone, Copy, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum VsphereStage {
    /// A step up to power on may be missing.
    Starting,
    /// It was powered on.
    Running,
    /// vCenter copies its disks.
    Moving,
    /// Its disks are on production storage.
    Moved,
}

/// A machine that was recovered under vCenter or ESXi.
#[derive(Serialize, utoipa::ToSchema)]
pub(super) struct VsphereMachine {
    /// Its name there.
    name: String,
    /// HOST or HOST:PORT of the server.
    server: String,
    /// The server in the list of hypervisors; `null` if it is not there.
    hypervisor: Option<String>,
    /// The hosts that mount the datastore. The first one runs the machine.
    hosts: Vec<String>,
    /// The datastore from which it runs.
    datastore: String,
    phase: VsphereStage,
    /// For people: where the machine is, and what to do.
    sentence: String,
    /// The datastore that it moves to, or has moved to.
    target: Option<String>,
    /// The restore point of the session's last state, after a move.
    point: Option<String>,
    /// The run that serves its disks; `null` if another NFS server does, or nothing.
    run: Option<String>,
}

/// The machine of a session; `None` if none was recovered there.
///
/// # Errors
/// `Corrupt` if its note does not authenticate; those of reading runs.
pub(super) fn machine(service: &Service, session: &SessionName) -> Result<Option<VsphereMachine>> {
    let Some(note) = vsphere_note(service, session)? else { return Ok(None) };
    let sentence = note.sentence(session);
    let (phase, target, point) = match note.phase {
        VspherePhase::Starting => (VsphereStage::Starting, None, None),
        VspherePhase::Running => (VsphereStage::Running, None, None),
        VspherePhase::Moving { target } => (VsphereStage::Moving, Some(target), None),
        VspherePhase::Moved { target, point } => (VsphereStage::Moved, Some(target), point),
    };
    let known = service.database.hypervisors()?;
    let hypervisor = known.into_iter().find(|one| one.settings.address == note.access.server);
    Ok(Some(VsphereMachine {
        name: note.name,
        server: note.access.server,
        hypervisor: hypervisor.map(|one| one.name),
        hosts: note.hosts,
        datastore: note.datastore,
        phase,
        sentence,
        target,
        point,
        run: recovered::serving_run(service, session)?.map(|run| run.id),
    }))
}
