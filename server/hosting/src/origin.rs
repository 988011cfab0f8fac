//! The source of a machine: a restore point, or one that is still on its way here.

use std::sync::Arc;

use coldrise_block::{ErrorKind, Result};
use coldrise_session::{Catalog, IncomingPoint, SessionDocument, set_mark_rules};
use coldrise_store::{
    Configuration, MachineName, MarkRules, PointDocument, PointSelector, Repository, SessionName,
};

use crate::caller::Caller;

/// The source of publish, boot and recover.
pub enum Origin {
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
    pub fn find(
        caller: &Caller,
        repository: &Arc<Repository>,
        machine: &MachineName,
        selector: &PointSelector,
    ) -> Result<Origin> {
        let catalog = Catalog::new(repository);
        match catalog.point(machine, selector) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                match IncomingPoint::find(repository, machine, selector)? {
                    Some(incoming) => Ok(Origin::IncomingPoint(Box::new(incoming))),
                    None => Err(error),
                }
            }
            point => {
                let point = point?;
                tell_newer(caller, &catalog, selector, &point);
                Ok(Origin::Point(Box::new(point)))
            }
        }
    }

    /// The point's document.
    pub fn document(&self) -> &PointDocument {
        match self {
            Origin::Point(point) => point,
            Origin::IncomingPoint(incoming) => &incoming.point.document,
        }
    }

    /// The machine's configuration.
    pub fn configuration(&self) -> Option<&Configuration> {
        self.document().configuration.as_ref()
    }

    /// Publishes it. Reports missing parts first. `marks`: which time marks are kept; `None` for the default.
    ///
    /// # Errors
    /// Those of [`coldrise_session::publish`] and [`coldrise_session::publish_incoming`].
    pub fn publish(
        &self,
        caller: &Caller,
        repository: &Arc<Repository>,
        name: Option<SessionName>,
        marks: Option<MarkRules>,
    ) -> Result<SessionDocument> {
        let session = match self {
            Origin::Point(point) => crate::vmx::publish(repository, point, name)?,
            Origin::IncomingPoint(incoming) => {
                caller.remark(&incoming.sentence(repository));
                crate::vmx::publish_incoming(repository, incoming, name)?
            }
        };
        if let Some(marks) = marks {
            set_mark_rules(repository, &session.name, marks)?;
        }
        Ok(session)
    }
}

/// If the user asked for the latest point, warns of newer points that are lost or dated in
/// the future. If that is unknown, it only prints a remark: a sound point is usable
/// nevertheless.
pub fn tell_newer(
    caller: &Caller,
    catalog: &Catalog,
    selector: &PointSelector,
    point: &PointDocument,
) {
    let PointSelector::Latest(_) = selector else { return };
    if let Ok(Some(warning)) = catalog.future_warning(&point.machine) {
        caller.remark(&format!("warning: {warning}"));
    }
    let lost = match catalog.lost_points(Some(&point.machine)) {
        Ok(lost) => lost,
        Err(error) => {
            let why = error.full_message();
            caller.remark(&format!("cannot determine whether a newer point is lost: {why}"));
            return;
        }
    };
    for (machine, name) in lost.into_iter().filter(|(_, name)| *name > point.point) {
        let lost = catalog.lost(&machine, &name).message();
        caller.remark(&format!("{} is older than lost points: {lost}", point.point));
    }
}
