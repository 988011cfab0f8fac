//! The event stream: what changed, for all clients at once.
//!
//! Events are small and name what changed; clients fetch the rest. The newest
//! [`KEPT_EVENTS`] are kept, so a client that reconnects with the last number that it saw misses none;
//! if it was away longer, it gets `reset` and fetches everything.

use std::collections::VecDeque;
use std::sync::Arc;

use coldrise_inventory::ActivityTotals;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::broadcast;

/// Number of events that a client can have missed.
const KEPT_EVENTS: usize = 1024;

/// One event.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Event {
    /// From 1; an `activity` has the number of the event before it. A restart of the service begins again, with another `epoch`.
    pub(crate) number: u64,
    #[serde(flatten)]
    pub(crate) what: What,
}

/// What changed.
#[derive(Clone, Debug, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum What {
    /// A run began, progressed or ended.
    Run {
        id: String,
        state: String,
        machine: Option<String>,
        #[schema(value_type = Option<Object>)]
        progress: Option<serde_json::Value>,
    },
    /// The points of a machine changed.
    Machine { machine: String },
    /// A session was published, sealed or removed, or its numbers changed.
    Session { session: String },
    /// Clients of a served session read or wrote since the last such event. Sent every 2 s, not sent
    /// again after a reconnection.
    Activity(ActivityTotals),
    /// A job or the queue changed.
    Job { job: String },
    /// The state of the copies at a target changed.
    Copies { target: String },
    /// The points of a machine that are on their way here changed, or what of them is here.
    #[serde(rename = "coming")]
    Incoming { machine: String },
    /// An alarm was raised or cleared.
    Alarm { key: String, machine: Option<String> },
    /// Settings, users or tokens changed.
    Settings,
}

impl What {
    /// The machine that an event is about, if it is about one.
    pub(crate) fn machine(&self) -> Option<&str> {
        match self {
            What::Run { machine, .. } | What::Alarm { machine, .. } => machine.as_deref(),
            What::Machine { machine } | What::Incoming { machine } => Some(machine),
            What::Activity(totals) => Some(&totals.machine),
            _ => None,
        }
    }
}

/// The stream.
pub(crate) struct Events {
    kept: Mutex<Kept>,
    sender: broadcast::Sender<Arc<Event>>,
    /// Tells the numbers of this start from those of an earlier one.
    pub(crate) epoch: String,
}

#[derive(Default)]
struct Kept {
    last: u64,
    events: VecDeque<Arc<Event>>,
}

/// A client's place in the stream.
pub(crate) struct Subscription {
    /// Events since the number that the client gave.
    pub(crate) missed: Vec<Arc<Event>>,
    /// Some of them are no longer kept.
    pub(crate) is_reset: bool,
    pub(crate) last: u64,
    pub(crate) receiver: broadcast::Receiver<Arc<Event>>,
}

impl Events {
    /// An empty stream.
    pub(crate) fn new(epoch: String) -> Events {
        Events { kept: Mutex::default(), sender: broadcast::channel(KEPT_EVENTS).0, epoch }
    }

    /// Adds an event and sends it to all clients.
    pub(crate) fn send(&self, what: What) {
        let mut kept = self.kept.lock();
        kept.last += 1;
        let event = Arc::new(Event { number: kept.last, what });
        kept.events.push_back(event.clone());
        if kept.events.len() > KEPT_EVENTS {
            kept.events.pop_front();
        }
        // Without clients the send fails, which is harmless. Under the lock: numbers stay in order.
        let _ = self.sender.send(event);
    }

    /// Sends an event to the clients that are there, and keeps it for no other: it has the number of
    /// the event before.
    pub(crate) fn send_passing(&self, what: What) {
        let kept = self.kept.lock();
        let _ = self.sender.send(Arc::new(Event { number: kept.last, what }));
    }

    /// Subscribes from after `last`, or from now on.
    pub(crate) fn subscribe(&self, last: Option<u64>) -> Subscription {
        let kept = self.kept.lock();
        let receiver = self.sender.subscribe();
        let from = last.unwrap_or(kept.last);
        let first_kept = kept.events.front().map_or(kept.last + 1, |event| event.number);
        let is_reset = from > kept.last || from + 1 < first_kept;
        let missed = kept.events.iter().filter(|event| !is_reset && event.number > from);
        Subscription { missed: missed.cloned().collect(), is_reset, last: kept.last, receiver }
    }
}

#[cfg(test)]
mod tests {
    use super::{Events, KEPT_EVENTS, What};

    #[test]
    fn a_client_misses_nothing_or_learns_of_a_gap() {
        let events = Events::new("e".into());
        for _ in 0..5 {
            events.send(What::Settings);
        }
        let back = events.subscribe(Some(3));
        let numbers: Vec<u64> = back.missed.iter().map(|event| event.number).collect();
        assert_eq!((numbers, back.is_reset), (vec![4, 5], false));
        assert!(events.subscribe(Some(5)).missed.is_empty());
        assert!(events.subscribe(Some(6)).is_reset, "of an earlier start");
        for _ in 0..KEPT_EVENTS {
            events.send(What::Settings);
        }
        assert!(events.subscribe(Some(4)).is_reset);
        assert!(!events.subscribe(Some(5)).is_reset);
        assert!(events.subscribe(None).missed.is_empty());
    }

    #[test]
    fn a_passing_event_takes_no_place_of_another() {
        let events = Events::new("e".into());
        let mut client = events.subscribe(None);
        events.send(What::Settings);
        events.send_passing(What::Machine { machine: "web01".into() });
        events.send(What::Settings);
        let mut next = || client.receiver.try_recv().unwrap().number;
        assert_eq!([next(), next(), next()], [1, 1, 2]);
        assert_eq!(events.subscribe(Some(0)).missed.len(), 2);
    }
}
