//! Bodies, queries and paths of requests. A malformed one is a problem document, never a panic.

use std::error::Error;

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
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
    in_words_of_json(text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _)| text))
}

/// An error of serde without types of Rust, such as `expected struct Backup`.
fn in_words_of_json(text: &str) -> String {
    let Some((found, expected)) = text.rsplit_once(", expected ") else { return text.to_owned() };
    let found = match found.rsplit_once(": ") {
        Some((before, "map")) => format!("{before}: an object"),
        Some((before, "sequence")) => format!("{before}: an array"),
        _ => found.to_owned(),
    };
    let expected = match expected.split(' ').next().unwrap_or_default() {
        "struct" | "map" | "internally" | "adjacently" => "an object",
        "sequence" | "tuple" => "an array",
        "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" => "a whole number in its bounds",
        "f32" | "f64" => "a number",
        _ => expected,
    };
    format!("{found}, expected {expected}")
}

/// The query of an address. Its types refuse unknown parameters (`deny_unknown_fields`).
pub(crate) struct Fields<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Fields<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Fields<T>, Problem> {
        let found = Query::<T>::from_request_parts(parts, state).await;
        found.map(|Query(fields)| Fields(fields)).map_err(|error: QueryRejection| {
            // Its fields are parameters. Before an unknown one stands its own name.
            let text = field_text(&error);
            let text = match text.split_once(": unknown field `") {
                Some((_, name)) => format!("unknown parameter `{name}"),
                None => text.replace("invalid digit found in string", "not a whole number"),
            };
            let text = text.replace(" field `", " parameter `");
            Problem::new(error.status(), ErrorKind::InvalidInput, text)
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

#[cfg(test)]
mod tests {
    use super::in_words_of_json;

    #[test]
    fn types_of_rust_are_not_shown() {
        for (text, shown) in [
            (
                "invalid type: map, expected struct Backup",
                "invalid type: an object, expected an object",
            ),
            (
                "disks: invalid type: map, expected a string",
                "disks: invalid type: an object, expected a string",
            ),
            (
                "invalid type: string \"x\", expected internally tagged enum Request",
                "invalid type: string \"x\", expected an object",
            ),
            (
                "count: invalid value: integer `-1`, expected usize",
                "count: invalid value: integer `-1`, expected a whole number in its bounds",
            ),
            (
                "unknown field `limt`, expected one of `after`, `limit`",
                "unknown field `limt`, expected one of `after`, `limit`",
            ),
            ("missing field `role`", "missing field `role`"),
        ] {
            assert_eq!(in_words_of_json(text), shown);
        }
    }
}
