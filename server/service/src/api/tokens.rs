//! Tokens and the audit log.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::{Body, Fields, Names};
use super::problem::{Answer, Problem, blocking};
use super::settings;
use crate::access::Permission;
use crate::access::audit::{AuditChain, AuditEntry};
use crate::access::tokens::{NewToken, Token};
use crate::service::{Service, SharedService};

/// Maximum number of audit entries per answer.
const MAX_ENTRIES: u32 = 1000;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(tokens, add_token))
        .routes(routes!(remove_token))
        .routes(routes!(audit))
        .routes(routes!(audit_chain))
}

/// List tokens, without their secrets.
#[utoipa::path(get, path = "/tokens", tag = "access", responses((status = 200, body = [Token]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn tokens(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<Vec<Token>>> {
    caller.allow_all(Permission::Administer)?;
    blocking(move || service.database.tokens()).await.map(Json)
}

/// A new token, with its text, which is shown once.
#[derive(Serialize, utoipa::ToSchema)]
struct MadeToken {
    #[serde(flatten)]
    token: Token,
    /// Send it as `Authorization: Bearer TEXT`.
    text: String,
}

/// Make a token. Its text is in this answer only.
#[utoipa::path(post, path = "/tokens", tag = "access", request_body = NewToken,
    responses((status = 201, body = MadeToken), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn add_token(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Body(new): Body<NewToken>,
) -> Answer<(StatusCode, Json<MadeToken>)> {
    let name = caller.name.clone();
    let add = move |service: &Service| service.database.add_token(&new, &name);
    let (token, text) = settings::change(service, &caller, add).await?;
    Ok((StatusCode::CREATED, Json(MadeToken { token, text })))
}

/// Revoke a token.
#[utoipa::path(delete, path = "/tokens/{id}", tag = "access", params(("id" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn remove_token(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(id): Names<String>,
) -> Answer<StatusCode> {
    settings::change(service, &caller, move |service| service.database.remove_token(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct AuditPage {
    /// Entries before this number only.
    before: Option<i64>,
    /// Maximum number of entries, 1 to 1000.
    #[param(minimum = 1, maximum = 1000)]
    count: Option<u32>,
}

/// Read the audit log, the newest entries first.
#[utoipa::path(get, path = "/audit", tag = "access", params(AuditPage),
    responses((status = 200, body = [AuditEntry]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn audit(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Fields(page): Fields<AuditPage>,
) -> Answer<Json<Vec<AuditEntry>>> {
    caller.allow_all(Permission::Administer)?;
    let count = page.count.unwrap_or(100).clamp(1, MAX_ENTRIES);
    blocking(move || service.database.audit_entries(page.before, count)).await.map(Json)
}

/// Check that no entry of the audit log was changed or removed.
#[utoipa::path(get, path = "/audit/chain", tag = "access", responses((status = 200, body = AuditChain), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn audit_chain(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<AuditChain>> {
    caller.allow_all(Permission::Administer)?;
    blocking(move || service.database.audit_chain()).await.map(Json)
}
