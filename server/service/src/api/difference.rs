//! What differs between two points.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::Difference;
use coldrise_store::Address;
use serde::Deserialize;
use tokio::sync::Mutex;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::Fields;
use super::problem::{Answer, Problem, blocking};
use super::starts::{origin, point};
use crate::access::{Identity, Permission};
use crate::service::{Service, SharedService};

/// Maximum number of ranges per disk in an answer.
const MAX_RANGES: usize = 4096;
/// Maximum time of a comparison, with the wait for others.
const PATIENCE: Duration = Duration::from_secs(60);

/// Held while points are compared: one comparison reads at a time.
static TURN: Mutex<()> = Mutex::const_new(());

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(difference))
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct TwoPoints {
    /// MACHINE/POINT, or live/SESSION@TIME; the latter requires the right to operate the machine.
    from: String,
    /// The same of the other one.
    to: String,
}

/// Ends a comparison when its client is gone, or too much time has passed.
struct Watched(Arc<AtomicBool>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Show which ranges of the disks differ between two points, as `coldrise diff --json` does: at most 4,096 per disk.
///
/// Two backups are compared by their chunk maps. Points with captured writes are read where these
/// lie. A comparison stops with an error after 60 s; the command line has no such limit.
#[utoipa::path(get, path = "/difference", tag = "machines", params(TwoPoints),
    responses((status = 200, body = Difference), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn difference(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Fields(two): Fields<TwoPoints>,
) -> Answer<Json<Difference>> {
    let (from, to) = (two.from.clone(), two.to.clone());
    let known = Arc::clone(&service);
    let (from, to) =
        blocking(move || Ok((address(&known, &caller, &from)?, address(&known, &caller, &to)?)))
            .await?;
    let cancel = Arc::new(AtomicBool::new(false));
    let _watched = Watched(Arc::clone(&cancel));
    let compared = async move {
        let _turn = TURN.lock().await;
        blocking(move || service.inventory()?.difference(&from, &to, MAX_RANGES, &cancel)).await
    };
    match tokio::time::timeout(PATIENCE, compared).await {
        Ok(compared) => compared.map(Json),
        Err(_) => {
            let text = "the comparison takes longer than 60 s";
            Err(Error::new(ErrorKind::Busy, text)
                .advise(format!("on the host: coldrise diff {} {}", two.from, two.to))
                .into())
        }
    }
}

/// An address that the caller may read.
fn address(service: &Service, caller: &Identity, text: &str) -> Result<Address> {
    let address = text.parse::<Address>()?;
    match address {
        // Its session is sealed for the comparison.
        Address::Marked { .. } => origin(service, caller, text)?,
        _ => point(caller, Permission::View, text)?,
    };
    Ok(address)
}
