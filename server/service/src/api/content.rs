//! The bytes of a restore point's disk, in any format, with ranges: for `curl`, `qemu-img` and CDI.

use coldrise_block::hex;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use coldrise_block::{Error, ErrorKind};
use coldrise_inventory::Content;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::events::until_revoked;
use super::input::Names;
use super::machines::{named, selector};
use super::problem::{Answer, Problem, blocking};
use super::stream::ReceiverStream;
use crate::access::audit::AuditNote;
use crate::access::{Identity, Permission, sha256};
use crate::service::{Service, SharedService};

/// Size of one read, in bytes.
const PIECE_BYTES: u64 = 1 << 20;
/// Number of pieces that are read ahead of a client.
const AHEAD: usize = 2;
/// A read of the same disk by the same caller is one audit entry in this time.
const AUDIT_INTERVAL: Duration = Duration::from_secs(3600);
/// Maximum number of readers that are remembered for that.
const MAX_READERS: usize = 1000;

/// Who read what, and when that was entered into the audit log.
static READERS: Mutex<Vec<(String, Instant)>> = Mutex::new(Vec::new());

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(disk))
}

/// The bytes that a client wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    All,
    /// From the first to the last byte, both included.
    Part(u64, u64),
    /// A range that begins behind the end.
    Outside,
}

/// Reads a `Range` header. What is malformed, and several ranges, mean the whole content, as RFC 9110 allows.
fn wanted(range: Option<&str>, size: u64) -> Wanted {
    let Some((first, last)) =
        range.and_then(|range| range.trim().strip_prefix("bytes=")).and_then(|r| r.split_once('-'))
    else {
        return Wanted::All;
    };
    // Digits only: parse() would take a sign.
    let number = |text: &str| {
        let is_digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        // A number that is too large is behind every end.
        is_digits.then(|| text.parse::<u64>().unwrap_or(u64::MAX))
    };
    match (number(first.trim()), number(last.trim())) {
        (Some(first), last) if last.is_some() || last_is_empty(range) => {
            if last.is_some_and(|last| last < first) {
                return Wanted::All;
            }
            if first >= size {
                return Wanted::Outside;
            }
            Wanted::Part(first, last.unwrap_or(u64::MAX).min(size - 1))
        }
        (None, Some(length)) if first.trim().is_empty() => match length.min(size) {
            0 => Wanted::Outside,
            length => Wanted::Part(size - length, size - 1),
        },
        _ => Wanted::All,
    }
}

fn last_is_empty(range: Option<&str>) -> bool {
    range.is_some_and(|range| range.trim_end().ends_with('-'))
}

