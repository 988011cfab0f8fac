//! Downloads: a file as it is, a folder as an archive.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_files::{Archive, ArchiveFormat, Client, Entry, EntryKind, Received, choose, shown};
use coldrise_store::PointDocument;
use serde::Deserialize;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use super::disposition::{disposition, harmless};
use super::entries::last_name;
use super::sink::{Pieces, Sink};
use super::{Gone, Turn, about, in_point, offered, path, readable};
use crate::access::Identity;
use crate::access::audit::AuditNote;
use crate::api::caller::Caller;
use crate::api::events::until_revoked;
use crate::api::input::{Fields, Names};
use crate::api::machines::selector;
use crate::api::problem::{Answer, Problem};
use crate::service::{Service, SharedService};

/// Number of pieces that are read ahead of a client.
const AHEAD: usize = 4;
/// The text in an archive that is not all of the folder.
const REMARKS: &str = "coldrise-not-in-this-archive.txt";
/// Number of lines in it.
const MAX_REMARKS: usize = 1000;

/// The format of an archive.
#[derive(Clone, Copy, Debug, Default, Deserialize, utoipa::ToSchema)]
enum FolderFormat {
    #[default]
    #[serde(rename = "zip")]
    Zip,
    #[serde(rename = "tar")]
    Tar,
    #[serde(rename = "tar.zst")]
    TarZst,
}

impl From<FolderFormat> for ArchiveFormat {
    fn from(format: FolderFormat) -> ArchiveFormat {
        match format {
            FolderFormat::Zip => ArchiveFormat::Zip,
            FolderFormat::Tar => ArchiveFormat::Tar,
            FolderFormat::TarZst => ArchiveFormat::TarZst,
        }
    }
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ContentQuery {
    /// The file system's name; that of the system if absent.
    system: Option<String>,
    /// The absolute path; `/` if absent.
    path: Option<String>,
    /// The bytes of the path, in hexadecimal digits, instead of `path`.
    path_hex: Option<String>,
    /// The format of a folder's archive; zip if absent.
    #[param(inline)]
    format: Option<FolderFormat>,
}

/// Download a file of a point, or a folder as an archive.
///
/// An archive is harmless to extract: links that lead out of the folder, devices and set-user-ID bits are left out. If
/// something is left out or could not be read, the text `coldrise-not-in-this-archive.txt` in it lists it. An answer that
/// breaks off is not whole.
#[utoipa::path(get, path = "/machines/{machine}/points/{point}/files/content", tag = "files",
    params(("machine" = String, Path), ("point" = String, Path), ContentQuery),
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream"),
        (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
pub(super) async fn file_content(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names((machine, point)): Names<(String, String)>,
    Fields(query): Fields<ContentQuery>,
) -> Answer<Response> {
    let (machine, selector) = (readable(&caller, &machine)?, selector(&point)?);
    let path = path(query.path, query.path_hex)?;
    let format = query.format.unwrap_or_default().into();
    let turn = Turn::take(&caller)?;
    let (sender, receiver) = mpsc::channel(AHEAD);
    let (head_sender, head) = oneshot::channel();
    let gone = Gone::default();
    let watch = tokio::spawn(watch(service.clone(), caller.clone(), sender.clone(), gone.clone()));
    let is_whole = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&is_whole);
    let sink = Sink { sender, handle: Handle::current(), pending: Vec::new(), gone: gone.clone() };
    tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let mut transfer = Transfer {
            service: &service,
            caller: &caller,
            gone,
            path,
            system: query.system,
            format,
            head: Some(head_sender),
            sink,
        };
        let done = offered(&service, &machine, &selector).and_then(|point| transfer.run(&point));
        end.store(done.is_ok(), Ordering::SeqCst);
        transfer.end(done);
        watch.abort();
    });
    let defect =
        |_| Error::new(ErrorKind::Internal, "a defect in coldrised: a download without an end");
    let head = head.await.map_err(defect)??;
    let body = Body::from_stream(Pieces { receiver, is_whole, is_cut: false });
    let mut response = (StatusCode::OK, body).into_response();
    let mut set = |name, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().insert(name, value);
        }
    };
    // Never a type that a browser shows.
    set(header::CONTENT_TYPE, "application/octet-stream".to_owned());
    set(header::CONTENT_DISPOSITION, disposition(&head.name));
    if let Some(bytes) = head.size_bytes {
        set(header::CONTENT_LENGTH, bytes.to_string());
    }
    Ok(response)
}

/// Notices that the client is gone, or may no longer read.
async fn watch(service: SharedService, caller: Identity, sender: mpsc::Sender<Bytes>, gone: Gone) {
    let mut stop = service.stop.clone();
    tokio::select! {
        () = sender.closed() => {}
        () = until_revoked(&service, &caller) => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
    gone.set();
}

/// The head of the answer, known before the first byte.
struct Head {
    /// The name of the file that a client makes.
    name: String,
    /// The length, if it is a file.
    size_bytes: Option<u64>,
}

/// One download.
struct Transfer<'a> {
    service: &'a Service,
    caller: &'a Identity,
    gone: Gone,
    path: Vec<u8>,
    system: Option<String>,
    format: ArchiveFormat,
    /// `None` once it is sent.
    head: Option<oneshot::Sender<Result<Head>>>,
    sink: Sink,
}

