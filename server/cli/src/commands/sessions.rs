//! `coldrise sessions`: lists the published sessions.

use coldrise_block::{ErrorKind, Result};
use coldrise_hypervisors::moves::{MoveNote, move_state};
use coldrise_hypervisors::vsphere::{VsphereNote, recovery_note};
use coldrise_inventory::{MarksDetails, SessionDetails, SessionListing};
use coldrise_session::{DiskActivity, incoming_sentence};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::{show_count, show_moment, show_size};
use coldrise_recovery::unserved;

/// The session on several lines.
pub(super) fn session_text(session: &SessionDetails) -> String {
    let follows = session.follows.as_ref();
    let follows = follows.map(|source| format!("follows      {source}\n")).unwrap_or_default();
    let served = match &session.server {
        Some(server) => format!(
            "{}, process {}, since {}",
            server.program,
            server.process,
            show_moment(server.opened_at_ms)
        ),
        None if session.is_served => "a front end has it open".to_owned(),
        None => "no".to_owned(),
    };
    let mut text = format!(
        "session      {}\npublished    {} at {}\n{follows}in use       {served}\ncaptured     {}\n",
        session.session,
        session.address,
        show_moment(session.created_at_ms),
        show_size(session.captured_bytes),
    );
    for disk in &session.disks {
        text.push_str(&format!("disk         {}  {}\n", disk.export, show_size(disk.size_bytes)));
        disk.activity.iter().for_each(|activity| text.push_str(&activity_text(activity)));
    }
    if let Some(why) = &session.activity_missing {
        text.push_str(&format!("activity     unknown: {why}\n"));
    }
    text
}

/// What clients did with a disk.
fn activity_text(activity: &DiskActivity) -> String {
    let DiskActivity { read, write, write_zeroes, flush, .. } = activity;
    format!(
        "  read       {} in {}: {} from the backup, {} from memory, {} captured, {} zeroes\n  \
         written    {} in {}; flushes: {}\n",
        show_size(read.bytes),
        show_count(read.operations, "request"),
        show_size(activity.from_backup_bytes),
        show_size(activity.from_cache_bytes),
        show_size(activity.from_captured_bytes),
        show_size(activity.zero_bytes),
        show_size(write.bytes.saturating_add(write_zeroes.bytes)),
        show_count(write.operations.saturating_add(write_zeroes.operations), "request"),
        flush.operations,
    )
}

fn unless_ended<T>(found: Result<Option<T>>) -> Result<Option<T>> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => found,
    }
}

pub(crate) fn run(invocation: &Invocation) -> Result<Report> {
    let repository = invocation.open()?;
    let listing = SessionListing::read(&repository)?;
    let (mut moves, mut recoveries, mut incoming) = (Vec::new(), Vec::new(), Vec::new());
    let (mut unserved_sessions, mut history) = (Vec::new(), Vec::new());
    let mut text = text(&listing);
    for session in &listing.sessions {
        let Ok(name) = session.session.parse() else { continue };
        // A session that ends meanwhile has no more to list.
        let state = match coldrise_session::session(&repository, &name) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            state => state?,
        };
        if let Some(sentence) = incoming_sentence(&repository, &state.document).ok().flatten() {
            text.push_str(&format!("\n{sentence}\n"));
            incoming.push(IncomingSession { session: &session.session, sentence });
        }
        if let Some(note) = unless_ended(recovery_note(&repository, &name))? {
            let sentence = note.sentence(&name);
            text.push_str(&format!("\n{sentence}\n"));
            recoveries.push(ListedRecovery { session: &session.session, sentence, note });
        }
        // Of a session that no process serves, all layers would be read.
        if state.is_served {
            let marks = MarksDetails::read(&repository, &name);
            // One that opens or closes it does not answer.
            if let Ok(marks) = marks.map(|marks| MarksDetails { marks: Vec::new(), ..marks }) {
                text.push_str(&history_text(&marks));
                history.push(marks);
            }
        }
        match unserved(&repository, &state) {
            Ok(None) => {}
            Ok(Some(sentence)) => {
                text.push_str(&format!("\n{sentence}\n"));
                unserved_sessions.push(UnservedSession { session: &session.session, sentence });
            }
            Err(error) => invocation.remark(&error.full_message()),
        }
        let Some(state) = unless_ended(move_state(&repository, &name))? else { continue };
        text.push_str(&format!("\n{}\n", state.sentence));
        let (session, is_running, note) = (&session.session, state.is_running, state.note);
        moves.push(ListedMove { session, is_running, sentence: state.sentence, note });
    }
    let unserved = unserved_sessions;
    let listing =
        LocalListing { listing: &listing, moves, recoveries, unserved, incoming, history };
    Ok(Report::answer(&listing, text))
}

/// The list, with what only this host knows.
#[derive(Serialize)]
struct LocalListing<'a> {
    #[serde(flatten)]
    listing: &'a SessionListing,
    /// Sessions whose disks are moved, or were.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    moves: Vec<ListedMove<'a>>,
    /// Sessions on which machines were recovered under vCenter or ESXi.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    recoveries: Vec<ListedRecovery<'a>>,
    /// Sessions whose machines stand still, because nothing serves their disks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unserved: Vec<UnservedSession<'a>>,
    /// Sessions whose points are still on their way here.
    #[serde(rename = "coming", skip_serializing_if = "Vec::is_empty")]
    incoming: Vec<IncomingSession<'a>>,
    /// What served sessions can go back to, and the sites that get their marks; without the marks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    history: Vec<MarksDetails>,
}

/// To what a session can go back, and which sites have that.
fn history_text(marks: &MarksDetails) -> String {
    let session = &marks.session;
    let mut text = String::new();
    if let (Some(first), Some(last)) = (marks.stretches.first(), marks.stretches.last()) {
        let held = marks.held_bytes.map(|held| format!("; {} held", show_size(held)));
        text.push_str(&format!(
            "\nlive/{session} can go back to {}, at best each {} s{} (coldrise marks {session})\n",
            show_moment(first.from_ms),
            last.finest_step_s.max(1),
            held.unwrap_or_default(),
        ));
    }
    for site in &marks.sites {
        let lag = site.lag_s.map_or("nothing yet".to_owned(), |s| format!("up to {s} s ago"));
        text.push_str(&format!("live/{session} is sent to site {}: {lag}\n", site.link));
    }
    text
}

#[derive(Serialize)]
struct IncomingSession<'a> {
    session: &'a str,
    sentence: String,
}

#[derive(Serialize)]
struct UnservedSession<'a> {
    session: &'a str,
    sentence: String,
}

#[derive(Serialize)]
struct ListedRecovery<'a> {
    session: &'a str,
    sentence: String,
    #[serde(flatten)]
    note: VsphereNote,
}

#[derive(Serialize)]
struct ListedMove<'a> {
    session: &'a str,
    is_running: bool,
    sentence: String,
    #[serde(flatten)]
    note: MoveNote,
}

/// The list for people and for programs.
pub(crate) fn report(listing: &SessionListing) -> Report {
    Report::answer(listing, text(listing))
}

fn text(listing: &SessionListing) -> String {
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
    let mut followed = String::new();
    for session in &listing.sessions {
        if let Some(source) = &session.follows {
            followed
                .push_str(&format!("\n{0} follows {source} (coldrise marks {0})", session.session));
        }
    }
    match rows.len() {
        0 => "nothing is published: publish a point with coldrise publish".to_owned(),
        _ => table(&["SESSION", "POINT", "PUBLISHED AT", "IN USE", ">CAPTURED"], &rows) + &followed,
    }
}
