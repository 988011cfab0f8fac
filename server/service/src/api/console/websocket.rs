//! The screen and the serial port as websockets: bytes both ways.
//!
//! Bounds: [`MAX_OF_SESSION`] clients of a session, [`MAX_OPEN`] in all; one piece of output and one message
//! of input per client in memory. A client that does not take its bytes is closed, and the machine never
//! waits for it. An open websocket ends with the machine, with the service, with the caller's token or login,
//! after a malformed or too long message, and when the client does not answer pings; the close frame says which
//! in words.

use std::collections::BTreeMap;
use std::io::ErrorKind as IoErrorKind;
use std::time::{Duration, Instant};

use axum::RequestPartsExt;
use axum::body::Bytes;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use coldrise_block::{Context, ErrorKind, Result};
use coldrise_runs::MachineSocket;
use parking_lot::Mutex;
use tokio::net::UnixStream;

use super::{PATIENCE, Running, of_session};
use crate::access::audit::AuditNote;
use crate::access::{Identity, Proof};
use crate::api::caller::{Caller, is_own_origin};
use crate::api::events::until_revoked;
use crate::api::input::Names;
use crate::api::problem::{Answer, Problem, blocking};
use crate::listener::Connection;
use crate::service::{Service, SharedService};

/// Maximum number of clients of one session: screens and serial ports together.
const MAX_OF_SESSION: usize = 8;
/// Maximum number of clients of all sessions.
const MAX_OPEN: usize = 64;
/// Maximum size of a client's message, in bytes.
const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// Bytes of output that are sent at once.
const PIECE_BYTES: usize = 32 << 10;
const PING_INTERVAL: Duration = Duration::from_secs(15);
/// A client that sends nothing for this long, not even a pong, is gone.
const SILENCE: Duration = Duration::from_secs(50);
/// How long a client may take for a piece of output.
const SEND_PATIENCE: Duration = Duration::from_secs(20);
/// How long a client may take to close.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);
/// The end of the machine is known so soon after the end of its sockets; its sockets are there so soon after its start.
const END_PATIENCE: Duration = Duration::from_secs(3);
const END_INTERVAL: Duration = Duration::from_millis(50);

/// Why a websocket ends with the machine.
const OFF: &str = "the machine is off";

/// The number of clients by session.
static OPEN: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

/// The place of one client.
struct Place(String);

impl Place {
    /// # Errors
    /// The text for the client if there is no place.
    fn take(session: &str) -> std::result::Result<Place, &'static str> {
        let mut open = OPEN.lock();
        if open.values().sum::<usize>() >= MAX_OPEN {
            return Err("too many consoles are open; close one of another machine");
        }
        let of_session = open.entry(session.to_owned()).or_default();
        if *of_session >= MAX_OF_SESSION {
            return Err("8 consoles of this machine are open; close one of them");
        }
        *of_session += 1;
        Ok(Place(session.to_owned()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = OPEN.lock();
        if let Some(count) = open.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.0);
            }
        }
    }
}

/// Why a websocket ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The machine has closed its socket.
    Machine,
    /// The client has closed.
    Client,
    /// The client has sent a malformed or too long message, or its connection is lost.
    Malformed,
    Silent,
    Slow,
    Revoked,
    Stopping,
}

