//! Objects in a store that speaks S3, behind the small blocking trait that repositories use.
//!
//! ```text
//!   callers ──► Objects           the trait: put, get, list, delete
//!                  │
//!               s3.rs, fetch.rs   each call as attempts of object_store's client
//!                  │
//!               attempts.rs       patience, pauses, cancel ◄── failure.rs: what an error means
//!                  │
//!               object_store      signatures, credentials, URLs, pages of lists
//!                  │
//!               transport.rs      HTTP over TLS; cuts what stands still ──► exchange.rs: what it saw
//! ```
//!
//! Calls may come from any thread that is not one of an asynchronous runtime. No call holds a lock
//! while it waits. object_store tries nothing again: it would not tell a transfer that moves from
//! one that stands still.
#![forbid(unsafe_code)]

mod address;
mod attempts;
mod environment;
mod exchange;
mod failure;
mod fetch;
mod objects;
mod refusal;
mod s3;
mod tls;
mod transport;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use coldrise_block::Result;

pub use objects::{Listed, Objects};

/// Most bytes of an object that [`Objects::put`] takes.
pub(crate) const MOST_PUT_BYTES: u64 = 64 << 20;

/// How to reach a store.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long a call that fails is tried again, from when its bytes stood still. A third of that,
    /// at most a minute, is how long one attempt may stand still.
    pub patience: Duration,
    /// The endpoint, http://HOST:PORT or https://HOST:PORT; otherwise that of the environment, or
    /// Amazon's.
    pub endpoint: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { patience: Duration::from_secs(120), endpoint: None }
    }
}

/// The objects at `url`, which is s3://BUCKET or s3://BUCKET/PREFIX. Asks no server yet.
///
/// Credentials, region and endpoint come from the environment: AWS_ACCESS_KEY_ID,
/// AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, AWS_CA_BUNDLE and the
/// others that object_store knows. Once `cancel` is set, every call ends with `Interrupted` within
/// about 0.2 s. Errors: `InvalidInput` for a URL or endpoint that is none, `Unauthorized` without
/// credentials.
pub fn open(url: &str, settings: &Settings, cancel: Arc<AtomicBool>) -> Result<Arc<dyn Objects>> {
    Ok(Arc::new(s3::S3::open(url, settings, std::env::vars(), cancel)?))
}
