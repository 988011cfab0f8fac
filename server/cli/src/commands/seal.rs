//! `coldrise seal`: what a session captured becomes a restore point.

use clap::Args;
use coldrise_block::Result;
use coldrise_store::SessionName;
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::show_duration;

/// Make a restore point of what a session is now, while it goes on.
///
/// Takes the same short time however much was captured. All disks of the session are
/// sealed at the same moment. A machine that runs on the session is not disturbed; what
/// it has not yet written to its disks is not in the point.
#[derive(Debug, Args)]
pub(crate) struct SealArguments {
    /// The session.
    #[arg(value_name = "SESSION")]
    session: SessionName,
}

#[derive(Serialize)]
struct Sealed {
    session: String,
    address: String,
    elapsed_ms: u64,
}

/// Sealed points stand in the session's document until the next writer enters them
/// into the catalog, and every seal writes the whole document. Where so many wait,
/// this command is that writer.
const MANY_WAITING: usize = 64;

pub(crate) fn run(invocation: &Invocation, arguments: &SealArguments) -> Result<Report> {
    let repository = invocation.open()?;
    let point = coldrise_session::seal(&repository, &arguments.session)?;
    let session = coldrise_session::session(&repository, &arguments.session);
    if session.is_ok_and(|session| session.document.waiting_points() >= MANY_WAITING) {
        // A backup that is running has the repository: then the next seal tries again.
        if let Err(error) = invocation.open_for_writing() {
            tracing::debug!(error = %error.full_message(), "sealed points go on waiting");
        }
    }
    let sealed = Sealed {
        session: arguments.session.to_string(),
        address: format!("{}/{}", point.machine, point.point),
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
