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

pub(crate) fn run(invocation: &Invocation, arguments: &SealArguments) -> Result<Report> {
    let point = coldrise_session::seal(&invocation.open()?, &arguments.session)?;
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
