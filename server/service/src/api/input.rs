//! Bodies, queries and paths of requests. A malformed one is a problem document, never a panic.

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::Json;
use coldrise_block::ErrorKind;
use serde::de::DeserializeOwned;

use super::problem::Problem;

/// A JSON body.
pub(crate) struct Body<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, Problem> {
        match Json::<T>::from_request(request, state).await {
            Ok(Json(body)) => Ok(Body(body)),
            Err(error) => {
                let status = match &error {
                    // Well-formed JSON of a wrong form is a bad request, too.
                    JsonRejection::JsonDataError(_) => axum::http::StatusCode::BAD_REQUEST,
                    other => other.status(),
                };
                Err(Problem::new(status, ErrorKind::InvalidInput, error.body_text()))
            }
        }
    }
}

/// The query of an address.
pub(crate) struct Fields<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Fields<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Fields<T>, Problem> {
        let found = Query::<T>::from_request_parts(parts, state).await;
        found.map(|Query(fields)| Fields(fields)).map_err(|error: QueryRejection| {
            Problem::new(error.status(), ErrorKind::InvalidInput, error.body_text())
        })
    }
}

/// The variable parts of a path.
pub(crate) struct Names<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Names<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Names<T>, Problem> {
        let found = Path::<T>::from_request_parts(parts, state).await;
        found.map(|Path(names)| Names(names)).map_err(|error: PathRejection| {
            Problem::new(error.status(), ErrorKind::InvalidInput, error.body_text())
        })
    }
}
