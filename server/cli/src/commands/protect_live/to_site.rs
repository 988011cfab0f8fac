//! The time marks of a session at another site, as they are made.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Progress, ProgressState, Result};
use coldrise_ingest::Rate;
use coldrise_replica::{
    CopyProgress, CopyStep, Link, Links, LiveProgress, LiveRequest, LiveStep, RateWindows, Site,
    send_live,
};
use coldrise_requests::ProtectLive;
use coldrise_runs::process_run;
use coldrise_session::SiteProgress;
use coldrise_store::{MachineName, Repository, SessionName};
use serde_json::json;

use crate::invocation::Invocation;
use crate::progress::ProgressView;
use crate::report::{Report, print_line};
use crate::units::{show_count, show_size};

/// How long the copy of the first point waits for a broken line.
const COPY_PATIENCE: Duration = Duration::from_secs(600);

/// Another site that gets the marks.
pub(super) struct ToSite {
    link: Link,
    address: String,
    rate: Option<Rate>,
}

impl ToSite {
    /// The site that a request names, if it names one.
    pub(super) fn of(
        repository: &Arc<Repository>,
        request: &ProtectLive,
    ) -> Result<Option<ToSite>> {
        let Some(to) = &request.to else { return Ok(None) };
        let rate = request.rate.as_deref().map(str::parse).transpose()?;
        let name: MachineName = to.parse()?;
        let link = Links::of(repository).find(&name).map_err(|error| {
            error.advise("coldrise link add makes a link, and coldrise link list shows them")
        })?;
        match &link.address {
            Some(address) => Ok(Some(ToSite { address: address.clone(), link, rate })),
            None => {
                let text = format!("site {to} dials this one: it cannot be dialled");
                Err(Error::new(ErrorKind::InvalidInput, text)
                    .advise("add a second link in the other direction, under another name"))
            }
        }
    }

    /// Sends the marks of a session there until `cancel` is set or the session is ended. Returns how far it came.
    pub(super) fn send(
        &self,
        invocation: &Invocation,
        repository: &Arc<Repository>,
        session: &SessionName,
        cancel: &Arc<AtomicBool>,
    ) -> (Result<()>, SiteProgress) {
        let view = View { invocation, session, link: &self.link.name, state: Mutex::default() };
        let sent = self.send_to(repository, session, &view, cancel);
        let last = view.shown().last.clone();
        (sent, last)
    }

    fn send_to(
        &self,
        repository: &Arc<Repository>,
        session: &SessionName,
        view: &View<'_>,
        cancel: &Arc<AtomicBool>,
    ) -> Result<()> {
        let site = Site {
            address: &self.address,
            identity: Links::of(repository).identity()?,
            peer: self.link.peer()?,
            patience: COPY_PATIENCE,
            windows: &RateWindows::new(Vec::new(), self.rate)?,
        };
        let request = LiveRequest {
            repository,
            session,
            link: &self.link.name,
            rate_bytes_per_second: self.rate.map(Rate::bytes_per_second),
        };
        send_live(&request, &site, view, cancel)
    }
}

/// Sends the marks of a session that runs from Coldrise, until Ctrl-C.
pub(super) fn run(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    session: &SessionName,
    to: &ToSite,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    let link = &to.link.name;
    process_run::progress(json!({ "phase": "sending", "session": session, "link": link }));
    let (sent, last) = to.send(invocation, repository, session, cancel);
    match sent {
        Err(error) if error.kind() == ErrorKind::Interrupted => {}
        sent => sent?,
    }
    let SiteProgress { session: there, marks, sent_bytes, .. } = last;
    let object = json!({ "session": session, "to": link, "site_session": there, "marks": marks,
        "sent_bytes": sent_bytes, "elapsed_ms": invocation.elapsed_ms() });
    let text = format!(
        "stopped: {} sent to site {link}, {}; what it has stays there (the same command continues)",
        show_count(marks, "mark"),
        show_size(sent_bytes)
    );
    Ok(Report::done(&object, text))
}

/// Shows what happens.
struct View<'a> {
    invocation: &'a Invocation,
    session: &'a SessionName,
    link: &'a MachineName,
    state: Mutex<Shown>,
}

#[derive(Default)]
struct Shown {
    last: SiteProgress,
    problem: Option<String>,
    /// While a point is copied.
    copying: Option<ProgressView>,
}

impl View<'_> {
    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress for View<'_> {
    fn update(&self, state: &ProgressState<'_>) {
        if let Some(view) = &self.shown().copying {
            view.update(state);
        }
    }
}

impl CopyProgress for View<'_> {
    fn reached(&self, step: &CopyStep<'_>) {
        if let Some(view) = &self.shown().copying {
            view.reached(step);
        }
    }
}

impl LiveProgress for View<'_> {
    fn live(&self, step: &LiveStep<'_>) {
        let View { invocation, session, link, .. } = self;
        let mut shown = self.shown();
        match step {
            LiveStep::NoMark if invocation.is_json() => {}
            LiveStep::NoMark => print_line(&format!(
                "live/{session} has no time mark yet: waiting for the first write of its machine"
            )),
            LiveStep::Copy => shown.copying = Some(ProgressView::new(invocation)),
            LiveStep::Connected(progress) | LiveStep::Mark(progress) => {
                let is_new = matches!(step, LiveStep::Connected(_));
                (shown.copying, shown.problem) = (None, None);
                shown.last = (*progress).clone();
                if invocation.is_json() {
                    let event = if is_new { "connected" } else { "sent" };
                    let line = json!({ "event": event, "session": session, "to": link,
                        "site_session": progress.session, "marked_at_ms": progress.marked_at_ms,
                        "current_ms": progress.current_ms, "sent_bytes": progress.sent_bytes });
                    print_line(&line.to_string());
                } else if is_new {
                    let there = progress.session.as_deref().unwrap_or_default();
                    print_line(&format!(
                        "site {link} has live/{session} as live/{there}, and gets its marks as they are made (coldrise marks {session} shows how far it is)"
                    ));
                }
            }
            LiveStep::Problem(error) => {
                shown.copying = None;
                let problem = error.full_message();
                if invocation.is_json() {
                    let line = json!({ "event": "failed", "session": session, "to": link, "problem": problem });
                    print_line(&line.to_string());
                } else if shown.problem.as_ref() != Some(&problem) {
                    invocation.remark(&format!("site {link}: {problem}; trying again"));
                }
                shown.problem = Some(problem);
            }
        }
    }
}
