//! The caller of each request, and the rules that hold for all requests.
//!
//! 1. A caller proves itself by the Unix socket, a token, or the cookie of a login; a wrong proof is
//!    refused, and a token never takes the cookie's place.
//! 2. Changes with a cookie come from our own page only (`Sec-Fetch-Site` or `Origin`).
//! 3. Every change of a known caller is an entry of the audit log.
//! 4. A POST with an `Idempotency-Key` is done once; a repetition gets the first answer.

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use coldrise_block::ErrorKind;
use coldrise_runs::redact;
use rusqlite::{OptionalExtension, params};
use serde_json::Value;

use super::problem::{Problem, blocking};
use super::{BODY_TIMEOUT, MAX_BODY_BYTES};
use crate::access::audit::AuditNote;
use crate::access::{Identity, Proof, Role, sha256};
use crate::clock::now_ms;
use crate::database::Database;
use crate::listener::{Connection, Peer};
use crate::pattern::Pattern;
use crate::service::SharedService;

/// The name of the cookie. The prefix binds it to HTTPS, this host and path `/`.
pub(super) const COOKIE: &str = "__Host-coldrise";
/// Maximum size of the body of a caller that has not proved itself, in bytes: logins are small.
const MAX_UNKNOWN_BODY_BYTES: usize = 16 << 10;
/// Maximum length of an idempotency key, in bytes.
const MAX_KEY_BYTES: usize = 128;
/// Answers are kept for repetitions this long, in milliseconds.
const KEPT_MS: i64 = 24 * 3600 * 1000;
/// Maximum size of an answer that is kept, in bytes.
const MAX_KEPT_BYTES: usize = 64 << 10;
/// Requests with a body that change nothing: no entries of the audit log.
const QUESTIONS: &[&str] = &["POST /api/v1/retention/preview"];
/// The status of an answer that is still being made.
const PENDING: u16 = 0;

/// The known caller of a request.
pub(crate) struct Caller(pub(crate) Identity);

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, Problem> {
        parts
            .extensions
            .get::<Identity>()
            .cloned()
            .map(Caller)
            .ok_or_else(|| unauthorized("log in, or send a token as Authorization: Bearer"))
    }
}

fn unauthorized(detail: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, ErrorKind::Unauthorized, detail)
}

/// The address of a caller, for logs and limits.
pub(super) fn source(peer: Option<&Peer>) -> String {
    match peer {
        Some(Peer::Tcp(address)) => address.ip().to_canonical().to_string(),
        Some(Peer::Unix { uid }) => format!("unix uid {uid}"),
        None => "unknown".to_owned(),
    }
}

/// The secret in our cookie.
pub(super) fn cookie(headers: &HeaderMap) -> Option<&str> {
    headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok()).find_map(
        |line| line.split(';').find_map(|part| part.trim().strip_prefix(COOKIE)?.strip_prefix('=')),
    )
}

/// The middleware of all requests.
pub(super) async fn admit(
    State(service): State<SharedService>,
    request: Request,
    next: Next,
) -> Response {
    let (claim, source) = (Claim::of(&request), source(request.extensions().get::<Peer>()));
    let identity = identify(service.clone(), claim, source).await;
    let is_known = matches!(identity, Ok(Some(_)));
    if let Some(connection) = request.extensions().get::<Connection>().filter(|_| is_known) {
        connection.set_known();
    }
    // Whole, before any answer: over HTTP/2 an answer to half a request is an error for clients.
    let (mut request, body) = match whole(request, is_known).await {
        Ok(read) => read,
        Err(problem) => return problem.into_response(),
    };
    let identity = match identity {
        Ok(Some(identity)) => identity,
        Ok(None) => return next.run(request).await,
        Err(problem) => return problem.into_response(),
    };
    let is_change = !matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if is_change && matches!(identity.proof, Proof::Login(_)) && !is_from_our_page(&request) {
        let text =
            "a change with a cookie needs Sec-Fetch-Site: same-origin, or this service's Origin";
        return Problem::new(StatusCode::FORBIDDEN, ErrorKind::Forbidden, text).into_response();
    }
    request.extensions_mut().insert(identity.clone());
    if !is_change {
        return next.run(request).await;
    }
    let action = format!("{} {}", request.method(), request.uri().path());
    let body = if is_typing(request.uri().path()) { Bytes::new() } else { body };
    if QUESTIONS.contains(&action.as_str()) {
        return next.run(request).await;
    }
    let database = service.clone();
    if let Err(problem) = blocking(move || database.database.audit_unrecorded()).await {
        return problem.into_response();
    }
    let response = match request.headers().get("idempotency-key").cloned() {
        Some(key) if request.method() == Method::POST && !is_secret(request.uri().path()) => {
            once(&service, &identity, &key, request, next).await
        }
        _ => next.run(request).await,
    };
    let result = match response.status() {
        status if status.is_success() => "ok".to_owned(),
        status => status.as_u16().to_string(),
    };
    let noted = blocking(move || {
        service.database.audit_done(&AuditNote {
            who: &identity.name,
            source: &identity.source,
            action: &action,
            subject: &subject(&body),
            result: &result,
        })
    });
    // The change is done. If the entry cannot be stored, such as on a full disk, no further change is.
    let _ = noted.await;
    response
}