/// Follow and use the screen of the machine on a session: a websocket of RFB (VNC) bytes, for noVNC.
///
/// A machine that is just starting is waited for, some seconds at most. Close codes: 1000 the machine is off, 1001 the
/// service stops, 1002 a malformed message or one above 64 KiB, 1008 the login or token has ended, 1013 still starting,
/// too many or too slow.
#[utoipa::path(get, path = "/sessions/{session}/screen", tag = "sessions", params(("session" = String, Path)),
    responses((status = 101, description = "A websocket."), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
pub(super) async fn screen(
    State(service): State<SharedService>,
    opening: Opening,
) -> Answer<Response> {
    open(service, opening, MachineSocket::Screen).await
}

/// Follow and use the serial port of the machine on a session: a websocket of bytes.
///
/// First come the last 64 KiB of its output. Close codes as for the screen.
#[utoipa::path(get, path = "/sessions/{session}/serial", tag = "sessions", params(("session" = String, Path)),
    responses((status = 101, description = "A websocket."), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
pub(super) async fn serial(
    State(service): State<SharedService>,
    opening: Opening,
) -> Answer<Response> {
    open(service, opening, MachineSocket::Serial).await
}

/// A request to open a websocket.
pub(super) struct Opening {
    caller: Identity,
    session: String,
    connection: Option<Connection>,
    upgrade: std::result::Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
}

impl FromRequestParts<SharedService> for Opening {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &SharedService) -> Answer<Opening> {
        let Caller(caller) = parts.extract().await?;
        let Names(session) = parts.extract().await?;
        // A page of another origin can open websockets with the cookie, and read them.
        if matches!(caller.proof, Proof::Login(_)) && !is_own_origin(&parts.headers, &parts.uri) {
            let text = "a websocket with a cookie needs this service's Origin";
            return Err(Problem::new(StatusCode::FORBIDDEN, ErrorKind::Forbidden, text));
        }
        let connection = parts.extensions.get().cloned();
        Ok(Opening { caller, session, connection, upgrade: parts.extract().await })
    }
}

async fn open(service: SharedService, opening: Opening, socket: MachineSocket) -> Answer<Response> {
    let Opening { caller, session, connection, upgrade } = opening;
    let (shared, whose, is_upgrade) = (service.clone(), caller.clone(), upgrade.is_ok());
    let running = blocking(move || match Running::find(&shared, whose, &session) {
        Err(error) if is_upgrade && error.kind() == ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    })
    .await?;
    let upgrade = upgrade.map_err(|_| {
        let text = "this address is a websocket: connect over HTTP/1.1 with Upgrade: websocket";
        Problem::new(StatusCode::UPGRADE_REQUIRED, ErrorKind::InvalidInput, text)
    })?;
    let upgrade = upgrade
        .protocols(["binary"])
        .max_message_size(MAX_MESSAGE_BYTES)
        .max_frame_size(MAX_MESSAGE_BYTES);
    let Some(running) = running else {
        return Ok(refused(upgrade, close_code::NORMAL, "no machine runs on this session"));
    };
    let place = match Place::take(running.session.as_str()) {
        Ok(place) => place,
        Err(text) => return Ok(refused(upgrade, close_code::AGAIN, text)),
    };
    let shared = service.clone();
    let (running, machine) = blocking(move || {
        let machine = wait_and_connect(&shared, &running, socket)?;
        Ok((running, machine))
    })
    .await?;
    let machine = match machine {
        Ok(machine) => machine,
        Err((code, text)) => return Ok(refused(upgrade, code, text)),
    };
    let machine = UnixStream::from_std(machine).context(|| "opening the machine's socket")?;
    Ok(upgrade.on_upgrade(move |mut socket| async move {
        // The connection counts as busy while this lives.
        let _busy = connection.map(|connection| connection.busy());
        let _place = place;
        let mut stop = service.stop.clone();
        let end = tokio::select! {
            end = copy(&mut socket, &machine) => end,
            () = until_revoked(&service, &caller) => End::Revoked,
            _ = stop.wait_for(|stop| *stop) => End::Stopping,
        };
        let (code, text) = match end {
            End::Client => return,
            End::Malformed => {
                (close_code::PROTOCOL, "a malformed message, or one that is longer than 64 KiB")
            }
            End::Silent => (close_code::AWAY, "no answer to pings"),
            End::Slow => (close_code::AGAIN, "too slow: the connection does not take the output"),
            End::Revoked => (close_code::POLICY, "the login or token has ended or has changed"),
            End::Stopping => (close_code::AWAY, "the service stops; the machine keeps running"),
            End::Machine if is_off(&service, &running).await => (close_code::NORMAL, OFF),
            End::Machine => (close_code::ERROR, "QEMU has closed the connection; connect again"),
        };
        close(socket, code, text).await;
    }))
}

/// Opens, and closes at once: browsers show a close frame to their page, but not a refusal of the upgrade.
fn refused(upgrade: WebSocketUpgrade, code: u16, text: &'static str) -> Response {
    upgrade.on_upgrade(move |socket| close(socket, code, text))
}

/// Connects to a machine that is just starting, too: its run records it before QEMU makes the sockets. The
/// inner error is for the close frame.
fn wait_and_connect(
    service: &Service,
    running: &Running,
    socket: MachineSocket,
) -> Result<std::result::Result<std::os::unix::net::UnixStream, (u16, &'static str)>> {
    let until = Instant::now() + END_PATIENCE;
    loop {
        match connect(service, running, socket) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            connected => return connected.map(Ok),
        }
        match of_session(service, &running.session)? {
            Some((run, _)) if run == running.run => {}
            _ => return Ok(Err((close_code::NORMAL, OFF))),
        }
        if Instant::now() >= until {
            return Ok(Err((close_code::AGAIN, "the machine is starting")));
        }
        std::thread::sleep(END_INTERVAL);
    }
}