impl Transfer<'_> {
    fn run(&mut self, point: &PointDocument) -> Result<()> {
        let (service, caller, gone) = (self.service, self.caller, self.gone.clone());
        in_point(service, caller, point, &gone, |client, systems| {
            let device = choose(client, systems, self.system.as_deref())?;
            self.copy(client, device, point)
        })
    }

    fn copy(&mut self, client: &mut Client<'_>, device: u64, point: &PointDocument) -> Result<()> {
        let mut archive: Option<Archive<Sink>> = None;
        let mut remarks = Remarks::default();
        let path = self.path.clone();
        let done = client.read(device, &path, |received| {
            self.gone.check()?;
            match (received, &mut archive) {
                (Received::Entry(entry), None) => {
                    self.note(point)?;
                    archive = self.begin(entry, point)?;
                    Ok(())
                }
                (Received::Entry(entry), Some(archive)) => {
                    remarks.current = shown(&entry.path);
                    archive.add(entry)
                }
                (Received::Content(bytes), Some(archive)) => archive.write(bytes),
                (Received::Content(bytes), None) => self.sink.write_all(bytes).context(SENDING),
                (Received::Unread(text), Some(_)) => {
                    remarks.add(text);
                    Ok(())
                }
                // A single file is useless if it is not whole.
                (Received::Unread(text), None) => {
                    Err(Error::new(ErrorKind::Io, format!("not read: {text}")))
                }
            }
        });
        about(&path, done)?;
        match archive {
            Some(mut archive) => {
                remarks.write(&mut archive)?;
                archive.finish().map(drop)
            }
            None => self.sink.flush().context(SENDING),
        }
    }

    /// Enters the download into the audit log, before its first byte.
    fn note(&self, point: &PointDocument) -> Result<()> {
        let system = self.system.as_deref().unwrap_or_default();
        let (machine, point, path) = (&point.machine, &point.point, shown(&self.path));
        self.service.database.audit(&AuditNote {
            who: &self.caller.name,
            source: &self.caller.source,
            action: "download file",
            subject: &format!("{machine}/{point}:{}{path}", shown(system.as_bytes())),
            result: "ok",
        })
    }

    /// Sends the head. Returns the archive, if the path is a folder.
    fn begin(&mut self, top: &Entry, point: &PointDocument) -> Result<Option<Archive<Sink>>> {
        let whole = format!("{}-{}", point.machine, point.point);
        let name = match last_name(&self.path) {
            b"" | b"." | b".." => whole.as_bytes(),
            name => name,
        };
        let (head, archive) = match top.kind {
            EntryKind::File => {
                (Head { name: harmless(name), size_bytes: Some(top.size_bytes) }, None)
            }
            EntryKind::Folder => {
                let file = format!("{}{}", harmless(name), self.format.extension());
                let mut archive = Archive::new(self.sink.clone(), self.format, name, false)?;
                archive.add(top)?;
                (Head { name: file, size_bytes: None }, Some(archive))
            }
            EntryKind::Link | EntryKind::Special => {
                let text = "this is neither a file nor a folder";
                return Err(Error::new(ErrorKind::InvalidInput, text));
            }
        };
        if let Some(sender) = self.head.take() {
            let _ = sender.send(Ok(head));
        }
        Ok(archive)
    }

    /// An error before the first byte is an answer. Later ones cut the connection.
    fn end(self, done: Result<()>) {
        let Err(error) = done else { return };
        if let Some(head) = self.head {
            let _ = head.send(Err(error));
        } else if self.gone.check().is_ok() {
            tracing::error!("a download of a file: {}", error.full_message());
        }
    }
}

const SENDING: fn() -> &'static str = || "sending a file";

/// The files that an archive lacks.
#[derive(Default)]
struct Remarks {
    /// The path that came last.
    current: String,
    lines: Vec<String>,
    unread: u64,
}

impl Remarks {
    fn add(&mut self, text: &str) {
        self.unread += 1;
        if self.lines.len() < MAX_REMARKS {
            self.lines.push(format!("{}: {text}\n", self.current));
        }
    }

    fn write(&self, archive: &mut Archive<Sink>) -> Result<()> {
        let left_out = archive.left_out();
        if self.unread + left_out.links + left_out.special == 0 {
            return Ok(());
        }
        let mut text = format!(
            "Not in this archive, or not whole:\n\n\
             links that lead out of the folder: {}\n\
             devices, pipes and sockets: {}\n\
             could not be read (missing bytes are zeroes): {}\n\n",
            left_out.links, left_out.special, self.unread
        );
        text.extend(self.lines.iter().map(String::as_str));
        archive.add_text(REMARKS, &text)
    }
}
