//! The metrics, for Prometheus.

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::problem::{Answer, Problem, blocking};
use crate::access::Permission;
use crate::metrics;
use crate::service::SharedService;

/// The form of the answer.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(metrics))
}

/// Read the metrics. A token that is limited to some machines gets theirs only.
#[utoipa::path(get, path = "/metrics", tag = "service",
    responses((status = 200, body = String, content_type = "application/openmetrics-text"), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn metrics(State(service): State<SharedService>, Caller(caller): Caller) -> Answer<Response> {
    caller.allow(Permission::Metrics)?;
    let text = blocking(move || metrics::text(&service, &caller)).await?;
    Ok(([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}
