//! The power switch of a machine.

use axum::extract::State;
use axum::http::StatusCode;
use coldrise_runs::MachineSocket;
use serde::Deserialize;
use serde_json::Value;

use super::{PATIENCE, Running};
use crate::api::caller::Caller;
use crate::api::input::{Body, Names};
use crate::api::problem::{Answer, Problem, blocking};
use crate::service::SharedService;

/// What the switch does.
#[derive(Clone, Copy, Debug, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum PowerAction {
    /// Press the power button: the machine's system shuts down, if it listens to the button.
    Shutdown,
    /// Restart it at once, as the reset button does.
    Reset,
    /// Switch it off at once. The session keeps what reached the disks.
    Off,
    /// Continue after a pause.
    Resume,
}

#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Power {
    action: PowerAction,
}

/// Press the power switch of the machine on a session. Its run ends when the machine is off.
#[utoipa::path(post, path = "/sessions/{session}/power", tag = "sessions", params(("session" = String, Path)),
    request_body = Power,
    responses((status = 202), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
pub(super) async fn power(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(session): Names<String>,
    Body(power): Body<Power>,
) -> Answer<StatusCode> {
    blocking(move || {
        let running = Running::find(&service, caller, &session)?;
        let mut monitor = running.monitor(&service, MachineSocket::Monitor)?;
        let command = match power.action {
            PowerAction::Shutdown => "system_powerdown",
            PowerAction::Reset => "system_reset",
            PowerAction::Off => "quit",
            PowerAction::Resume => "cont",
        };
        monitor.execute(command, Value::Null, PATIENCE)
    })
    .await?;
    Ok(StatusCode::ACCEPTED)
}
