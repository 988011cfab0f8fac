//! File systems, folders and searches.

use axum::Json;
use axum::extract::State;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_files::{
    Client, Entry, EntryKind, FileSystem, Received, choose, is_encrypted, join, matches,
};
use serde::{Deserialize, Serialize};

use super::entries::{FileEntry, FolderAbove, last_name, way};
use super::{Gone, about, ask, path};
use crate::api::caller::Caller;
use crate::api::input::{Fields, Names};
use crate::api::problem::{Answer, Problem};
use crate::invalid::invalid;
use crate::service::SharedService;

/// Default and maximum number of entries in an answer.
const PAGE: usize = 500;
const MAX_PAGE: usize = 5000;
/// Maximum number of files that a search finds.
const MAX_FOUND: usize = 1000;
/// Maximum number of entries of a folder that is sorted, and of bytes of their names.
const MAX_ENTRIES: usize = 500_000;
const MAX_NAMES_BYTES: usize = 32 << 20;
/// Maximum length of a pattern, in bytes: matching takes its length times that of each name.
const MAX_PATTERN_BYTES: usize = 256;
/// Number of messages about what could not be read.
const MAX_UNREAD: usize = 20;

/// A file system of a point, or what else a disk, partition or volume holds.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct PointFileSystem {
    /// Its name in requests, such as `vda1`.
    name: String,
    /// Such as `ext4`, `luks`, `bitlocker`, `swap` or `unknown`.
    format: String,
    label: String,
    size_bytes: u64,
    is_readable: bool,
    /// Why not, or what else is to say.
    note: Option<String>,
}

impl From<&FileSystem> for PointFileSystem {
    fn from(system: &FileSystem) -> PointFileSystem {
        // The words of the machine are for the command line.
        let note = match is_encrypted(&system.format) {
            true => Some(
                "encrypted: its key is not taken here; on the host: coldrise files with --key-file"
                    .to_owned(),
            ),
            false => system.note.clone(),
        };
        PointFileSystem {
            name: system.name.clone(),
            format: system.format.clone(),
            label: system.label.clone(),
            size_bytes: system.size_bytes,
            is_readable: system.is_readable,
            note,
        }
    }
}

/// What the disks of a point hold.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct PointFileSystems {
    /// MACHINE/POINT.
    point: String,
    file_systems: Vec<PointFileSystem>,
}

