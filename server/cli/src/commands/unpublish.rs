//! `coldrise unpublish`: ends a session.

use clap::Args;
use coldrise_block::Result;
use coldrise_recovery::{prepare_end, remove_socket};
use coldrise_requests::{Unpublish, session_name};
use coldrise_session::SkippedFile;
use coldrise_store::advise_room;
use serde::Serialize;

use super::skipped_files;
use crate::invocation::Invocation;
use crate::report::Report;
use coldrise_hosting::leftovers;

/// End a session. Its captured writes become a restore point, unless --discard is given.
///
/// No point is made if nothing was captured since the last seal and none of the files in the
/// session's folder that a point carries has changed. Points sealed earlier always stay. A session in use is
/// refused.
#[derive(Debug, Args)]
pub(crate) struct UnpublishArguments {
    #[command(flatten)]
    request: Unpublish,
}

#[derive(Serialize)]
struct Ended {
    session: String,
    address: Option<String>,
    left_out: Vec<SkippedFile>,
    discarded: bool,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &UnpublishArguments) -> Result<Report> {
    let Unpublish { session, discard } = &arguments.request;
    let session = &session_name(session)?;
    let repository = invocation.open()?;
    let recovered = prepare_end(invocation.caller()?, &repository, session)?;
    let sealed = coldrise_session::unpublish(&repository, session, *discard);
    leftovers::remove(&repository);
    let sealed = sealed.map_err(advise_room)?;
    if let Some(recovered) = recovered {
        remove_socket(&repository, session, &recovered);
    }
    let (point, left_out) = match sealed {
        Some(sealed) => (Some(sealed.point), sealed.left_out),
        None => (None, Vec::new()),
    };
    skipped_files::tell(&left_out);
    let ended = Ended {
        session: session.to_string(),
        address: point.map(|point| format!("{}/{}", point.machine, point.point)),
        left_out,
        discarded: *discard,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = match (&ended.address, discard) {
        (Some(address), _) => format!("session {session} ended; sealed as {address}"),
        (None, true) => format!("session {session} ended; its captured writes were discarded"),
        (None, false) => format!("session {session} ended; it captured nothing new"),
    };
    Ok(Report::done(&ended, text))
}
