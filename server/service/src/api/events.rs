//! The event stream, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use coldrise_block::ErrorKind;
use tokio::sync::{broadcast, mpsc};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::problem::{Answer, Problem, blocking};
use super::stream::ReceiverStream;
use crate::access::{Identity, Permission};
use crate::events::{Event, Events, Subscription, What};
use crate::service::SharedService;

/// Maximum number of open streams.
const MAX_STREAMS: usize = 512;
/// Interval of empty comments on a quiet stream; they show a dead connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Long answers end this soon after the caller's token or login.
const REVOCATION_INTERVAL: Duration = Duration::from_secs(3);
/// Number of events that may wait for a slow client.
const QUEUE: usize = 256;

static OPEN_STREAMS: AtomicUsize = AtomicUsize::new(0);

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(events))
}

/// True while a client follows the events.
pub(crate) fn has_clients() -> bool {
    OPEN_STREAMS.load(Ordering::Relaxed) > 0
}

/// An open stream, counted.
struct Open;

impl Open {
    fn new() -> Option<Open> {
        let open = OPEN_STREAMS.fetch_add(1, Ordering::Relaxed);
        let guard = Open;
        (open < MAX_STREAMS).then_some(guard)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        OPEN_STREAMS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Follow what changes, as server-sent events.
///
/// Each event's data is an `Event`. A client that reconnects with `Last-Event-ID` gets what it missed.
/// If that is no longer known, an event named `reset` comes first: fetch everything again.
#[utoipa::path(get, path = "/events", tag = "service",
    params(("Last-Event-ID" = Option<String>, Header, description = "The id of the last event that was seen.")),
    responses((status = 200, body = Event, content_type = "text/event-stream"), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn events(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    headers: HeaderMap,
) -> Answer<Response> {
    caller.allow(Permission::ViewRuns)?;
    let Some(open) = Open::new() else {
        let text = "too many event streams are open";
        return Err(Problem::new(StatusCode::TOO_MANY_REQUESTS, ErrorKind::Busy, text));
    };
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok());
    let subscription = service.events.subscribe(last.map(|last| number_of(&service.events, last)));
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let _open = open;
        let mut stop = service.stop.clone();
        tokio::select! {
            () = forward(&service, &caller, subscription, &sender) => {}
            () = until_revoked(&service, &caller) => {}
            _ = stop.wait_for(|stop| *stop) => {}
            () = sender.closed() => {}
        }
    });
    let stream = Sse::new(ReceiverStream(receiver));
    Ok(stream.keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response())
}

/// Resolves when the caller's token or login has ended or changed.
pub(super) async fn until_revoked(service: &SharedService, caller: &Identity) {
    loop {
        tokio::time::sleep(REVOCATION_INTERVAL).await;
        let (service, caller) = (service.clone(), caller.clone());
        let is_current = blocking(move || Ok(service.database.is_current(&caller)));
        if !is_current.await.unwrap_or(false) {
            return;
        }
    }
}

/// The number in an event's id. An id of an earlier start has none that fits: `u64::MAX` leads to a
/// reset.
fn number_of(events: &Events, id: &str) -> u64 {
    let number = id.strip_prefix(&events.epoch).and_then(|rest| rest.strip_prefix('-'));
    number.and_then(|number| number.parse().ok()).unwrap_or(u64::MAX)
}

type Sender = mpsc::Sender<Result<sse::Event, Infallible>>;

async fn forward(
    service: &SharedService,
    caller: &Identity,
    mut subscription: Subscription,
    sender: &Sender,
) {
    let id = |number: u64| format!("{}-{number}", service.events.epoch);
    // The first event carries the place in the stream, so that a client can come back to it.
    let name = if subscription.is_reset { "reset" } else { "hello" };
    let first = sse::Event::default().event(name).id(id(subscription.last)).data("{}");
    let missed = std::mem::take(&mut subscription.missed);
    let first = if missed.is_empty() { Some(first) } else { None };
    if let Some(first) = first {
        if sender.send(Ok(first)).await.is_err() {
            return;
        }
    }
    for event in missed {
        if !send(caller, &event, id(event.number), sender).await {
            return;
        }
    }
    loop {
        let sent = match subscription.receiver.recv().await {
            Ok(event) => send(caller, &event, id(event.number), sender).await,
            Err(broadcast::error::RecvError::Lagged(_)) => {
                let reset = sse::Event::default().event("reset").data("{}");
                sender.send(Ok(reset)).await.is_ok()
            }
            Err(broadcast::error::RecvError::Closed) => false,
        };
        if !sent {
            return;
        }
    }
}

/// Sends an event if the caller may see it. Returns whether the client is still there.
async fn send(caller: &Identity, event: &Arc<Event>, id: String, sender: &Sender) -> bool {
    let is_seen = match (&event.what, event.what.machine()) {
        (_, Some(machine)) => caller.sees(machine),
        (What::Settings, None) => caller.allow_all(Permission::Administer).is_ok(),
        _ => caller.sees_all(),
    };
    let is_allowed = match event.what {
        What::Run { .. } => true,
        _ => caller.allow(Permission::View).is_ok(),
    };
    if !is_seen || !is_allowed {
        return !sender.is_closed();
    }
    let data = serde_json::to_string(&**event).unwrap_or_default();
    sender.send(Ok(sse::Event::default().id(id).data(data))).await.is_ok()
}
