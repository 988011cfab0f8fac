//! `coldrise recover --undo`.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_recovery::{MachineEnd, UndoRequest, Undone, undo};
use coldrise_store::Address;
use serde_json::json;

use super::RecoverArguments;
use crate::commands::skipped_files;
use crate::invocation::Invocation;
use crate::report::Report;

pub(super) fn run(
    invocation: &Invocation,
    address: &Address,
    arguments: &RecoverArguments,
) -> Result<Report> {
    let discard = arguments.request.discard;
    let Address::Live { session, disk: None } = address else {
        let text = format!("{address}: --undo takes live/SESSION");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    };
    let request = UndoRequest {
        discards: discard,
        access: &arguments.vsphere.access(),
        is_without_server: arguments.request.without_server,
    };
    let Undone { machine, end, sealed } =
        undo(invocation.caller()?, &invocation.open()?, session, &request)?;
    if let Some(sealed) = &sealed {
        skipped_files::tell(&sealed.left_out);
    }
    let address = sealed.map(|sealed| format!("{}/{}", sealed.point.machine, sealed.point.point));
    let object = json!({ "session": session.as_str(), "domain": machine, "address": address,
                         "machine_ended": matches!(end, MachineEnd::Ended), "discarded": discard,
                         "elapsed_ms": invocation.elapsed_ms() });
    let is_by_another = matches!(end, MachineEnd::ByAnother);
    let end = match end {
        MachineEnd::ByAnother => {
            format!("session {session} was ended by another command meanwhile")
        }
        MachineEnd::Ended => format!("{machine} was ended"),
        MachineEnd::NotThere => format!("session {session} was ended; {machine} did not run on it"),
        MachineEnd::Unknown(server) => {
            format!("session {session} was ended; {machine} at {server} was left as it is")
        }
    };
    let text = match (&address, discard) {
        (Some(address), _) => format!("{end}; its writes are {address}"),
        (None, _) if is_by_another => end,
        (None, true) => format!("{end}; its writes were discarded"),
        (None, false) => format!("{end}; it wrote nothing"),
    };
    Ok(Report::done(&object, text))
}
