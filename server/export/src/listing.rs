//! Lists exports: exact names, with one line of text each.

use crate::image_name::ImageOwner;
use crate::{image, image_name};
use coldrise_session::SessionDocument;
use coldrise_store::{DiskDocument, DiskName, PointDocument, Repository, SessionName};

/// The exports that a list shows. Clients can open all, listed or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listed {
    /// The disks.
    Disks,
    /// The disks, and each disk as image files.
    DisksAndImages,
}

/// One name that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportEntry {
    /// `MACHINE/POINT/DISK`, `MACHINE/POINT/FILE`, `live/SESSION/DISK` or
    /// `live/SESSION/FILE`.
    pub name: String,
    /// One line for people.
    pub description: String,
    /// True for everything of restore points.
    pub is_read_only: bool,
    /// Size of the disk in bytes, which an image of it may exceed.
    pub size_bytes: u64,
}

pub(crate) fn point_export_name(point: &PointDocument, file: &str) -> String {
    format!("{}/{}/{file}", point.machine, point.point)
}

/// `file` is the disk's own name or that of an image file of it.
pub(crate) fn point_description(point: &PointDocument, disk: &DiskName, file: &str) -> String {
    let image = if file == disk.as_str() { String::new() } else { format!(" as {file}") };
    format!("disk {disk} of {} at restore point {}{image}, read-only", point.machine, point.point)
}

pub(crate) fn point_entries<'a>(
    repository: &'a Repository,
    point: &'a PointDocument,
    listed: Listed,
) -> impl Iterator<Item = ExportEntry> + 'a {
    point.disks.iter().flat_map(move |disk| {
        let mut files = vec![disk.name.to_string()];
        if listed == Listed::DisksAndImages {
            files.extend(image_files(repository, point, disk));
        }
        files.into_iter().map(move |file| ExportEntry {
            name: point_export_name(point, &file),
            description: point_description(point, &disk.name, &file),
            is_read_only: true,
            size_bytes: disk.size_bytes,
        })
    })
}

fn image_files(repository: &Repository, point: &PointDocument, disk: &DiskDocument) -> Vec<String> {
    let names: Vec<_> = point.disks.iter().map(|disk| &disk.name).collect();
    let shape = image::point_shape(repository, point, disk);
    image_name::images(ImageOwner::Point, &disk.name, &shape, &names)
}

pub(crate) fn session_export_name(session: &SessionName, file: &str) -> String {
    format!("live/{session}/{file}")
}

/// `file` is the disk's own name or that of an image file of it.
pub(crate) fn session_description(
    session: &SessionDocument,
    disk: &DiskName,
    file: &str,
) -> String {
    let image = if file == disk.as_str() { String::new() } else { format!(" as {file}") };
    format!(
        "disk {disk} of session {}{image}, published from {}/{}",
        session.name, session.machine, session.point
    )
}

pub(crate) fn session_entries<'a>(
    repository: &'a Repository,
    session: &'a SessionDocument,
    listed: Listed,
) -> impl Iterator<Item = ExportEntry> + 'a {
    session.disks.iter().flat_map(move |disk| {
        let mut files = vec![disk.name.to_string()];
        if listed == Listed::DisksAndImages {
            let names: Vec<_> = session.disks.iter().map(|disk| &disk.name).collect();
            let shape = image::session_shape(repository, session, disk);
            files.extend(image_name::images(ImageOwner::Session, &disk.name, &shape, &names));
        }
        files.into_iter().map(move |file| ExportEntry {
            name: session_export_name(&session.name, &file),
            description: session_description(session, &disk.name, &file),
            is_read_only: false,
            size_bytes: disk.size_bytes,
        })
    })
}
