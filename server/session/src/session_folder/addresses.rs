//! Addresses of points, sessions and their disks, as text. Markers use them as names.

use coldrise_store::PointDocument;

use crate::session_folder::document::{SessionDisk, SessionDocument};

/// `MACHINE/POINT`.
pub(crate) fn point_name(point: &PointDocument) -> String {
    format!("{}/{}", point.machine, point.point)
}

/// `live/SESSION`.
pub(crate) fn session_name(session: &SessionDocument) -> String {
    format!("live/{}", session.name)
}

/// `MACHINE/POINT/DISK`.
pub(crate) fn point_disk(point: &PointDocument, disk: &str) -> String {
    format!("{}/{}/{disk}", point.machine, point.point)
}

/// `live/SESSION/DISK`.
pub(crate) fn session_disk(session: &SessionDocument, disk: &SessionDisk) -> String {
    format!("live/{}/{}", session.name, disk.name)
}