/// Connects, and enters that into the audit log.
fn connect(
    service: &Service,
    running: &Running,
    socket: MachineSocket,
) -> Result<std::os::unix::net::UnixStream> {
    let machine = service.runs.connect_machine(&running.run, socket, PATIENCE)?;
    machine.set_nonblocking(true).context(|| "preparing the machine's socket")?;
    service.database.audit(&AuditNote {
        who: &running.caller.name,
        source: &running.caller.source,
        action: if socket == MachineSocket::Screen { "open screen" } else { "open serial port" },
        subject: &format!("live/{}", running.session),
        result: "ok",
    })?;
    Ok(machine)
}

/// Whether the machine's run says soon that it is off.
async fn is_off(service: &SharedService, running: &Running) -> bool {
    let until = Instant::now() + END_PATIENCE;
    while Instant::now() < until {
        let (service, session) = (service.clone(), running.session.clone());
        let found = blocking(move || of_session(&service, &session)).await;
        match found {
            Ok(Some((run, _))) if run == running.run => tokio::time::sleep(END_INTERVAL).await,
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
    false
}

/// Copies bytes both ways until one side ends.
async fn copy(socket: &mut WebSocket, machine: &UnixStream) -> End {
    let mut piece = vec![0; PIECE_BYTES];
    // Input that the machine has not taken yet. Meanwhile nothing more is read from the client.
    let mut input = Bytes::new();
    let mut heard = Instant::now();
    let mut ping = tokio::time::interval(PING_INTERVAL);
    loop {
        let sent = tokio::select! {
            ready = machine.readable() => match ready.and_then(|()| machine.try_read(&mut piece)) {
                Ok(0) => return End::Machine,
                Ok(count) => Message::Binary(Bytes::copy_from_slice(piece.get(..count).unwrap_or_default())),
                Err(error) if error.kind() == IoErrorKind::WouldBlock => continue,
                Err(_) => return End::Machine,
            },
            ready = machine.writable(), if !input.is_empty() => {
                match ready.and_then(|()| machine.try_write(&input)) {
                    Ok(count) => drop(input.split_to(count)),
                    Err(error) if error.kind() == IoErrorKind::WouldBlock => {}
                    Err(_) => return End::Machine,
                }
                continue;
            }
            received = socket.recv(), if input.is_empty() => {
                heard = Instant::now();
                match received {
                    Some(Ok(Message::Binary(bytes))) => input = bytes,
                    Some(Ok(Message::Text(text))) => input = text.into(),
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                    Some(Ok(Message::Close(_))) | None => return End::Client,
                    Some(Err(_)) => return End::Malformed,
                }
                continue;
            }
            _ = ping.tick() => {
                if input.is_empty() && heard.elapsed() > SILENCE {
                    return End::Silent;
                }
                Message::Ping(Bytes::new())
            }
        };
        match tokio::time::timeout(SEND_PATIENCE, socket.send(sent)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return End::Client,
            Err(_) => return End::Slow,
        }
    }
}

/// Closes with a reason, and waits a little for the client to close, too.
async fn close(mut socket: WebSocket, code: u16, text: &'static str) {
    let frame = Message::Close(Some(CloseFrame { code, reason: text.into() }));
    let closing = async {
        if socket.send(frame).await.is_ok() {
            while let Some(Ok(_)) = socket.recv().await {}
        }
    };
    let _ = tokio::time::timeout(CLOSE_PATIENCE, closing).await;
}
