//! How the repository grew.

use axum::Json;
use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::problem::{Answer, Problem, blocking};
use crate::access::Permission;
use crate::clock::now_ms;
use crate::growth::GrowthSample;
use crate::service::SharedService;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(growth))
}

/// Show how the repository grew: its size on each of the last 400 days, the oldest first.
///
/// The service measures it every 6 hours and keeps the last value of each day (UTC). Days on which it did not run
/// are missing.
#[utoipa::path(get, path = "/repository/growth", tag = "repository",
    responses((status = 200, body = [GrowthSample]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn growth(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<Vec<GrowthSample>>> {
    caller.allow_all(Permission::View)?;
    let read = blocking(move || service.database.growth(&service.inventory()?.id()?, now_ms()));
    read.await.map(Json)
}
