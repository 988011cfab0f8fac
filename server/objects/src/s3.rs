//! The calls of [`Objects`] by the means of object_store.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::objects::{Listed, Objects};
use coldrise_block::{Error, ErrorKind, Result};
use hyper::body::Bytes;
use object_store::aws::AmazonS3;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::{ObjectStoreExt, PutPayload};
use tokio::runtime::{Builder, Runtime};

use crate::address::Address;
use crate::attempts::{Attempts, Ended};
use crate::failure::{Action, Call};
use crate::fetch::Fetch;
use crate::transport::Transport;
use crate::{MOST_PUT_BYTES, Settings, environment, tls};

/// A put goes in such parts, so that it is seen to move.
const PART_BYTES: usize = 64 << 10;
/// Most bytes of an answer that is not an object: a page of a list has up to 1000 names of 1 KiB.
const MOST_ANSWER_BYTES: u64 = 16 << 20;
/// A server that lists more does not come to an end.
const MOST_LISTED: usize = 20_000_000;

/// Time limit for heartbeat objects. The last one is put after the signal to end.
const SIGN_LIMIT: Duration = Duration::from_secs(5);

/// A bucket, or a prefix of one.
pub(crate) struct S3 {
    store: AmazonS3,
    address: Address,
    endpoint: String,
    attempts: Attempts,
    /// For calls that put heartbeat objects.
    sign_attempts: Attempts,
    /// Always there until the drop.
    runtime: Option<Runtime>,
}

impl S3 {
    /// See [`crate::open`]; `variables` are those of the environment.
    pub(crate) fn open(
        url: &str,
        settings: &Settings,
        variables: impl Iterator<Item = (String, String)>,
        cancel: Arc<AtomicBool>,
    ) -> Result<Self> {
        let address = Address::parse(url)?;
        let environment = environment::read(&address, settings.endpoint.as_deref(), variables)?;
        let attempts = Attempts { patience: settings.patience, cancel, limit: None };
        let tls = tls::configuration(environment.ca_bundle.as_deref().map(Path::new))?;
        let transport = Transport { tls, stall: attempts.stall(), most_rest: settings.patience };
        let store =
            environment.builder.with_http_connector(transport).build().map_err(|error| {
                Error::with_source(ErrorKind::InvalidInput, address.text.clone(), error)
            })?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(8)
            .thread_name("objects")
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| Error::io("starting threads for objects", error))?;
        let runtime = Some(runtime);
        let patience = settings.patience.min(SIGN_LIMIT);
        let sign_attempts = Attempts { patience, cancel: Arc::default(), limit: Some(SIGN_LIMIT) };
        let endpoint = environment.endpoint;
        Ok(S3 { store, address, endpoint, attempts, sign_attempts, runtime })
    }

    fn call<'a>(&'a self, action: Action, name: &'a str) -> Call<'a> {
        Call { action, name, address: &self.address, endpoint: &self.endpoint }
    }

    /// Runs a call on this thread; connections live on the runtime's.
    fn run<T>(
        &self,
        call: &Call<'_>,
        most_bytes: u64,
        attempt: impl AsyncFnMut() -> std::result::Result<T, Ended>,
    ) -> Result<T> {
        self.run_by(&self.attempts, call, most_bytes, attempt)
    }

    fn run_by<T>(
        &self,
        attempts: &Attempts,
        call: &Call<'_>,
        most_bytes: u64,
        attempt: impl AsyncFnMut() -> std::result::Result<T, Ended>,
    ) -> Result<T> {
        match &self.runtime {
            Some(runtime) => runtime.block_on(attempts.run(call, most_bytes, attempt)),
            None => Err(call.error(ErrorKind::Internal, "it is closed".to_owned())),
        }
    }

    fn put_by(&self, attempts: &Attempts, name: &str, content: Bytes) -> Result<()> {
        let call = self.call(Action::Put, name);
        let path = self.address.path_of(name)?;
        if content.len() as u64 > MOST_PUT_BYTES {
            let text = format!("{} bytes are more than {MOST_PUT_BYTES}", content.len());
            return Err(call.error(ErrorKind::InvalidInput, text));
        }
        let parts = (0..content.len()).step_by(PART_BYTES);
        let parts = parts.map(|at| content.slice(at..content.len().min(at + PART_BYTES)));
        let payload: PutPayload = parts.collect();
        self.run_by(attempts, &call, MOST_ANSWER_BYTES, async || {
            self.store.put(&path, payload.clone()).await?;
            Ok(())
        })
    }

    fn fetch(&self, name: &str, most_bytes: u64, part: Option<Range<u64>>) -> Result<Vec<u8>> {
        let call = self.call(Action::Get, name);
        let path = self.address.path_of(name)?;
        let mut fetch = Fetch::new(&self.store, &call, path, part, most_bytes);
        self.run(&call, most_bytes, async || fetch.attempt().await)?;
        Ok(fetch.into_content())
    }

    fn delete_by(&self, attempts: &Attempts, name: &str) -> Result<()> {
        let call = self.call(Action::Delete, name);
        let path = self.address.path_of(name)?;
        let attempt = async || Ok(self.store.delete(&path).await?);
        match self.run_by(attempts, &call, MOST_ANSWER_BYTES, attempt) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    async fn page(
        &self,
        call: &Call<'_>,
        prefix: &str,
        (token, most_names): (Option<&str>, Option<usize>),
    ) -> std::result::Result<(Vec<Listed>, Option<String>), Ended> {
        let page_token = token.map(str::to_owned);
        let options =
            PaginatedListOptions { page_token, max_keys: most_names, ..Default::default() };
        let page = self.store.list_paginated(Some(prefix), options).await?;
        let listed = page.result.objects.into_iter().filter_map(|object| {
            let modified_ms = object.last_modified.timestamp_millis().try_into().unwrap_or(0);
            let name = self.address.name_of(&object.location)?.to_owned();
            // The prefix itself, which some programs store as an object of no bytes.
            let is_below = name.len() > call.name.len() && name.starts_with(call.name);
            is_below.then_some(Listed { name, size_bytes: object.size, modified_ms })
        });
        let listed = listed.collect();
        if page.page_token.is_some() && page.page_token.as_deref() == token {
            let text = "the server's list does not come to an end".to_owned();
            return Err(Ended::Lasting(call.error(ErrorKind::Corrupt, text)));
        }
        Ok((listed, page.page_token))
    }
}

