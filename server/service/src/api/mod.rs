//! The API: `/api/v1`, `/healthz`, `/metrics`. Its OpenAPI document is made from this code.
//!
//! Reads answer at once. What changes the repository is a run: the answer is 202 with the run's id.
//! Errors are problem documents. One event stream tells what changed.

mod access;
mod caller;
mod console;
mod content;
mod copies;
mod difference;
pub(crate) mod events;
mod files;
mod followed;
mod growth;
mod host;
mod hypervisors;
mod input;
mod jobs;
mod kvm_hosts;
mod libvirt_starts;
mod machines;
mod metrics;
mod notifications;
mod problem;
mod recovered;
mod recoveries;
mod runs;
mod schedule;
mod settings;
mod site;
mod starts;
mod stream;
mod tokens;
mod users;
mod vsphere_starts;

use std::time::Duration;

use axum::extract::{DefaultBodyLimit, State};
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, Version, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use coldrise_block::ErrorKind;
use tower_http::compression::predicate::{Predicate, SizeAbove};
use tower_http::compression::{CompressionLayer, CompressionLevel};
use tower_http::set_header::SetResponseHeaderLayer;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{OpenApi, RefOr, Schema};
use utoipa::{Modify, OpenApi as _};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::service::SharedService;
use crate::web::Web;
pub(crate) use caller::end_pending_answers;
pub(crate) use kvm_hosts::check_host_of;
pub(crate) use problem::Problem;
pub(crate) use recoveries::is_network;

/// Maximum size of a request's body, in bytes.
pub(super) const MAX_BODY_BYTES: usize = 256 << 10;
/// Minimum size of an answer that is compressed, in bytes.
const MIN_COMPRESSED_BYTES: u16 = 4 << 10;
/// Maximum time for a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(20);
/// For pages and answers alike: nothing from elsewhere, no inline code.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src 'self' data: blob:; form-action 'none'; frame-ancestors 'none'; \
    base-uri 'none'; require-trusted-types-for 'script'";

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Coldrise",
        description = "Protects virtual machines and recovers them instantly. All times are \
            milliseconds since 1970, all sizes bytes."
    ),
    modifiers(&Security),
    components(schemas(Problem))
)]
struct Document;

struct Security;

impl Modify for Security {
    fn modify(&self, document: &mut OpenApi) {
        let components = document.components.get_or_insert_default();
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components.add_security_scheme("token", SecurityScheme::Http(bearer));
        let cookie = ApiKey::Cookie(ApiKeyValue::new(caller::COOKIE));
        components.add_security_scheme("login", SecurityScheme::ApiKey(cookie));
    }
}

fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(health))
        .merge(metrics::routes())
        .nest(
            "/api/v1",
            access::routes()
                .merge(users::routes())
                .merge(tokens::routes())
                .merge(machines::routes())
                .merge(content::routes())
                .merge(copies::routes())
                .merge(difference::routes())
                .merge(files::routes())
                .merge(followed::routes())
                .merge(host::routes())
                .merge(hypervisors::routes())
                .merge(kvm_hosts::routes())
                .merge(growth::routes())
                .merge(console::routes())
                .merge(runs::routes())
                .merge(schedule::routes())
                .merge(site::routes())
                .merge(starts::routes())
                .merge(jobs::routes())
                .merge(notifications::routes())
                .merge(events::routes()),
        )
}

/// Answers hold a job and more fields, and a request stands beside its kind; their parsers still refuse unknown fields.
fn open_parts(mut document: OpenApi) -> OpenApi {
    let Some(components) = document.components.as_mut() else { return document };
    let mut open = vec!["Job".to_owned()];
    if let Some(RefOr::T(Schema::OneOf(start))) = components.schemas.get("Start") {
        for part in start.items.iter().filter_map(|item| match item {
            RefOr::T(Schema::AllOf(parts)) => parts.items.first(),
            _ => None,
        }) {
            let RefOr::Ref(part) = part else { continue };
            open.extend(part.ref_location.rsplit('/').next().map(str::to_owned));
        }
    }
    for name in open {
        if let Some(RefOr::T(Schema::Object(part))) = components.schemas.get_mut(&name) {
            part.additional_properties = None;
        }
    }
    document
}

