//! The first administrator, logging in and out.

use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::{self, COOKIE, Caller};
use super::input::{Body, Names};
use super::problem::{Answer, Problem, blocking};
use crate::access::audit::AuditNote;
use crate::access::logins::Login;
use crate::access::{Identity, Proof, Role};
use crate::listener::Peer;
use crate::pattern::Pattern;
use crate::service::SharedService;

/// Wait after a failed login.
const FAILED_LOGIN_WAIT: Duration = Duration::from_secs(1);

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(set_up))
        .routes(routes!(log_in, log_out))
        .routes(routes!(me))
        .routes(routes!(logins))
        .routes(routes!(end_login))
}

#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct Setup {
    /// The secret at the end of the one-time link.
    secret: String,
    user: String,
    /// 10 to 1024 bytes.
    password: String,
}

#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct Credentials {
    user: String,
    password: String,
}

/// The caller, as the service knows it.
#[derive(Serialize, utoipa::ToSchema)]
struct Me {
    name: String,
    role: Role,
    machines: Vec<Pattern>,
}

impl From<&Identity> for Me {
    fn from(identity: &Identity) -> Me {
        Me { name: identity.name.clone(), role: identity.role, machines: identity.machines.clone() }
    }
}

/// Make the first administrator with the one-time link. Logs in.
#[utoipa::path(post, path = "/setup", tag = "access", request_body = Setup,
    responses((status = 200, body = Me), (status = "4XX", body = Problem, content_type = "application/problem+json")))]
async fn set_up(
    State(service): State<SharedService>,
    peer: Option<Extension<Peer>>,
    Body(setup): Body<Setup>,
) -> Answer<Response> {
    let source = caller::source(peer.as_deref());
    limit(&service, &source, &setup.user, "setup").await?;
    let (shared, from) = (service.clone(), source.clone());
    let user = setup.user.clone();
    let made = blocking(move || {
        let database = &service.database;
        crate::access::users::check_name(&setup.user)?;
        // First: a mistake must not use the link up.
        crate::access::check_password(&setup.password)?;
        let done = match database.take_setup_secret(&setup.secret)? {
            true => make_admin(&service, &setup),
            false => Err(Error::new(ErrorKind::InvalidInput, "the link is wrong, used or too old")
                .advise("make a new one on the host: coldrised setup-link")),
        };
        note(&service, &setup.user, &from, "setup", &done)?;
        done
    });
    match made.await {
        Ok(()) => {
            shared.first_admin.notify_one();
            start_login(shared, user, source).await
        }
        Err(problem) => {
            tokio::time::sleep(FAILED_LOGIN_WAIT).await;
            Err(problem)
        }
    }
}

/// Adds the administrator, or gives an existing user the role and the password. After a failure
/// the link can be used again only if a new one is made.
fn make_admin(service: &SharedService, setup: &Setup) -> Result<()> {
    match service.database.add_user(&setup.user, Role::Admin, &setup.password) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => service
            .database
            .change_user(&setup.user, Some(Role::Admin), Some(&setup.password))
            .map(|_| ()),
        done => done.map(|_| ()),
    }
}

fn note(
    service: &SharedService,
    who: &str,
    source: &str,
    action: &str,
    done: &Result<()>,
) -> Result<()> {
    let result = done.as_ref().map_or_else(|error| error.kind().word(), |()| "ok");
    let note = AuditNote { who: "nobody", source, action, subject: who, result };
    service.database.audit(&note)
}

/// Refuses a guesser.
async fn limit(service: &SharedService, source: &str, user: &str, action: &str) -> Answer<()> {
    let user: String = user.chars().take(64).collect();
    if service.login_limits.take(&buckets(source, &user), Instant::now()) {
        return Ok(());
    }
    tracing::warn!("{action}: too many attempts from {source} for {user:?}");
    let text = "too many attempts: wait a minute";
    Err(Problem::new(StatusCode::TOO_MANY_REQUESTS, ErrorKind::Busy, text))
}

fn buckets(source: &str, user: &str) -> [String; 2] {
    [format!("address {source}"), format!("user {user}")]
}

/// Log in with user and password. The answer sets a cookie.
#[utoipa::path(post, path = "/login", tag = "access", request_body = Credentials,
    responses((status = 200, body = Me), (status = "4XX", body = Problem, content_type = "application/problem+json")))]
async fn log_in(
    State(service): State<SharedService>,
    peer: Option<Extension<Peer>>,
    Body(given): Body<Credentials>,
) -> Answer<Response> {
    let source = caller::source(peer.as_deref());
    limit(&service, &source, &given.user, "login").await?;
    let (shared, user, from) = (service.clone(), given.user.clone(), source.clone());
    let is_right = blocking(move || {
        let is_right = service.database.is_password(&given.user, &given.password)?;
        let result = if is_right { "ok" } else { "refused" };
        let note = AuditNote {
            who: "nobody",
            source: &from,
            action: "login",
            subject: &given.user,
            result,
        };
        // A full disk must not lock administrators out: the log has the line.
        let _ = service.database.audit(&note);
        Ok(is_right)
    });
    if !is_right.await? {
        tokio::time::sleep(FAILED_LOGIN_WAIT).await;
        let text = "user or password is wrong";
        return Err(Problem::new(StatusCode::UNAUTHORIZED, ErrorKind::Unauthorized, text));
    }
    shared.login_limits.give_back(&buckets(&source, &user));
    start_login(shared, user, source).await
}

async fn start_login(service: SharedService, user: String, source: String) -> Answer<Response> {
    let (secret, me) = blocking(move || {
        let secret = service.database.add_login(&user, &source)?;
        let found = service.database.user(&user)?;
        Ok((secret, Me { name: found.name, role: found.role, machines: vec![Pattern::all()] }))
    })
    .await?;
    let cookie = format!(
        "{COOKIE}={}; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age=43200",
        secret.text()
    );
    Ok(([(header::SET_COOKIE, cookie)], Json(me)).into_response())
}

/// Log out. The cookie is void afterwards.
#[utoipa::path(delete, path = "/login", tag = "access", responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("login" = [])))]
async fn log_out(State(service): State<SharedService>, Caller(caller): Caller) -> Answer<Response> {
    if let Proof::Login(id) = caller.proof.clone() {
        blocking(move || service.database.remove_login(&id, None)).await?;
    }
    let cookie = format!("{COOKIE}=; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age=0");
    Ok((StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie)]).into_response())
}

/// Who the caller is.
#[utoipa::path(get, path = "/me", tag = "access", responses((status = 200, body = Me), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn me(Caller(caller): Caller) -> Json<Me> {
    Json(Me::from(&caller))
}

/// List logins: the caller's own, for administrators all.
#[utoipa::path(get, path = "/logins", tag = "access", responses((status = 200, body = [Login]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn logins(
    State(service): State<SharedService>,
    Caller(caller): Caller,
) -> Answer<Json<Vec<Login>>> {
    let user = (caller.role != Role::Admin).then(|| caller.name.clone());
    blocking(move || service.database.logins(user.as_deref())).await.map(Json)
}

/// End a login: an own one, for administrators any.
#[utoipa::path(delete, path = "/logins/{id}", tag = "access", params(("id" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn end_login(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(id): Names<String>,
) -> Answer<StatusCode> {
    let user = (caller.role != Role::Admin).then(|| caller.name.clone());
    blocking(move || service.database.remove_login(&id, user.as_deref())).await?;
    Ok(StatusCode::NO_CONTENT)
}
