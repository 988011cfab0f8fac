//! Logging in, users, tokens, the audit log.

use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::{header, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::{self, Caller, COOKIE};
use super::input::{Body, Fields, Names};
use super::problem::{blocking, Answer, Problem};
use crate::access::audit::{AuditChain, AuditEntry, AuditNote};
use crate::access::logins::Login;
use crate::access::tokens::{NewToken, Token};
use crate::access::users::User;
use crate::access::{Identity, Permission, Proof, Role};
use crate::events::What;
use crate::listener::Peer;
use crate::pattern::Pattern;
use crate::service::SharedService;

/// Wait after a failed login.
const FAILED_LOGIN_WAIT: Duration = Duration::from_secs(1);
/// Maximum number of audit entries per answer.
const MAX_ENTRIES: u32 = 1000;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(set_up))
        .routes(routes!(log_in, log_out))
        .routes(routes!(me))
        .routes(routes!(logins))
        .routes(routes!(end_login))
        .routes(routes!(users, add_user))
        .routes(routes!(change_user, remove_user))
        .routes(routes!(tokens, add_token))
        .routes(routes!(remove_token))
        .routes(routes!(audit))
        .routes(routes!(audit_chain))
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
        return Err(Problem::new(StatusCode::UNAUTHORIZED, ErrorKind::ReadOnly, text));
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
    caller.allow_all(Permission::Administer)?;
    let added = blocking(move || {
        let added = service.database.add_user(&new.name, new.role, &new.password)?;
        if added.role == Role::Admin {
            service.first_admin.notify_one();
        }
        service.events.send(What::Settings);
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
                return Err(Error::new(ErrorKind::ReadOnly, "own_password is wrong"));
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
    caller.allow_all(Permission::Administer)?;
    blocking(move || {
        service.database.remove_user(&name)?;
        service.events.send(What::Settings);
        Ok(())
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
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
    caller.allow_all(Permission::Administer)?;
    let made = blocking(move || {
        let (token, text) = service.database.add_token(&new, &caller.name)?;
        service.events.send(What::Settings);
        Ok(MadeToken { token, text })
    });
    Ok((StatusCode::CREATED, Json(made.await?)))
}

/// Revoke a token.
#[utoipa::path(delete, path = "/tokens/{id}", tag = "access", params(("id" = String, Path)),
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")), security(("token" = []), ("login" = [])))]
async fn remove_token(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(id): Names<String>,
) -> Answer<StatusCode> {
    caller.allow_all(Permission::Administer)?;
    blocking(move || {
        service.database.remove_token(&id)?;
        service.events.send(What::Settings);
        Ok(())
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
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