impl Objects for S3 {
    fn put(&self, name: &str, content: Vec<u8>) -> Result<()> {
        self.put_by(&self.attempts, name, content.into())
    }

    fn get(&self, name: &str, most_bytes: u64) -> Result<Vec<u8>> {
        self.fetch(name, most_bytes, None)
    }

    /// A request for no bytes is not sent: then a missing object is not an error.
    fn get_range(&self, name: &str, offset_bytes: u64, length_bytes: u64) -> Result<Vec<u8>> {
        let end = offset_bytes.saturating_add(length_bytes);
        if offset_bytes == end {
            return Ok(Vec::new());
        }
        match self.fetch(name, end - offset_bytes, Some(offset_bytes..end)) {
            Err(error) if error.kind() == ErrorKind::OutOfRange => Ok(Vec::new()),
            result => result,
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>> {
        self.list_in_pages(prefix, None)
    }

    fn list_in_pages(&self, prefix: &str, most_names: Option<usize>) -> Result<Vec<Listed>> {
        let call = self.call(Action::List, prefix);
        let full = self.address.full_prefix(prefix);
        let (mut found, mut token) = (Vec::new(), None);
        loop {
            let attempt = async || self.page(&call, &full, (token.as_deref(), most_names)).await;
            let (page, next) = self.run(&call, MOST_ANSWER_BYTES, attempt)?;
            found.extend(page);
            if next.is_none() {
                break;
            }
            if found.len() > MOST_LISTED {
                let text = format!("the server lists more than {MOST_LISTED} objects");
                return Err(call.error(ErrorKind::Corrupt, text));
            }
            token = next;
        }
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.delete_by(&self.attempts, name)
    }

    fn put_sign(&self, name: &str, content: &[u8]) -> Result<()> {
        self.put_by(&self.sign_attempts, name, Bytes::copy_from_slice(content))
    }

    fn delete_sign(&self, name: &str) -> Result<()> {
        self.delete_by(&self.sign_attempts, name)
    }

    fn place(&self) -> &str {
        &self.address.text
    }
}

/// Looking up a name may hang: the drop does not wait for it.
impl Drop for S3 {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
