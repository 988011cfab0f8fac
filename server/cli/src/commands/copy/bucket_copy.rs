//! A copy to a bucket, and one from there.

use std::sync::atomic::AtomicBool;
use std::sync::Arc;

use coldrise_block::Result;
use coldrise_ingest::{Flow, RateLimit};
use coldrise_replica::{
    copy, local_time, BucketFar, CopyRequest, CopySource, CopyTarget, FarSide, RateWindows,
};
use coldrise_session::{Openers, SharedWriter};
use coldrise_store::{OpenOptions, Repository};

use super::{attempts, report, told, CopyArguments};
use crate::commands::bucket;
use crate::invocation::{open_for_writing, Invocation};
use crate::progress::ProgressView;
use crate::report::Report;

pub(super) fn run(
    invocation: &Invocation,
    here: &Arc<Repository>,
    url: &str,
    windows: &RateWindows,
    arguments: &CopyArguments,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    let passphrase = arguments.passphrase(invocation)?;
    let bucket = bucket::open(url, &passphrase, arguments.retry, cancel)?;
    if arguments.to.is_some() {
        let far = BucketFar::begin(&bucket, here)?;
        let target = Some((Arc::clone(here), CopyTarget::Bucket(url.to_owned())));
        let request = CopyRequest { target, ..arguments.request() };
        return copied(invocation, here, &far, request, windows, arguments, cancel);
    }
    let (own, passphrase) = (invocation.repository_path()?, invocation.passphrase()?);
    let reader = || Repository::open(own, &passphrase, &OpenOptions { cache_bytes: 0 });
    let openers = Openers { writer: &|| open_for_writing(own, &passphrase), reader: &reader };
    let far = SharedWriter::join(own, openers, cancel)?;
    copied(invocation, &bucket, &far, arguments.request(), windows, arguments, cancel)
}

fn copied(
    invocation: &Invocation,
    source: &dyn CopySource,
    far: &dyn FarSide,
    request: CopyRequest,
    windows: &RateWindows,
    arguments: &CopyArguments,
    cancel: &AtomicBool,
) -> Result<Report> {
    let flow = windows.flow(local_time());
    if flow == Flow::Stopped {
        attempts::tell_wait(windows);
    }
    let limit = Arc::new(RateLimit::new(flow));
    let request = CopyRequest { limit: Some(Arc::clone(&limit)), ..request };
    let view = ProgressView::new(invocation);
    let copied = attempts::within(
        windows,
        |flow| limit.set(flow),
        || copy(source, far, &request, &view, cancel),
    );
    drop(view);
    let place = arguments.to.as_deref().map_or_else(|| invocation.repository_path(), Ok)?;
    let summary = told(copied, place)?;
    Ok(report(invocation, arguments, &summary, None))
}