/// Ends the requests with an `Idempotency-Key` that a killed service was answering: whether they were done is not
/// known, so neither is their answer given nor are they done again.
///
/// # Errors
/// Errors of the database.
pub(crate) fn end_pending_answers(database: &Database) -> coldrise_block::Result<()> {
    let text = "the service ended while it answered the first request with this Idempotency-Key: look for its run in \
                GET /runs, and send the request with another key if there is none";
    let problem = Problem::new(StatusCode::INTERNAL_SERVER_ERROR, ErrorKind::Incomplete, text);
    let body = serde_json::to_string(&problem).unwrap_or_default();
    let status = StatusCode::INTERNAL_SERVER_ERROR.as_u16();
    database.change(|sql| {
        let end = "UPDATE answers SET status = ?1, body = ?2 WHERE status = ?3";
        sql.execute(end, params![status, body, PENDING])
    })?;
    Ok(())
}

/// Reads the body, within limits of size and time.
async fn whole(request: Request, is_known: bool) -> Result<(Request, Bytes), Problem> {
    let max_bytes = if is_known { MAX_BODY_BYTES } else { MAX_UNKNOWN_BODY_BYTES };
    let (parts, body) = request.into_parts();
    let problem = |status, text| Problem::new(status, ErrorKind::InvalidInput, text);
    let read = tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, max_bytes)).await;
    let Ok(read) = read else {
        return Err(problem(StatusCode::REQUEST_TIMEOUT, "the body did not come in time"));
    };
    let Ok(body) = read else {
        return Err(problem(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large, or incomplete"));
    };
    Ok((Request::from_parts(parts, Body::from(body.clone())), body))
}

/// The request, for the audit log: the body without its secrets.
fn subject(body: &[u8]) -> String {
    let Ok(mut asked) = serde_json::from_slice::<Value>(body) else { return String::new() };
    hide_secrets(&mut asked);
    redact(&asked.to_string())
}

/// Replaces what may be secret, by the names of fields.
fn hide_secrets(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let is_secret =
                    ["password", "secret", "token", "url"].iter().any(|word| name.contains(word));
                match field {
                    Value::String(text) if is_secret && !name.ends_with("_file") => {
                        "***".clone_into(text)
                    }
                    other => hide_secrets(other),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(hide_secrets),
        _ => {}
    }
}

/// The credentials of a request.
enum Claim {
    Token(String),
    /// A header that is not a token.
    Malformed,
    Peer(u32),
    Cookie(String),
    Nothing,
}

impl Claim {
    fn of(request: &Request) -> Claim {
        if let Some(value) = request.headers().get(header::AUTHORIZATION) {
            let token = value.to_str().ok().and_then(|value| {
                let (scheme, token) = value.split_once(' ')?;
                match scheme.to_ascii_lowercase().as_str() {
                    "bearer" => Some(token.trim().to_owned()),
                    "basic" => basic_password(token.trim()),
                    _ => None,
                }
            });
            return token.map_or(Claim::Malformed, Claim::Token);
        }
        if let Some(Peer::Unix { uid }) = request.extensions().get::<Peer>() {
            return Claim::Peer(*uid);
        }
        cookie(request.headers()).map_or(Claim::Nothing, |secret| Claim::Cookie(secret.to_owned()))
    }
}

async fn identify(
    service: SharedService,
    claim: Claim,
    source: String,
) -> Result<Option<Identity>, Problem> {
    let refused = || unauthorized("the token is wrong, expired or revoked");
    match claim {
        Claim::Nothing => Ok(None),
        Claim::Malformed => Err(refused()),
        Claim::Token(token) => {
            let found = blocking(move || service.database.token_identity(&token, &source)).await?;
            found.map(Some).ok_or_else(refused)
        }
        Claim::Cookie(secret) => {
            blocking(move || service.database.login_identity(&secret, &source)).await
        }
        Claim::Peer(uid) if uid == 0 || uid == rustix::process::geteuid().as_raw() => {
            let name = if uid == 0 { "unix:root".to_owned() } else { format!("unix:{uid}") };
            let machines = vec![Pattern::all()];
            Ok(Some(Identity { name, role: Role::Admin, machines, proof: Proof::Peer, source }))
        }
        Claim::Peer(_) => Ok(None),
    }
}

/// Whether the body is typed on a machine's keyboard: it may be a password of that machine.
fn is_typing(path: &str) -> bool {
    path.starts_with("/api/v1/sessions/") && path.ends_with("/keys")
}

/// Requests and answers with a secret in them are not kept for repetitions.
fn is_secret(path: &str) -> bool {
    path == "/api/v1/tokens" || path.starts_with("/api/v1/hypervisors") || is_typing(path)
}

/// The password of `Authorization: Basic`, which is a token: CDI and QEMU's HTTP driver send no other
/// header. The user name has no meaning.
fn basic_password(text: &str) -> Option<String> {
    use base64::Engine;
    let decoded = base64::engine::general_purpose::STANDARD.decode(text).ok()?;
    let decoded = String::from_utf8(decoded).ok()?;
    decoded.split_once(':').map(|(_, password)| password.to_owned())
}

/// Whether a browser says that the request comes from our own page. Old browsers send `Origin` only.
fn is_from_our_page(request: &Request) -> bool {
    let text = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    if let Some(site) = text("sec-fetch-site") {
        return site == "same-origin";
    }
    is_own_origin(request.headers(), request.uri())
}

/// Whether a browser says that the request comes from a page of this service.
pub(super) fn is_own_origin(headers: &HeaderMap, uri: &Uri) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    // HTTP/2 has the host in the request's own address.
    let host = uri.authority().map(|authority| authority.as_str()).or_else(|| text("host"));
    match (text("origin"), host) {
        (Some(origin), Some(host)) => origin.strip_prefix("https://") == Some(host),
        _ => false,
    }
}