/// List the file systems of a point.
///
/// The first request about a point starts a small machine that reads its file systems, which takes some seconds. It
/// ends 10 minutes after its last use. Keys of encrypted disks are not taken: use `coldrise files --key-file` on the host.
#[utoipa::path(get, path = "/machines/{machine}/points/{point}/files", tag = "files",
    params(("machine" = String, Path), ("point" = String, Path)),
    responses((status = 200, body = PointFileSystems), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
pub(super) async fn file_systems(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(names): Names<(String, String)>,
) -> Answer<Json<PointFileSystems>> {
    let found = ask(service, caller, names, |_, systems, point, _| {
        let file_systems = systems.0.iter().map(PointFileSystem::from).collect();
        Ok(PointFileSystems { point: point.to_owned(), file_systems })
    });
    found.await.map(Json)
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct FolderQuery {
    /// The file system's name; that of the system if absent.
    system: Option<String>,
    /// The absolute path; `/` if absent.
    path: Option<String>,
    /// The bytes of the path, in hexadecimal digits, instead of `path`.
    path_hex: Option<String>,
    /// How many entries to pass over.
    offset: Option<usize>,
    /// Maximum number of entries; 500 if absent.
    #[param(minimum = 1, maximum = 5000)]
    count: Option<usize>,
}

/// A folder, or one file.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct FolderListing {
    /// MACHINE/POINT.
    point: String,
    /// The path itself.
    itself: FileEntry,
    /// The folders on the way to it.
    way: Vec<FolderAbove>,
    /// What the folder holds: folders first, then by name.
    entries: Vec<FileEntry>,
    /// The number of all of them.
    total: u64,
    /// Where the next page begins.
    next: Option<u64>,
    /// There are more than can be sorted here.
    is_cut: bool,
    /// What could not be read; 20 messages at most.
    unread: Vec<String>,
}

/// The result of a listing or a search.
#[derive(Default)]
struct Collected {
    itself: Option<Entry>,
    entries: Vec<Entry>,
    names_bytes: usize,
    is_cut: bool,
    unread: Vec<String>,
}

impl Collected {
    /// Takes what comes until there are `most` entries.
    fn take(&mut self, received: Received<'_>, most: usize) -> Result<()> {
        match received {
            Received::Entry(entry) => {
                self.names_bytes += entry.path.len() + entry.target.len();
                if self.entries.len() >= most || self.names_bytes > MAX_NAMES_BYTES {
                    self.is_cut = true;
                    return Err(Error::new(ErrorKind::Interrupted, "enough"));
                }
                self.entries.push(entry.clone());
            }
            Received::Unread(text) if self.unread.len() < MAX_UNREAD => {
                self.unread.push(text.to_owned());
            }
            Received::Unread(_) | Received::Content(_) => {}
        }
        Ok(())
    }

    /// An end because of the own bound is not an error.
    fn finish(&self, done: Result<()>) -> Result<()> {
        match done {
            Err(error) if self.is_cut && error.kind() == ErrorKind::Interrupted => Ok(()),
            done => done,
        }
    }
}

/// List a folder of a point, in pages.
#[utoipa::path(get, path = "/machines/{machine}/points/{point}/files/list", tag = "files",
    params(("machine" = String, Path), ("point" = String, Path), FolderQuery),
    responses((status = 200, body = FolderListing), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
pub(super) async fn list_files(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(names): Names<(String, String)>,
    Fields(query): Fields<FolderQuery>,
) -> Answer<Json<FolderListing>> {
    let path = path(query.path, query.path_hex)?;
    let (offset, count) = (query.offset.unwrap_or(0), query.count.unwrap_or(PAGE));
    let count = count.clamp(1, MAX_PAGE);
    let listed = ask(service, caller, names, move |client, systems, point, gone| {
        let device = choose(client, systems, query.system.as_deref())?;
        let mut found = about(&path, folder(client, device, &path, gone))?;
        let itself = found.itself.take().ok_or_else(|| {
            Error::new(ErrorKind::ToolFailed, "the machine has listed nothing, not even the folder")
        })?;
        found.entries.sort_by(|a, b| {
            let order = |entry: &Entry| entry.kind != EntryKind::Folder;
            order(a).cmp(&order(b)).then_with(|| a.path.cmp(&b.path))
        });
        let total = found.entries.len();
        let page = found.entries.iter().skip(offset).take(count);
        let next = offset.saturating_add(count);
        Ok(FolderListing {
            point: point.to_owned(),
            itself: FileEntry::new(&itself, &path),
            way: way(&path),
            entries: page.map(|entry| FileEntry::new(entry, &join(&path, &entry.path))).collect(),
            total: total as u64,
            next: (next < total).then_some(next as u64),
            is_cut: found.is_cut,
            unread: found.unread,
        })
    });
    listed.await.map(Json)
}

fn folder(client: &mut Client<'_>, device: u64, path: &[u8], gone: &Gone) -> Result<Collected> {
    let mut found = Collected::default();
    let done = client.list(device, path, |received| {
        gone.check()?;
        match received {
            Received::Entry(entry) if entry.path.is_empty() => {
                found.itself = Some(entry.clone());
                Ok(())
            }
            received => found.take(received, MAX_ENTRIES),
        }
    });
    found.finish(done)?;
    Ok(found)
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct FindQuery {
    /// The file system's name; that of the system if absent.
    system: Option<String>,
    /// The absolute path of the folder; `/` if absent.
    path: Option<String>,
    /// The bytes of the path, in hexadecimal digits, instead of `path`.
    path_hex: Option<String>,
    /// The name; `*` stands for any characters and `?` for one. With a slash: the path below the folder.
    pattern: String,
}

/// Files that a search has found.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct FoundFiles {
    /// MACHINE/POINT.
    point: String,
    /// At most 1,000, in the order of the folders.
    entries: Vec<FileEntry>,
    /// There are more.
    has_more: bool,
    /// What could not be read; 20 messages at most.
    unread: Vec<String>,
}

/// Find files of a point by name, below a folder.
#[utoipa::path(get, path = "/machines/{machine}/points/{point}/files/find", tag = "files",
    params(("machine" = String, Path), ("point" = String, Path), FindQuery),
    responses((status = 200, body = FoundFiles), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
pub(super) async fn find_files(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(names): Names<(String, String)>,
    Fields(query): Fields<FindQuery>,
) -> Answer<Json<FoundFiles>> {
    let top = path(query.path, query.path_hex)?;
    let pattern = query.pattern.into_bytes();
    if pattern.is_empty() || pattern.len() > MAX_PATTERN_BYTES {
        return Err(invalid(format!("pattern: give 1 to {MAX_PATTERN_BYTES} bytes")).into());
    }
    let found = ask(service, caller, names, move |client, systems, point, gone| {
        let device = choose(client, systems, query.system.as_deref())?;
        let mut found = Collected::default();
        let done = client.walk(device, &top, |received| {
            gone.check()?;
            match received {
                Received::Entry(entry) if !fits(&pattern, &entry.path) => Ok(()),
                received => found.take(received, MAX_FOUND),
            }
        });
        about(&top, found.finish(done))?;
        let entry = |entry: &Entry| FileEntry::new(entry, &join(&top, &entry.path));
        Ok(FoundFiles {
            point: point.to_owned(),
            entries: found.entries.iter().map(entry).collect(),
            has_more: found.is_cut,
            unread: found.unread,
        })
    });
    found.await.map(Json)
}

fn fits(pattern: &[u8], path: &[u8]) -> bool {
    let part = if pattern.contains(&b'/') { path } else { last_name(path) };
    !path.is_empty() && matches(pattern, part)
}
