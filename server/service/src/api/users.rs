//! Users.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use coldrise_block::{Error, ErrorKind};
use serde::Deserialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::{Body, Names};
use super::problem::{Answer, Problem, blocking};
use super::settings;
use crate::access::users::User;
use crate::access::{Permission, Proof, Role};
use crate::events::What;
use crate::service::SharedService;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(users, add_user)).routes(routes!(change_user, remove_user))
}

/// List users.
#[utoipa::path(get, path = "/users", tag = "access", responses((status = 200, body = [User]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn users(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<Vec<User>>> {
    caller.allow_all(Permission::Administer)?;
    blocking(move || service.database.users()).await.map(Json)
}

#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct NewUser {
    /// 1 to 64 of a-z, 0-9, and . _ @ -
    name: String,
    role: Role,
    /// 10 to 1024 bytes.
    password: String,
}

/// Add a user.
#[utoipa::path(post, path = "/users", tag = "access", request_body = NewUser,
    responses((status = 201, body = User), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn add_user(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Body(new): Body<NewUser>,
) -> Answer<(StatusCode, Json<User>)> {
    let added = settings::change(service, &caller, move |service| {
        let added = service.database.add_user(&new.name, new.role, &new.password)?;
        if added.role == Role::Admin {
            service.first_admin.notify_one();
        }
        Ok(added)
    });
    Ok((StatusCode::CREATED, Json(added.await?)))
}

#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct UserChange {
    role: Option<Role>,
    password: Option<String>,
    /// The caller's own password: required to change one's own.
    own_password: Option<String>,
}

/// Change a user's role or password. Users change their own password with the old one.
#[utoipa::path(patch, path = "/users/{name}", tag = "access", params(("name" = String, Path)), request_body = UserChange,
    responses((status = 200, body = User), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn change_user(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
    Body(change): Body<UserChange>,
) -> Answer<Json<User>> {
    let is_own = caller.name == name && matches!(caller.proof, Proof::Login(_));
    if !(is_own && change.role.is_none()) {
        caller.allow_all(Permission::Administer)?;
    }
    let changed = blocking(move || {
        if is_own {
            let own = change.own_password.as_deref().unwrap_or_default();
            if !service.database.is_password(&name, own)? {
                return Err(Error::new(ErrorKind::Forbidden, "own_password is wrong"));
            }
        }
        let changed =
            service.database.change_user(&name, change.role, change.password.as_deref())?;
        service.events.send(What::Settings);
        Ok(changed)
    });
    changed.await.map(Json)
}

/// Remove a user and end all its logins. The last administrator stays.
#[utoipa::path(delete, path = "/users/{name}", tag = "access", params(("name" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn remove_user(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(name): Names<String>,
) -> Answer<StatusCode> {
    settings::change(service, &caller, move |service| service.database.remove_user(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