/// Does a request once per caller and key.
async fn once(
    service: &SharedService,
    identity: &Identity,
    key: &HeaderValue,
    request: Request,
    next: Next,
) -> Response {
    let problem =
        |status, text: &str| Problem::new(status, ErrorKind::InvalidInput, text).into_response();
    let key = match key.to_str() {
        Ok(key) if !key.is_empty() && key.len() <= MAX_KEY_BYTES => key.to_owned(),
        _ => return problem(StatusCode::BAD_REQUEST, "Idempotency-Key: give 1 to 128 characters"),
    };
    let (parts, body) = request.into_parts();
    let Ok(body) = to_bytes(body, MAX_BODY_BYTES).await else {
        return problem(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large, or did not come");
    };
    let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
    let hash = sha256(&[path.as_bytes(), &body]);
    let (database, caller, name) = (service.clone(), identity.name.clone(), key.clone());
    let found = blocking(move || {
        database.database.change(|sql| {
            sql.execute(
                "DELETE FROM answers WHERE at_ms < ?1 OR at_ms > ?2",
                [now_ms() - KEPT_MS, now_ms() + KEPT_MS],
            )?;
            let found = sql
                .query_row(
                    "SELECT request, status, body FROM answers WHERE caller = ?1 AND key = ?2",
                    params![caller, name],
                    |row| {
                        Ok((
                            row.get::<_, Vec<u8>>(0)?,
                            row.get::<_, u16>(1)?,
                            row.get::<_, String>(2)?,
                        ))
                    },
                )
                .optional()?;
            if found.is_none() {
                sql.execute(
                    "INSERT INTO answers (caller, key, request, status, body, at_ms)
                     VALUES (?1, ?2, ?3, ?4, '', ?5)",
                    params![caller, name, hash, PENDING, now_ms()],
                )?;
            }
            Ok(found)
        })
    });
    match found.await {
        Err(problem) => return problem.into_response(),
        Ok(Some((request, _, _))) if request != hash => {
            let text = "this Idempotency-Key belongs to another request";
            return problem(StatusCode::UNPROCESSABLE_ENTITY, text);
        }
        Ok(Some((_, PENDING, _))) => {
            let text = "the first request with this Idempotency-Key is still being answered";
            return Problem::new(StatusCode::CONFLICT, ErrorKind::Busy, text).into_response();
        }
        Ok(Some((_, status, body))) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
            let is_ok = status.is_success();
            let content = if is_ok { "application/json" } else { "application/problem+json" };
            let headers =
                [(header::CONTENT_TYPE.as_str(), content), ("idempotency-replayed", "true")];
            return (status, headers, body).into_response();
        }
        Ok(None) => {}
    }
    let response = next.run(Request::from_parts(parts, Body::from(body))).await;
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, MAX_KEPT_BYTES).await.unwrap_or_default();
    // Only a success is kept: after a problem the request may be sent again.
    let kept = parts
        .status
        .is_success()
        .then(|| (parts.status.as_u16(), String::from_utf8_lossy(&body).into_owned()));
    let (service, caller) = (service.clone(), identity.name.clone());
    let stored = blocking(move || {
        service.database.change(|sql| match &kept {
            Some((status, body)) => sql.execute(
                "UPDATE answers SET status = ?3, body = ?4 WHERE caller = ?1 AND key = ?2",
                params![caller, key, status, body],
            ),
            None => sql.execute(
                "DELETE FROM answers WHERE caller = ?1 AND key = ?2",
                params![caller, key],
            ),
        })
    });
    let _ = stored.await;
    Response::from_parts(parts, Body::from(body))
}
