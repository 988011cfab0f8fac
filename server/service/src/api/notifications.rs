//! Alarms, and the targets of messages.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::{Body, Fields, Names};
use super::problem::{Answer, Problem, blocking};
use super::settings;
use crate::access::Permission;
use crate::events::What;
use crate::notifications::settings::MessageSettings;
use crate::notifications::targets::{Target, TargetResult, TargetSettings};
use crate::notifications::{Alarm, all_alarms, no_alarm, send_test};
use crate::service::{Service, SharedService};

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(alarms))
        .routes(routes!(acknowledge))
        .routes(routes!(targets, add_target))
        .routes(routes!(change_target, remove_target))
        .routes(routes!(test_target))
        .routes(routes!(message_settings, change_settings))
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct AlarmFilter {
    /// true: only alarms that hold; false: only cleared ones.
    active: Option<bool>,
    /// Alarms of this machine only.
    machine: Option<String>,
}

/// List alarms, the newest first: those that hold, and those cleared in the last 90 days.
#[utoipa::path(get, path = "/alarms", tag = "notifications", params(AlarmFilter),
    responses((status = 200, body = [Alarm]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn alarms(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Fields(filter): Fields<AlarmFilter>,
) -> Answer<Json<Vec<Alarm>>> {
    caller.allow(Permission::View)?;
    let mut found = blocking(move || all_alarms(&service)).await?;
    found.retain(|alarm| {
        alarm.is_seen_by(&caller)
            && filter.active.is_none_or(|active| alarm.is_active() == active)
            && filter.machine.as_ref().is_none_or(|machine| alarm.condition.is_about(machine))
    });
    Ok(Json(found))
}

/// Acknowledge an alarm: no more reminders, until it becomes worse or comes back.
#[utoipa::path(post, path = "/alarms/{key}/acknowledge", tag = "notifications", params(("key" = String, Path)),
    responses((status = 200, body = Alarm), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn acknowledge(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(key): Names<String>,
) -> Answer<Json<Alarm>> {
    caller.allow(Permission::Operate)?;
    let acknowledged = blocking(move || {
        let mut found = all_alarms(&service)?.into_iter();
        if !found.any(|alarm| alarm.condition.key == key && alarm.is_seen_by(&caller)) {
            return Err(no_alarm(&key));
        }
        let alarm = service.database.acknowledge(&key, &caller.name)?;
        let machine = alarm.condition.machine.clone();
        service.events.send(What::Alarm { key, machine });
        Ok(alarm)
    });
    acknowledged.await.map(Json)
}

/// List the targets of messages, without their secrets.
#[utoipa::path(get, path = "/notifications/targets", tag = "notifications",
    responses((status = 200, body = [Target]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn targets(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<Vec<Target>>> {
    caller.allow_all(Permission::Administer)?;
    blocking(move || service.database.targets()).await.map(Json)
}

/// Add a target.
#[utoipa::path(post, path = "/notifications/targets", tag = "notifications", request_body = TargetSettings,
    responses((status = 201, body = Target), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn add_target(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Body(new): Body<TargetSettings>,
) -> Answer<(StatusCode, Json<Target>)> {
    let add = move |service: &Service| service.database.add_target(&new);
    Ok((StatusCode::CREATED, Json(settings::change(service, &caller, add).await?)))
}

/// Change a target. Absent secrets stay if the server stays the same. What waits for it is sent at once.
#[utoipa::path(put, path = "/notifications/targets/{id}", tag = "notifications", params(("id" = String, Path)),
    request_body = TargetSettings,
    responses((status = 200, body = Target), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn change_target(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(id): Names<String>,
    Body(new): Body<TargetSettings>,
) -> Answer<Json<Target>> {
    let changed = settings::change(service, &caller, move |service| {
        let changed = service.database.change_target(&id, new)?;
        service.messenger.wake();
        Ok(changed)
    });
    changed.await.map(Json)
}

/// Remove a target. What waits for it is never sent.
#[utoipa::path(delete, path = "/notifications/targets/{id}", tag = "notifications", params(("id" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn remove_target(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(id): Names<String>,
) -> Answer<StatusCode> {
    settings::change(service, &caller, move |service| service.database.remove_target(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Send a test to a target now. The answer says whether the target took it, within 30 seconds.
#[utoipa::path(post, path = "/notifications/targets/{id}/test", tag = "notifications", params(("id" = String, Path)),
    responses((status = 200, body = TargetResult), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn test_target(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(id): Names<String>,
) -> Answer<Json<TargetResult>> {
    caller.allow_all(Permission::Administer)?;
    Ok(Json(send_test(&service, id, &caller.name).await?))
}

/// Read the settings of all messages.
#[utoipa::path(get, path = "/notifications/settings", tag = "notifications",
    responses((status = 200, body = MessageSettings), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn message_settings(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<MessageSettings>> {
    caller.allow_all(Permission::Administer)?;
    blocking(move || service.database.message_settings()).await.map(Json)
}

/// Change the settings of all messages.
#[utoipa::path(put, path = "/notifications/settings", tag = "notifications", request_body = MessageSettings,
    responses((status = 200, body = MessageSettings), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn change_settings(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Body(new): Body<MessageSettings>,
) -> Answer<Json<MessageSettings>> {
    let changed = settings::change(service, &caller, move |service| {
        service.database.set_message_settings(&new)?;
        Ok(new)
    });
    changed.await.map(Json)
}
