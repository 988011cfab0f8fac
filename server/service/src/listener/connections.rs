//! A bounded number of connections. When all places are taken, a new one takes the place of another: of the
//! oldest that has never named a known caller, even while it sends a request, else of the known one that is
//! idle longest. So a crowd without a proof shuts out no known caller, whatever it sends.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// The connections of one listener.
pub(super) struct Connections {
    max: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    open: BTreeMap<u64, Entry>,
}

struct Entry {
    /// The address of a TCP client.
    from: Option<IpAddr>,
    /// Requests whose answer is not yet taken.
    busy: usize,
    /// A request of it came from a known caller.
    is_known: bool,
    idle_since: Instant,
    close: Arc<Notify>,
}

/// The place of one connection; dropping it frees the place.
pub(super) struct Slot {
    connections: Arc<Connections>,
    number: u64,
    close: Arc<Notify>,
    has_asked: AtomicBool,
    asked: Notify,
}

/// A request of a connection, until its answer is taken.
pub(crate) struct Busy(Arc<Slot>);

impl Connections {
    pub(super) fn new(max: usize) -> Connections {
        Connections { max, table: Mutex::default() }
    }

    /// A place for a new connection. When all are taken, another connection is closed; `None` if known callers
    /// use all of them now.
    /// An address may have a quarter of them: a crowd from there does not shut out others.
    pub(super) fn take(self: &Arc<Self>, from: Option<IpAddr>) -> Option<Slot> {
        let mut table = self.table.lock();
        let is_from = |entry: &Entry| from.is_some() && entry.from == from;
        let same = table.open.values().filter(|entry| is_from(entry)).count();
        let is_crowd = same >= (self.max / 4).max(1);
        if is_crowd || table.open.len() >= self.max {
            let others = table.open.iter().filter(|(_, entry)| !is_crowd || is_from(entry));
            let others = others.filter(|(_, entry)| !entry.is_known || entry.busy == 0);
            let oldest = others.min_by_key(|(_, entry)| (entry.is_known, entry.idle_since));
            let oldest = oldest.map(|(number, _)| *number)?;
            let closed = table.open.remove(&oldest)?;
            closed.close.notify_one();
        }
        table.next += 1;
        let (number, close) = (table.next, Arc::new(Notify::new()));
        let idle_since = Instant::now();
        let entry = Entry { from, busy: 0, is_known: false, idle_since, close: close.clone() };
        table.open.insert(number, entry);
        drop(table);
        let connections = self.clone();
        Some(Slot {
            connections,
            number,
            close,
            has_asked: AtomicBool::new(false),
            asked: Notify::new(),
        })
    }

    /// Number of open connections.
    pub(super) fn count(&self) -> usize {
        self.table.lock().open.len()
    }
}

impl Slot {
    /// Resolves when the connection has to make room.
    pub(super) async fn closed(&self) {
        self.close.notified().await;
    }

    /// Whether a request has come.
    pub(super) fn has_asked(&self) -> bool {
        self.has_asked.load(Ordering::Relaxed)
    }

    /// Resolves when the first request has come.
    pub(super) async fn asked(&self) {
        self.asked.notified().await;
    }

    /// A caller of this connection has proved who they are.
    pub(super) fn set_known(&self) {
        if let Some(entry) = self.connections.table.lock().open.get_mut(&self.number) {
            entry.is_known = true;
        }
    }

    /// A request has come.
    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        if !self.has_asked.swap(true, Ordering::Relaxed) {
            self.asked.notify_one();
        }
        if let Some(entry) = self.connections.table.lock().open.get_mut(&self.number) {
            entry.busy += 1;
        }
        Busy(self.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(entry) = self.0.connections.table.lock().open.get_mut(&self.0.number) {
            entry.busy = entry.busy.saturating_sub(1);
            entry.idle_since = Instant::now();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.connections.table.lock().open.remove(&self.number);
    }
}

/// The body of an answer; its connection is busy while it lives.
pub(super) struct BusyBody {
    body: Body,
    _busy: Busy,
}

impl BusyBody {
    pub(super) fn new(body: Body, busy: Busy) -> BusyBody {
        BusyBody { body, _busy: busy }
    }
}

impl HttpBody for BusyBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::Connections;
    use std::sync::Arc;

    #[tokio::test]
    async fn the_longest_idle_connection_is_closed_for_a_new_one() {
        let connections = Arc::new(Connections::new(2));
        let first = Arc::new(connections.take(None).unwrap());
        let second = Arc::new(connections.take(None).unwrap());
        for slot in [&first, &second] {
            slot.set_known();
        }
        let busy = first.busy();
        let third = connections.take(None).unwrap();
        second.closed().await;
        assert_eq!(connections.count(), 2);
        let third = Arc::new(third);
        third.set_known();
        let _busy_too = third.busy();
        assert!(connections.take(None).is_none(), "all are busy");
        drop(busy);
        assert!(connections.take(None).is_some());
        first.closed().await;
    }

    #[tokio::test]
    async fn a_request_without_a_known_caller_keeps_no_place() {
        let connections = Arc::new(Connections::new(2));
        let (first, second) = (connections.take(None).unwrap(), connections.take(None).unwrap());
        let (first, second) = (Arc::new(first), Arc::new(second));
        first.set_known();
        let _slow = second.busy();
        assert!(connections.take(None).is_some(), "not the known one, which is idle longer");
        second.closed().await;
        assert_eq!(connections.count(), 1);
    }

    #[tokio::test]
    async fn a_crowd_from_one_address_does_not_shut_out_others() {
        let connections = Arc::new(Connections::new(8));
        let (crowd, other) = ("192.0.2.1".parse().ok(), "192.0.2.2".parse().ok());
        let slots: Vec<_> = (0..8)
            .filter_map(|_| connections.take(crowd))
            .map(|slot| {
                let slot = Arc::new(slot);
                slot.set_known();
                slot.busy()
            })
            .collect();
        assert_eq!(slots.len(), 2);
        assert!(connections.take(crowd).is_none());
        assert!(connections.take(other).is_some());
    }
}
