//! `coldrise sessions`: lists the published sessions.

use coldrise_block::Result;
use coldrise_session::SessionState;
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::{table, Report};
use crate::units::{show_moment, show_size};

#[derive(Serialize)]
struct Listing {
    sessions: Vec<ShownSession>,
}

/// A session in the output of `sessions` and `show`.
#[derive(Serialize)]
pub(super) struct ShownSession {
    session: String,
    /// The point that was published.
    address: String,
    machine: String,
    point: String,
    created_at_ms: u64,
    is_served: bool,
    captured_bytes: u64,
    disks: Vec<ShownDisk>,
}

#[derive(Serialize)]
struct ShownDisk {
    disk: String,
    export: String,
    size_bytes: u64,
}

impl ShownSession {
    pub(super) fn new(state: &SessionState) -> ShownSession {
        let document = &state.document;
        ShownSession {
            session: document.name.to_string(),
            address: format!("{}/{}", document.machine, document.point),
            machine: document.machine.to_string(),
            point: document.point.to_string(),
            created_at_ms: document.created_at_ms,
            is_served: state.is_served,
            captured_bytes: state.captured_bytes,
            disks: document
                .disks
                .iter()
                .map(|disk| ShownDisk {
                    disk: disk.name.to_string(),
                    export: format!("live/{}/{}", document.name, disk.name),
                    size_bytes: disk.size_bytes,
                })
                .collect(),
        }
    }

    /// The session on several lines.
    pub(super) fn text(&self) -> String {
        let served = if self.is_served { "a front end has it open" } else { "no" };
        let mut text = format!(
            "session      {}\npublished    {} at {}\nin use       {served}\ncaptured     {}\n",
            self.session,
            self.address,
            show_moment(self.created_at_ms),
            show_size(self.captured_bytes),
        );
        for disk in &self.disks {
            text.push_str(&format!(
                "disk         {}  {}\n",
                disk.export,
                show_size(disk.size_bytes)
            ));
        }
        text
    }
}

pub(crate) fn run(invocation: &Invocation) -> Result<Report> {
    let states = coldrise_session::sessions(&invocation.open()?)?;
    let listing = Listing { sessions: states.iter().map(ShownSession::new).collect() };
    let rows: Vec<Vec<String>> = listing
        .sessions
        .iter()
        .map(|session| {
            vec![
                session.session.clone(),
                session.address.clone(),
                show_moment(session.created_at_ms),
                if session.is_served { "yes" } else { "no" }.to_owned(),
                show_size(session.captured_bytes),
            ]
        })
        .collect();
    let text = match rows.len() {
        0 => "nothing is published: publish a point with coldrise publish".to_owned(),
        _ => table(&["SESSION", "POINT", "PUBLISHED AT", "IN USE", ">CAPTURED"], &rows),
    };
    Ok(Report::answer(&listing, text))
}
