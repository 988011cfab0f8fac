//! `coldrise move` of a machine that was recovered under vCenter.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hypervisors::vsphere::{VsphereMoveRequest, VsphereNote, move_machine};
use coldrise_requests::Move;
use coldrise_store::{Repository, SessionName};
use serde_json::json;

use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::Report;

pub(super) fn run(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    (session, request): (&SessionName, &Move),
    note: &VsphereNote,
    cancel: &AtomicBool,
) -> Result<Report> {
    if !request.targets.is_empty() {
        let text =
            format!("{} runs at {}, which moves it to a datastore", note.name, note.access.server);
        let advice = format!("coldrise move live/{session} --to DATASTORE");
        return Err(Error::new(ErrorKind::InvalidInput, text).advise(advice));
    }
    let view = ProgressView::new(invocation);
    let done = move_machine(&VsphereMoveRequest {
        repository,
        session,
        target: request.to.as_deref(),
        cancel,
        progress: &view,
        tell: &|text| invocation.remark(text),
    });
    drop(view);
    let done = done?;
    let object = json!({ "session": session.as_str(), "machine": done.name, "datastore": done.target,
                         "address": done.point, "elapsed_ms": invocation.elapsed_ms() });
    let sealed = match &done.point {
        Some(point) => {
            format!("the session's last state is {point}\nend it     coldrise unpublish {session}")
        }
        None => format!(
            "the session's last state is not sealed: run coldrise move live/{session} again"
        ),
    };
    let text = format!("{} runs on {}; {sealed}", done.name, done.target);
    let mut report = Report::done(&object, text);
    if done.point.is_none() {
        report.exit_code = coldrise_runs::exit_code(ErrorKind::Incomplete);
    }
    Ok(report)
}
