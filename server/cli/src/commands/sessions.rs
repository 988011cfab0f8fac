//! `coldrise sessions`: lists the published sessions.

use coldrise_block::Result;
use coldrise_inventory::{SessionDetails, SessionListing};

use crate::invocation::Invocation;
use crate::report::{table, Report};
use crate::units::{show_moment, show_size};

/// The session on several lines.
pub(super) fn session_text(session: &SessionDetails) -> String {
    let served = if session.is_served { "a front end has it open" } else { "no" };
    let mut text = format!(
        "session      {}\npublished    {} at {}\nin use       {served}\ncaptured     {}\n",
        session.session,
        session.address,
        show_moment(session.created_at_ms),
        show_size(session.captured_bytes),
    );
    for disk in &session.disks {
        text.push_str(&format!("disk         {}  {}\n", disk.export, show_size(disk.size_bytes)));
    }
    text
}

pub(crate) fn run(invocation: &Invocation) -> Result<Report> {
    Ok(report(&SessionListing::read(&invocation.open()?)?))
}

/// The list for people and for programs.
pub(crate) fn report(listing: &SessionListing) -> Report {
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
    Report::answer(listing, text)
}
