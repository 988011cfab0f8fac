//! The versions of a file over the points of a machine.

use axum::Json;
use axum::extract::State;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_files::{AttachedDisks, Client, FileSystems, State as FileState, together};
use coldrise_runs::FilesPoint;
use coldrise_session::{Catalog, check_offered};
use coldrise_store::{PointDocument, PointName};
use serde::{Deserialize, Serialize};

use super::entries::modified_ms;
use super::{Gone, Turn, Watched, path, readable};
use crate::api::caller::Caller;
use crate::api::content::note_read;
use crate::api::input::{Fields, Names};
use crate::api::problem::{Answer, Problem, blocking};
use crate::files_machines::Conversation;
use crate::service::{Service, SharedService};

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct VersionsQuery {
    /// The file system's name; that of the system if absent.
    system: Option<String>,
    /// The absolute path.
    path: Option<String>,
    /// The bytes of the path, in hexadecimal digits, instead of `path`.
    path_hex: Option<String>,
    /// Only points before this one, as `next` of the answer before.
    before: Option<String>,
}

/// The entry of a point under the path.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct PointState {
    point: String,
    /// `present`, `absent` or `unread`.
    state: &'static str,
    /// `file`, `folder`, `link` or `special`.
    kind: Option<&'static str>,
    size_bytes: Option<u64>,
    modified_ms: Option<i64>,
    /// The rest of the time of its last change, in nanoseconds.
    modified_ns: Option<u32>,
    /// Why the point could not be read.
    reason: Option<String>,
}

impl PointState {
    fn new(point: &PointName, state: &FileState) -> PointState {
        let mut found = PointState {
            point: point.to_string(),
            state: "absent",
            kind: None,
            size_bytes: None,
            modified_ms: None,
            modified_ns: None,
            reason: None,
        };
        match state {
            FileState::Absent => {}
            FileState::Unread(reason) => {
                found.state = "unread";
                found.reason = Some(reason.clone());
            }
            FileState::Present { kind, size_bytes, modified: (seconds, nanoseconds) } => {
                found.state = "present";
                found.kind = Some(kind.word());
                found.size_bytes = Some(*size_bytes);
                found.modified_ms = modified_ms(*seconds, *nanoseconds);
                found.modified_ns = Some(*nanoseconds % 1_000_000);
            }
        }
        found
    }
}

/// The states of a path in some points.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct FileVersions {
    /// The newest first, up to 12.
    points: Vec<PointState>,
    /// Where to continue; null if there is no older point.
    next: Option<String>,
}

/// Look at a path in the points of a machine, the newest first: up to 12 points in each answer.
///
/// Neighbouring points with the same length and time of the last change have the same version.
#[utoipa::path(get, path = "/machines/{machine}/files/versions", tag = "files",
    params(("machine" = String, Path), VersionsQuery),
    responses((status = 200, body = FileVersions), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
pub(super) async fn file_versions(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(machine): Names<String>,
    Fields(query): Fields<VersionsQuery>,
) -> Answer<Json<FileVersions>> {
    let machine = readable(&caller, &machine)?;
    let path = path(query.path, query.path_hex)?;
    let before = query.before.map(|point| point.parse::<PointName>()).transpose()?;
    let turn = Turn::take(&caller)?;
    let gone = Gone::default();
    let _watched = Watched(gone.clone());
    let found = blocking(move || {
        let _turn = turn;
        let mut points = Catalog::new(&service.inventory()?.repository()?).points(&machine)?;
        points.reverse();
        if let Some(before) = &before {
            let place = points.iter().position(|point| point.point == *before);
            points.drain(..place.map_or(points.len(), |place| place + 1));
        }
        let Some(first) = points.first() else {
            return Ok(FileVersions { points: Vec::new(), next: None });
        };
        note_read(&service, &caller, "list files", &format!("{machine}, all points"))?;
        let group = points.get(..together(&points)).unwrap_or_default();
        let look = Look { system: query.system.as_deref(), path: &path, gone: &gone };
        let found = match check_offered(first.clone()) {
            Err(error) => {
                vec![PointState::new(&first.point, &FileState::Unread(error.full_message()))]
            }
            Ok(_) => look.at(&service, &caller.name, group)?,
        };
        let next = points.get(found.len()).and(found.last()).map(|last| last.point.clone());
        Ok(FileVersions { points: found, next })
    });
    found.await.map(Json)
}

/// The search for a path.
struct Look<'a> {
    system: Option<&'a str>,
    path: &'a [u8],
    gone: &'a Gone,
}

impl Look<'_> {
    /// Looks at points until the machine cannot continue, at least at one.
    fn at(
        &self,
        service: &Service,
        caller: &str,
        group: &[PointDocument],
    ) -> Result<Vec<PointState>> {
        let first = group.first().ok_or_else(|| Error::new(ErrorKind::Internal, "no points"))?;
        let address = |point: &PointDocument| format!("{}/{}", point.machine, point.point);
        let addresses: Vec<String> = group.iter().map(address).collect();
        let look_after = || self.gone.check();
        let mut found = Vec::new();
        // A machine that others have used may be unable to show another point: a new one can.
        for is_last in [false, true] {
            let machine = first.machine.as_str();
            let conversation =
                Conversation::begin(service, machine, &addresses, caller, &look_after)?;
            let looked = conversation.talk(0, &look_after, |client, disks| {
                for (point, disks) in group.iter().zip(disks) {
                    let state = self.state(client, disks, group.len() > 1)?;
                    found.push(PointState::new(&point.point, &state));
                }
                Ok(())
            });
            match looked {
                Ok(()) => return Ok(found),
                // The file system must be named; or the client is gone.
                Err(error)
                    if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Interrupted) =>
                {
                    return Err(error);
                }
                // The next answer continues with this point.
                Err(_) if !found.is_empty() => return Ok(found),
                Err(error) if is_last => {
                    found.push(PointState::new(
                        &first.point,
                        &FileState::Unread(error.full_message()),
                    ));
                }
                Err(_) => {}
            }
        }
        Ok(found)
    }

    fn state(
        &self,
        client: &mut Client<'_>,
        disks: &FilesPoint,
        is_one_of_many: bool,
    ) -> Result<FileState> {
        if is_one_of_many {
            // A file system that cannot be closed is closed with the machine.
            client
                .select(disks.first_disk, disks.disks.len() as u64)
                .map_err(|error| Error::new(ErrorKind::ToolFailed, error.full_message()))?;
        }
        let FilesPoint { address, disks: names, .. } = disks;
        let attached = AttachedDisks { address, names, is_all: true };
        let systems = FileSystems::read(client, &attached, b"")?;
        FileState::read(client, &systems, self.system, self.path)
    }
}