/// Read a disk as an image file; ranges are supported.
///
/// FILE is the disk's name with the format as extension: `vda.raw`, `vda.vhd`, `vda.vhdx`,
/// `vda.qcow2`, `vda.vmdk` and `vda-flat.vmdk`. POINT can be `latest`; the answer's `ETag` changes
/// when it becomes another point.
#[utoipa::path(get, path = "/machines/{machine}/points/{point}/disks/{file}", tag = "machines",
    params(("machine" = String, Path), ("point" = String, Path), ("file" = String, Path),
        ("Range" = Option<String>, Header, description = "One range, such as bytes=0-511.")),
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 206, body = Vec<u8>, content_type = "application/octet-stream"),
        (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn disk(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names((machine, point, file)): Names<(String, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Answer<Response> {
    let (machine, point) = (named(&caller, Permission::ReadContent, &machine)?, selector(&point)?);
    if file.contains('/') {
        return Err(Error::new(ErrorKind::NotFound, "there is no such file").into());
    }
    let (shared, reader) = (service.clone(), caller.clone());
    let content = blocking(move || {
        let content = service.inventory()?.content(&format!("{machine}/{point}/{file}"))?;
        let what = content.address().to_owned();
        note_read(&service, &caller, "read disk", &what)?;
        Ok(content)
    })
    .await?;
    let size = content.size_bytes();
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let tag = format!("\"{}\"", tag(&content));
    if text(header::IF_NONE_MATCH).is_some_and(|known| known == tag) {
        return Ok((StatusCode::NOT_MODIFIED, [(header::ETAG, tag)]).into_response());
    }
    let is_same = text(header::IF_RANGE).is_none_or(|known| known == tag);
    let range = text(header::RANGE).filter(|_| is_same);
    let (first, length, status) = match wanted(range, size) {
        Wanted::All => (0, size, StatusCode::OK),
        Wanted::Part(first, last) => (first, last - first + 1, StatusCode::PARTIAL_CONTENT),
        Wanted::Outside => {
            let text = format!("the range begins after the end: the file has {size} bytes");
            let problem =
                Problem::new(StatusCode::RANGE_NOT_SATISFIABLE, ErrorKind::OutOfRange, text);
            let range = [(header::CONTENT_RANGE, format!("bytes */{size}"))];
            return Ok((range, problem).into_response());
        }
    };
    let body = match method {
        Method::HEAD => Body::empty(),
        _ => stream(content, first, length, shared, reader),
    };
    let mut response = (status, body).into_response();
    let mut set = |name, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().insert(name, value);
        }
    };
    set(header::CONTENT_TYPE, "application/octet-stream".to_owned());
    set(header::CONTENT_LENGTH, length.to_string());
    set(header::ACCEPT_RANGES, "bytes".to_owned());
    set(header::CONTENT_DISPOSITION, "attachment".to_owned());
    set(header::ETAG, tag);
    if status == StatusCode::PARTIAL_CONTENT {
        set(header::CONTENT_RANGE, format!("bytes {first}-{}/{size}", first + length - 1));
    }
    Ok(response)
}

/// What changes when the content does: the exact point and file.
fn tag(content: &Content) -> String {
    let hash = sha256(&[content.address().as_bytes(), &content.size_bytes().to_be_bytes()]);
    hex::encode(&hash[..16])
}

/// Enters a read of content into the audit log, unless the same caller has read the same lately.
///
/// # Errors
/// Errors of the database.
pub(super) fn note_read(
    service: &Service,
    caller: &Identity,
    action: &str,
    what: &str,
) -> coldrise_block::Result<()> {
    let (who, source) = (&caller.name, &caller.source);
    let (reader, now) = (format!("{who} {action} {what}"), Instant::now());
    {
        let mut readers = READERS.lock();
        readers.retain(|(_, at)| now.duration_since(*at) < AUDIT_INTERVAL);
        if readers.iter().any(|(known, _)| *known == reader) {
            return Ok(());
        }
    }
    service.database.audit(&AuditNote { who, source, action, subject: what, result: "ok" })?;
    // After the entry: while it cannot be stored, the next read is refused as well.
    let mut readers = READERS.lock();
    if readers.len() >= MAX_READERS {
        readers.remove(0);
    }
    readers.push((reader, now));
    Ok(())
}

/// Reads ahead of the client on a blocking thread. An error cuts the connection: the status is sent
/// already, and a short body must not pass for a whole one.
fn stream(
    content: Content,
    first: u64,
    length: u64,
    service: SharedService,
    caller: Identity,
) -> Body {
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(AHEAD);
    let content = Arc::new(content);
    tokio::spawn(async move {
        let revoked = until_revoked(&service, &caller);
        tokio::pin!(revoked);
        let end = first + length;
        let mut offset = first;
        while offset < end {
            // Aligned pieces: chunks are decoded once.
            let next = (offset / PIECE_BYTES + 1).saturating_mul(PIECE_BYTES).min(end);
            let place = tokio::select! {
                place = sender.reserve() => place,
                () = &mut revoked => {
                    let text = "the caller's token or login has ended";
                    let _ = sender.try_send(Err(io::Error::other(text)));
                    return;
                }
            };
            let Ok(place) = place else { return };
            let (content, from, bytes) = (content.clone(), offset, next - offset);
            let read = tokio::task::spawn_blocking(move || {
                let mut piece = vec![0; usize::try_from(bytes).unwrap_or(0)];
                content.read_at(from, &mut piece).map(|()| Bytes::from(piece))
            });
            let piece = read.await.unwrap_or_else(|error| {
                Err(Error::new(ErrorKind::Internal, format!("a defect in coldrised: {error}")))
            });
            let piece = piece.map_err(|error| {
                tracing::error!("reading a disk for a client: {}", error.full_message());
                io::Error::other(error.full_message())
            });
            let is_failed = piece.is_err();
            place.send(piece);
            if is_failed {
                return;
            }
            offset = next;
        }
    });
    Body::from_stream(ReceiverStream(receiver))
}

#[cfg(test)]
mod tests {
    use super::{Wanted, wanted};

    #[test]
    fn ranges_as_http_defines_them() {
        for (range, expected) in [
            ("bytes=0-0", Wanted::Part(0, 0)),
            ("bytes=0-", Wanted::Part(0, 99)),
            ("bytes=10-19", Wanted::Part(10, 19)),
            ("bytes=90-1000", Wanted::Part(90, 99)),
            ("bytes=-10", Wanted::Part(90, 99)),
            ("bytes=-1000", Wanted::Part(0, 99)),
            ("bytes=99-99999999999999999999999", Wanted::Part(99, 99)),
            ("bytes=100-", Wanted::Outside),
            ("bytes=99999999999999999999999-", Wanted::Outside),
            ("bytes=-0", Wanted::Outside),
            ("bytes=5-2", Wanted::All),
            ("bytes=+1-2", Wanted::All),
            ("bytes=a-b", Wanted::All),
            ("bytes=-", Wanted::All),
            ("bytes=0-1,5-6", Wanted::All),
            ("items=0-1", Wanted::All),
        ] {
            assert_eq!(wanted(Some(range), 100), expected, "{range}");
        }
        assert_eq!(wanted(None, 100), Wanted::All);
        assert_eq!(wanted(Some("bytes=0-"), 0), Wanted::Outside);
    }
}
