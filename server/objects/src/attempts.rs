//! One call as attempts: tried again while patience lasts, and ended by a cancel.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use tokio::time::sleep;

use crate::exchange::Exchange;
use crate::failure::{Call, Failure};

/// How often a cancel is looked for.
const LOOK: Duration = Duration::from_millis(50);
/// Between the first two attempts; the pause doubles from one to the next.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MOST_PAUSE: Duration = Duration::from_secs(10);
/// Bytes of one attempt may stand still for this long, whatever the patience.
const LEAST_STALL: Duration = Duration::from_millis(300);
const MOST_STALL: Duration = Duration::from_secs(60);

/// Why an attempt ended.
pub(crate) enum Ended {
    /// By an error of object_store, which may pass.
    Store(object_store::Error),
    /// By an error that stays.
    Lasting(Error),
}

impl From<object_store::Error> for Ended {
    fn from(error: object_store::Error) -> Self {
        Ended::Store(error)
    }
}

/// How calls are tried.
pub(crate) struct Attempts {
    pub(crate) patience: Duration,
    pub(crate) cancel: Arc<AtomicBool>,
    /// A call ends after this time, also in the middle of an attempt.
    pub(crate) limit: Option<Duration>,
}

impl Attempts {
    /// How long the bytes of an attempt may stand still: several attempts fit into the patience,
    /// since a connection that was idle may be dead.
    pub(crate) fn stall(&self) -> Duration {
        (self.patience / 3).clamp(LEAST_STALL, MOST_STALL)
    }

    /// Runs attempts until one succeeds, one fails for good, or trouble has lasted for the patience.
    /// Trouble begins when the bytes of the first attempt that fails last moved. `most_bytes`
    /// bounds each answer. Errors: those of the last attempt; `Interrupted`.
    pub(crate) async fn run<T>(
        &self,
        call: &Call<'_>,
        most_bytes: u64,
        attempt: impl AsyncFnMut() -> std::result::Result<T, Ended>,
    ) -> Result<T> {
        tokio::select! {
            biased;
            () = self.cancelled() => {
                Err(Error::new(ErrorKind::Interrupted, format!("{}: cancelled", call.context())))
            }
            limit = self.limited() => {
                Err(call.error(ErrorKind::Io, format!("no answer in {} s", limit.as_secs())))
            }
            result = self.persist(call, most_bytes, attempt) => result,
        }
    }

    async fn persist<T>(
        &self,
        call: &Call<'_>,
        most_bytes: u64,
        mut attempt: impl AsyncFnMut() -> std::result::Result<T, Ended>,
    ) -> Result<T> {
        let mut trouble_since = None;
        let mut pause = FIRST_PAUSE;
        for attempts in 1u32.. {
            let exchange = Exchange::begin(most_bytes);
            let failure = match exchange.scope(attempt()).await {
                Ok(done) => return Ok(done),
                Err(Ended::Lasting(error)) => return Err(error),
                Err(Ended::Store(error)) => call.failure(exchange.take_trouble(), error),
            };
            let since = trouble_since.get_or_insert_with(|| exchange.moved());
            let left = self.patience.saturating_sub(since.elapsed());
            if !failure.is_transient || left.is_zero() {
                return Err(last_failure(failure, attempts, since.elapsed()));
            }
            sleep(jittered(pause).min(left)).await;
            pause = (pause * 2).min(MOST_PAUSE);
        }
        Err(call.error(ErrorKind::Io, "too many attempts".to_owned()))
    }

    async fn limited(&self) -> Duration {
        match self.limit {
            Some(limit) => {
                sleep(limit).await;
                limit
            }
            None => std::future::pending().await,
        }
    }

    async fn cancelled(&self) {
        while !self.cancel.load(Ordering::Relaxed) {
            sleep(LOOK).await;
        }
    }
}

fn last_failure(failure: Failure, attempts: u32, time: Duration) -> Error {
    match failure.is_transient && attempts > 1 {
        true => failure.error.context(format_args!(
            "gave up after {attempts} attempts in {:.0} s",
            time.as_secs_f64()
        )),
        false => failure.error,
    }
}

/// Half of it to all of it: many callers that failed together do not come back together.
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().hash_one(0) % 1024;
    pause / 2 + pause / 2 * random as u32 / 1024
}
