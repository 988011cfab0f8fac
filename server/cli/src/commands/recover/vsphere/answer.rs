//! The output of the command.

use std::time::Duration;

use coldrise_hypervisors::vsphere::VsphereNote;
use coldrise_store::SessionName;
use serde::Serialize;
use serde_json::json;

use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::units::show_duration;

/// Says that the machine runs, while this command continues.
pub(super) fn tell_running(
    invocation: &Invocation,
    session: &SessionName,
    note: &VsphereNote,
    serves: bool,
) {
    if invocation.is_json() {
        let event = json!({ "event": "running", "session": session.as_str(), "machine": note.name,
                            "server": note.access.server, "datastore": note.datastore,
                            "serves_nfs": serves, "elapsed_ms": invocation.elapsed_ms() });
        print_line(&event.to_string());
    } else if serves {
        print_line(&format!(
            "{}\nthis command serves its disks: leave it running",
            running_text(session, note, invocation.elapsed())
        ));
    }
}

fn running_text(session: &SessionName, note: &VsphereNote, elapsed: Duration) -> String {
    format!(
        "{} runs at {} from session {session}, after {}\n  keep it     coldrise move live/{session} --to DATASTORE\n  \
         undo        coldrise recover live/{session} --undo",
        note.name,
        note.access.server,
        show_duration(elapsed)
    )
}

#[derive(Serialize)]
struct Recovered<'a> {
    session: &'a str,
    machine: &'a str,
    server: &'a str,
    hosts: &'a [String],
    datastore: &'a str,
    /// `running`: another NFS server serves the disks; `stalled`, `undone` or `moved`.
    state: &'static str,
    elapsed_ms: u64,
}

/// The final answer.
pub(super) fn report(
    invocation: &Invocation,
    session: &SessionName,
    note: &VsphereNote,
    state: &'static str,
) -> Report {
    let recovered = Recovered {
        session: session.as_str(),
        machine: &note.name,
        server: &note.access.server,
        hosts: &note.hosts,
        datastore: &note.datastore,
        state,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = match state {
        "stalled" => format!(
            "the NFS server has ended: I/O to the disks of {} is blocked; nothing is lost if the server is back within two \
             minutes\n  continue  coldrise recover live/{session} --to vcenter:{}\n  end it    coldrise recover \
             live/{session} --undo",
            note.name, note.access.server
        ),
        "moved" => {
            format!("{} runs on production storage; coldrise sessions says where", note.name)
        }
        "undone" => format!("{} was ended, and its session", note.name),
        _ => running_text(session, note, invocation.elapsed()),
    };
    Report::done(&recovered, text)
}
