//! `coldrise seal`: makes a restore point from a session's captured writes.

use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_recovery::keep_parts;
use coldrise_requests::{Seal, sealable};
use coldrise_session::{SealReport, SessionDocument, SkippedFile};
use coldrise_store::Address;
use serde::Serialize;

use super::skipped_files;
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::show_duration;

/// Make a restore point from a session's current state.
///
/// The session continues. A seal takes the same short time for any amount of captured data. It
/// seals all disks of the session at the same moment and does not disturb a running machine;
/// data that the machine has not yet written to its disks is not in the point. The point
/// carries the small files that clients keep in the session's folder: up to 1 MiB each and 4
/// MiB together, without locks and swap. Files that are too large are named.
///
/// live/SESSION@TIME seals the session as it was at a time mark (see coldrise marks).
#[derive(Debug, Args)]
pub(crate) struct SealArguments {
    #[command(flatten)]
    request: Seal,

    /// Give up (exit code 11) if the process that serves the session has not begun the commit
    /// after this many seconds. A seal that was cancelled or has timed out never happens later.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=86_400))]
    wait: u32,
}

#[derive(Serialize)]
struct SealOutput {
    session: String,
    address: String,
    /// Files in the session's folder that the point does not carry.
    left_out: Vec<SkippedFile>,
    elapsed_ms: u64,
}

/// Sealed points are in the session's document until the next writer enters them into the
/// catalog, and every seal writes the whole document. When this many wait, this command
/// becomes that writer.
const MANY_WAITING: usize = 64;
/// So does it when their layers, and the parts beside their disks, take this many bytes of the document, which holds
/// at most 16 MiB: a point names all layers below it.
const MANY_WAITING_BYTES: usize = 256 << 10;

pub(crate) fn run(invocation: &Invocation, arguments: &SealArguments) -> Result<Report> {
    let repository = invocation.open()?;
    let patience = Duration::from_secs(u64::from(arguments.wait));
    let (session, sealed) = match &sealable(&arguments.request.session)? {
        Address::Marked { session, time, .. } => {
            let sealed = coldrise_session::seal_at(&repository, session, time, patience)?;
            (&session.clone(), sealed)
        }
        Address::Live { session, .. } => {
            keep_parts(invocation.caller()?, &repository, session);
            let sealed = coldrise_session::seal(&repository, session, patience)?;
            (&session.clone(), sealed)
        }
        Address::Point { .. } => return Err(Error::new(ErrorKind::Internal, "not a session")),
    };
    let SealReport { point, left_out } = sealed;
    skipped_files::tell(&left_out);
    let found = coldrise_session::session(&repository, session);
    let many_wait = |document: &SessionDocument| {
        document.waiting_points() >= MANY_WAITING || document.waiting_bytes() >= MANY_WAITING_BYTES
    };
    if found.is_ok_and(|found| many_wait(&found.document)) {
        // A running backup holds the repository: the next seal tries again.
        if let Err(error) = invocation.access()?.open_for_writing() {
            tracing::debug!(error = %error.full_message(), "sealed points continue to wait");
        }
    }
    let sealed = SealOutput {
        session: session.to_string(),
        address: format!("{}/{}", point.machine, point.point),
        left_out,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = format!(
        "sealed session {} as {} in {}",
        sealed.session,
        sealed.address,
        show_duration(invocation.elapsed())
    );
    Ok(Report::done(&sealed, text))
}