/// The OpenAPI document.
pub(crate) fn openapi_text() -> String {
    // Only maps with keys that are not text fail to serialize.
    open_parts(routes().into_openapi()).to_pretty_json().unwrap_or_default()
}

/// Compresses long answers in JSON for clients that accept it: a list of 1,000 machines has 600 KB. Content of
/// disks, with its ranges, and event streams stay as they are.
fn compression() -> CompressionLayer<impl Predicate> {
    let is_json = |_: StatusCode, _: Version, headers: &HeaderMap, _: &Extensions| {
        headers.get(header::CONTENT_TYPE).is_some_and(|value| value == "application/json")
    };
    CompressionLayer::new()
        .quality(CompressionLevel::Fastest)
        .compress_when(SizeAbove::new(MIN_COMPRESSED_BYTES).and(is_json))
}

/// All routes, with the rules that hold for each request.
pub(crate) fn router(service: SharedService, web: Option<Web>) -> Router {
    let (router, document) = routes().split_for_parts();
    let document = open_parts(document);
    let set =
        |name, value| SetResponseHeaderLayer::if_not_present(name, HeaderValue::from_static(value));
    // The page is public and asks by itself: a browser with an ended login gets it too.
    let page =
        web.map_or_else(|| Router::new().route("/", axum::routing::get(welcome)), Web::router);
    router
        .route("/api/v1/openapi.json", axum::routing::get(move || async move { Json(document) }))
        .fallback(|| async {
            let text = "there is nothing at this address; see /api/v1/openapi.json";
            Problem::new(StatusCode::NOT_FOUND, ErrorKind::NotFound, text)
        })
        .method_not_allowed_fallback(|| async {
            let text = "this address does not take this method; see /api/v1/openapi.json";
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, ErrorKind::InvalidInput, text)
        })
        .layer(middleware::from_fn_with_state(service.clone(), caller::admit))
        .layer(compression())
        .merge(page.with_state(()))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(set(header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY))
        .layer(set(header::X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .layer(set(header::REFERRER_POLICY, "no-referrer"))
        .layer(set(header::CACHE_CONTROL, "no-store"))
        .layer(set(header::STRICT_TRANSPORT_SECURITY, "max-age=31536000"))
        .with_state(service)
}

/// The advice for a host without an installed page.
async fn welcome() -> Response {
    "Coldrise: this service has an API, and no page is installed; /api/v1/openapi.json describes the API.\n\n\
     After a setup link, https://HOST:PORT/#/setup/SECRET, make the first administrator with\n\n\
     curl --cacert CERT https://HOST:PORT/api/v1/setup --json \\\n    \
     '{\"secret\": \"SECRET\", \"user\": \"NAME\", \"password\": \"at least ten bytes\"}'\n"
        .into_response()
}

/// Whether the service lives: always 200. The text says if it has no room to store anything. Says nothing about
/// backups; /metrics does.
#[utoipa::path(get, path = "/healthz", tag = "service", responses((status = 200, body = String, content_type = "text/plain")))]
async fn health(State(service): State<SharedService>) -> &'static str {
    if service.messenger.is_folder_full() {
        return "ok, but the drive of the service's folder is full: users cannot log in, and changes are not stored\n";
    }
    "ok\n"
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    #[test]
    fn a_job_has_its_own_boot_check() {
        let document: Value = serde_json::from_str(&super::openapi_text()).unwrap();
        let schemas = &document["components"]["schemas"];
        let of_job = schemas["Job"]["properties"]["boot_check"].to_string();
        assert!(of_job.contains("schemas/JobBootCheck"), "{of_job}");
        assert!(schemas["JobBootCheck"]["properties"]["when"].is_object());
        assert!(schemas["BootCheck"]["properties"]["rungs"].is_object(), "that of a point");
    }
}
