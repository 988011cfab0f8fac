//! A copy to a bucket, and one from there.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{ErrorKind, Result};
use coldrise_ingest::{Flow, RateLimit};
use coldrise_replica::{
    BucketRemote, CopyRequest, CopyTarget, RateWindows, copy, fetch_from_bucket,
};
use coldrise_session::SharedWriter;
use coldrise_store::Repository;

use super::{CopyArguments, report, with_advice};
use crate::commands::bucket;
use crate::invocation::Invocation;
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
    let limit = Arc::new(RateLimit::new(Flow::Stopped));
    let view = ProgressView::new(invocation);
    let copied = coldrise_replica::paced(windows, &limit, || match arguments.options.to {
        Some(_) => {
            let far = BucketRemote::begin(&bucket, here)?;
            let target = Some((Arc::clone(here), CopyTarget::Bucket(url.to_owned())));
            let limit = Some(Arc::clone(&limit));
            let request = CopyRequest { target, limit, ..arguments.request()? };
            copy(here, &far, &request, &view, cancel)
        }
        None => {
            let far = SharedWriter::join(invocation.access()?, cancel)?;
            let request = arguments.fetch_request()?;
            let terms = (arguments.prefix(), Some(Arc::clone(&limit)));
            fetch_from_bucket(&bucket, &far, &request, terms, &view, cancel)
        }
    });
    drop(view);
    let place = arguments.options.to.as_deref().map_or_else(|| invocation.repository_path(), Ok)?;
    let summary = with_advice(copied, place)?;
    let mut report = report(invocation, arguments, &summary, None);
    let damaged = bucket::tell_damaged(&bucket);
    if !damaged.is_empty() {
        tracing::warn!("{}", damaged.trim_start());
        report.exit_code = coldrise_runs::exit_code(ErrorKind::Incomplete);
    }
    Ok(report)
}
