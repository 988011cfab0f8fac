//! Errors as problem documents (RFC 9457), with the exit code and words of the command line.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use coldrise_block::{Error, ErrorKind};
use serde::Serialize;

/// The body of every error.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Problem {
    /// Always `about:blank`: `kind` tells problems apart.
    r#type: &'static str,
    title: &'static str,
    status: u16,
    /// What happened, where, and what to do.
    detail: String,
    /// The word of the error, as with `--json`, such as `not_found`.
    kind: &'static str,
    /// The exit code of the command line for this error.
    exit_code: u8,
}

impl Problem {
    /// A problem that no error stands behind.
    pub(crate) fn new(status: StatusCode, kind: ErrorKind, detail: impl Into<String>) -> Problem {
        Problem {
            r#type: "about:blank",
            title: status.canonical_reason().unwrap_or("error"),
            status: status.as_u16(),
            detail: detail.into(),
            kind: kind.word(),
            exit_code: coldrise_runs::exit_code(kind),
        }
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        let status = status(error.kind());
        if status.is_server_error() {
            tracing::warn!("answered {}: {}", status.as_u16(), error.full_message());
        }
        Problem::new(status, error.kind(), error.full_message())
    }
}

/// The status of an error. The whole table is here.
fn status(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::InvalidInput | ErrorKind::OutOfRange | ErrorKind::NameTooLong => {
            StatusCode::BAD_REQUEST
        }
        ErrorKind::NotFound | ErrorKind::NotAFolder | ErrorKind::IsAFolder => StatusCode::NOT_FOUND,
        ErrorKind::AlreadyExists
        | ErrorKind::NotEmpty
        | ErrorKind::Busy
        | ErrorKind::Incomplete
        | ErrorKind::Interrupted => StatusCode::CONFLICT,
        ErrorKind::Unauthorized => StatusCode::UNAUTHORIZED,
        ErrorKind::Forbidden => StatusCode::FORBIDDEN,
        ErrorKind::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
        ErrorKind::NoRepository
        | ErrorKind::WrongPassphrase
        | ErrorKind::ReadOnly
        | ErrorKind::WouldWait => StatusCode::SERVICE_UNAVAILABLE,
        // libvirtd and other programs that are asked on behalf of the client.
        ErrorKind::ToolFailed => StatusCode::BAD_GATEWAY,
        ErrorKind::Corrupt | ErrorKind::Io | ErrorKind::Poisoned | ErrorKind::Internal => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_string(&self).unwrap_or_default();
        let mut response = (status, body).into_response();
        let json = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        if status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        if status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("10"));
        }
        response
    }
}

/// The result of a handler.
pub(crate) type Answer<T> = std::result::Result<T, Problem>;

/// Runs work that blocks on a thread for it.
///
/// # Errors
/// Those of the work; `Internal` if it panicked.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Answer<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(Problem::from),
        Err(error) => {
            let text = format!("a defect in coldrised: {error}");
            Err(Problem::from(Error::new(ErrorKind::Internal, text)))
        }
    }
}
