//! Bodies, queries and paths of requests. A malformed one is a problem document, never a panic.

use std::error::Error;

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::StatusCode;
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
                let (status, text) = match &error {
                    // Well-formed JSON of a wrong form is a bad request, too.
                    JsonRejection::JsonDataError(cause) => {
                        (StatusCode::BAD_REQUEST, field_text(cause))
                    }
                    other => (other.status(), other.body_text()),
                };
                Err(Problem::new(status, ErrorKind::InvalidInput, text))
            }
        }
    }
}

/// The field and what is wrong with it, without the position in the text of the JSON, which no form shows.
fn field_text(error: &dyn Error) -> String {
    let text = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _)| text).to_owned()
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
