//! The wire traffic of one attempt of a call. object_store passes on an HTTP client's errors as
//! text, so the client leaves here what is to be judged.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::refusal::Refusal;

tokio::task_local! {
    static CURRENT: Arc<Exchange>;
}

/// Why an attempt got no good answer.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The server refused.
    Refused(Refusal),
    /// No connection came about. With the reason.
    NotReached(String),
    /// The server's certificate is not trusted, or it does not speak TLS. With the reason.
    NotTrusted(String),
    /// The connection broke. With the reason.
    Cut(String),
    /// No byte moved for this time.
    StoodStill(Duration),
    /// The answer is longer than this many bytes.
    TooLong(u64),
    /// The server did what it was asked, as it seems; object_store does not understand how.
    NotUnderstood(Success),
}

/// The fields that object_store requires in a successful answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Success {
    pub(crate) has_tag: bool,
    pub(crate) has_length: bool,
    /// All of an object, where a range was asked for.
    pub(crate) is_whole: bool,
}

/// One attempt.
pub(crate) struct Exchange {
    /// Most bytes of one answer.
    pub(crate) most_bytes: u64,
    state: Mutex<State>,
}

struct State {
    moved: Instant,
    /// How much longer than usual bytes may stand still.
    rest: Duration,
    trouble: Option<Trouble>,
}

impl Exchange {
    /// One that begins now.
    pub(crate) fn begin(most_bytes: u64) -> Arc<Self> {
        let state =
            Mutex::new(State { moved: Instant::now(), rest: Duration::ZERO, trouble: None });
        Arc::new(Exchange { most_bytes, state })
    }

    /// Runs an attempt, whose requests find this exchange by [`current`].
    pub(crate) async fn scope<T>(self: &Arc<Self>, attempt: impl Future<Output = T>) -> T {
        CURRENT.scope(self.clone(), attempt).await
    }

    /// Bytes have moved.
    pub(crate) fn progress(&self) {
        self.handed_over(Duration::ZERO);
    }

    /// Bytes have moved into buffers, and may need `rest` until they have left those.
    pub(crate) fn handed_over(&self, rest: Duration) {
        let mut state = self.state.lock();
        (state.moved, state.rest) = (Instant::now(), rest);
    }

    /// When bytes last moved; at first the begin.
    pub(crate) fn moved(&self) -> Instant {
        self.state.lock().moved
    }

    /// When bytes have stood still for too long, if they may do so for `stall`.
    pub(crate) fn deadline(&self, stall: Duration) -> Instant {
        let state = self.state.lock();
        state.moved + stall + state.rest
    }

    /// Keeps the trouble that comes last.
    pub(crate) fn record(&self, trouble: Trouble) {
        self.state.lock().trouble = Some(trouble);
    }

    /// Whether the server has refused, and will do so again.
    pub(crate) fn is_refused(&self) -> bool {
        match &self.state.lock().trouble {
            Some(Trouble::Refused(refusal)) => !refusal.meaning().is_transient,
            _ => false,
        }
    }

    /// The trouble, which is then forgotten.
    pub(crate) fn take_trouble(&self) -> Option<Trouble> {
        self.state.lock().trouble.take()
    }
}

/// The exchange of the attempt that runs here.
pub(crate) fn current() -> Option<Arc<Exchange>> {
    CURRENT.try_with(Arc::clone).ok()
}
