//! `coldrise unpublish`: the end of a session.

use clap::Args;
use coldrise_block::Result;
use coldrise_session::LeftOut;
use coldrise_store::SessionName;
use serde::Serialize;

use super::left_out;
use crate::invocation::Invocation;
use crate::report::Report;

/// End a session. Its captured writes become a restore point, unless --discard is given.
///
/// No point is made if nothing was captured since the last seal and no file in the session's
/// folder changed that a point carries. Points sealed earlier always stay. A session in use is
/// refused.
#[derive(Debug, Args)]
pub(crate) struct UnpublishArguments {
    /// The session.
    #[arg(value_name = "SESSION")]
    session: SessionName,

    /// Discard everything captured since the last seal.
    #[arg(long)]
    discard: bool,
}

#[derive(Serialize)]
struct Ended {
    session: String,
    address: Option<String>,
    left_out: Vec<LeftOut>,
    discarded: bool,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &UnpublishArguments) -> Result<Report> {
    let UnpublishArguments { session, discard } = arguments;
    let sealed = coldrise_session::unpublish(&invocation.open()?, session, *discard)?;
    let (point, left_out) = match sealed {
        Some(sealed) => (Some(sealed.point), sealed.left_out),
        None => (None, Vec::new()),
    };
    left_out::tell(&left_out);
    let ended = Ended {
        session: session.to_string(),
        address: point.map(|point| format!("{}/{}", point.machine, point.point)),
        left_out,
        discarded: *discard,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = match (&ended.address, discard) {
        (Some(address), _) => format!("session {session} ended; sealed as {address}"),
        (None, true) => format!("session {session} ended; what it captured was discarded"),
        (None, false) => format!("session {session} ended; it had captured nothing new"),
    };
    Ok(Report::done(&ended, text))
}
