//! Points that are still on their way to this repository, for people and for programs.

use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::ComingDetails;
use coldrise_session::{incoming_sentence, Catalog, IncomingPoint, SessionDocument};
use coldrise_store::{
    Configuration, MachineName, PointDocument, PointSelector, Repository, SessionName,
};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::targets::tell_newer;
use crate::units::{show_moment, show_size};

/// What publish, boot and recover begin with.
pub(crate) enum Origin {
    /// A restore point.
    Point(Box<PointDocument>),
    /// A point that is still on its way here.
    IncomingPoint(Box<IncomingPoint>),
}

impl Origin {
    /// A restore point. If the machine has none such, the point on its way of that name; for `latest` only if the
    /// machine has no restore point at all.
    ///
    /// # Errors
    /// As for [`Catalog::point`].
    pub(crate) fn find(
        invocation: &Invocation,
        repository: &Arc<Repository>,
        machine: &MachineName,
        selector: &PointSelector,
    ) -> Result<Origin> {
        let catalog = Catalog::new(repository);
        match catalog.point(machine, selector) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                match IncomingPoint::find(repository, machine, selector)? {
                    Some(coming) => Ok(Origin::IncomingPoint(Box::new(coming))),
                    None => Err(error),
                }
            }
            point => {
                let point = point?;
                tell_newer(invocation, &catalog, selector, &point);
                Ok(Origin::Point(Box::new(point)))
            }
        }
    }

    /// The point's document.
    pub(crate) fn document(&self) -> &PointDocument {
        match self {
            Origin::Point(point) => point,
            Origin::IncomingPoint(coming) => &coming.point.document,
        }
    }

    /// The machine's configuration.
    pub(crate) fn configuration(&self) -> Option<&Configuration> {
        self.document().configuration.as_ref()
    }

    /// Publishes it. What is missing is said before.
    ///
    /// # Errors
    /// Those of [`coldrise_session::publish`] and [`coldrise_session::publish_incoming`].
    pub(crate) fn publish(
        &self,
        invocation: &Invocation,
        repository: &Arc<Repository>,
        name: Option<SessionName>,
    ) -> Result<SessionDocument> {
        match self {
            Origin::Point(point) => coldrise_hosting::vmx::publish(repository, point, name),
            Origin::IncomingPoint(coming) => {
                invocation.remark(&coming.sentence(repository));
                coldrise_hosting::vmx::publish_incoming(repository, coming, name)
            }
        }
    }
}

/// Before a machine is ended: its writes cannot become a restore point while the point below them is on its way.
///
/// # Errors
/// `Busy` then; `NotFound` without such a session.
pub(crate) fn check_can_seal(repository: &Arc<Repository>, session: &SessionName) -> Result<()> {
    let document = coldrise_session::session(repository, session)?.document;
    match incoming_sentence(repository, &document)? {
        None => Ok(()),
        Some(sentence) => Err(Error::new(ErrorKind::Busy, sentence).advise(format!(
            "wait for the end of the copy, or throw the machine's writes away: coldrise recover live/{session} --undo --discard"
        ))),
    }
}

/// A row of the list of points.
pub(crate) fn row(coming: &ComingDetails) -> Vec<String> {
    vec![
        coming.address.clone(),
        "coming".to_owned(),
        format!("{} % here", coming.percent_here),
        coming.disks.join(" "),
        show_size(coming.size_bytes),
        "-".to_owned(),
        String::new(),
        String::new(),
    ]
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    details: &'a ComingDetails,
    kind: &'static str,
}

/// One point on its way.
pub(crate) fn report(details: &ComingDetails) -> Report {
    let address = &details.address;
    let mut text = format!(
        "point        {address}\nkind         coming: {} % of it is here\nstored at    {} (at the other site)\n",
        details.percent_here,
        show_moment(details.created_at_ms)
    );
    for (name, size_bytes) in details.disks.iter().zip(&details.disk_sizes_bytes) {
        text.push_str(&format!("disk         {address}/{name}  {}\n", show_size(*size_bytes)));
    }
    let how = match details.is_reachable {
        true => "fetched from the other site when they are read",
        false => "the other site is not connected: reading them gives I/O errors (coldrise forget gives the point up)",
    };
    text.push_str(&format!("missing      {}: {how}\n", show_size(details.missing_bytes)));
    Report::answer(&Shown { details, kind: "coming" }, text)
}
