//! Machines that run from a backup: their state, screen, serial port, keys and power.
//!
//! ```text
//!   browser ──websocket──▶ this ──Unix socket──▶ RUNS/ID/machine/screen, RUNS/ID/serial
//!   request ──QMP────────▶ RUNS/ID/machine/qmp, qmp-keys
//! ```
//!
//! A machine belongs to its run, a process of its own: this only connects to its sockets, so a restart
//! of the service disturbs no machine. Operators only; each opening is an audit entry.

mod keys;
mod power;
mod websocket;

use std::io::Read;
use std::time::Duration;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_qmp::Monitor;
use coldrise_runs::{MachineRecord, MachineSocket, RunId};
use coldrise_store::SessionName;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::content::note_read;
use super::input::Names;
use super::problem::{Answer, Problem, blocking};
use super::starts::live;
use crate::access::{Identity, Permission};
use crate::service::{Service, SharedService};

/// How long QEMU may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same for the state of a machine, which lists and pages wait for.
const STATE_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum size of a picture's file, in bytes.
const MAX_PICTURE_BYTES: u64 = 32 << 20;
const PNG_MARK: &[u8] = b"\x89PNG\r\n\x1a\n";
const PICTURE: &str = "picture";

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(screenshot))
        .routes(routes!(keys::keys))
        .routes(routes!(power::power))
        .routes(routes!(websocket::screen))
        .routes(routes!(websocket::serial))
}

/// The state of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "kebab-case")]
enum MachineState {
    /// Its disks are being opened.
    Starting,
    Running,
    Paused,
    /// It waits after a disk error, such as of a full drive.
    IoError,
    /// It sleeps.
    Suspended,
    /// Its system has stopped with an error.
    Panicked,
    /// It does not answer now.
    Unknown,
}

/// A machine that runs on a session.
#[derive(Serialize, utoipa::ToSchema)]
pub(super) struct Machine {
    state: MachineState,
    /// What the state means and what to do, if it is not as it should be.
    explanation: Option<&'static str>,
    /// Its run.
    run: String,
    /// Since when it runs, in milliseconds since 1970.
    since: u64,
    memory_mib: u64,
    cpus: u32,
    /// `none`, `isolated` (not connected to any network) or `connected`.
    network: String,
    has_screen: bool,
}

/// A session's machine that is on, and its run.
struct Running {
    session: SessionName,
    run: RunId,
    /// For audit entries.
    caller: Identity,
}

impl Running {
    /// The machine of a session, for a caller that may use it.
    ///
    /// # Errors
    /// `Forbidden` for other callers; `NotFound` if there is no such session, or no machine on it.
    fn find(service: &Service, caller: Identity, session: &str) -> Result<Running> {
        let session: SessionName = session.parse()?;
        live(service, &caller, Permission::Operate, &session)?;
        match of_session(service, &session)? {
            Some((run, _)) => Ok(Running { session, run, caller }),
            None => {
                let text = format!("no machine runs on session {session}");
                Err(Error::new(ErrorKind::NotFound, text)
                    .advise("start one: POST /api/v1/runs with the kind boot"))
            }
        }
    }

    /// QEMU's monitor.
    ///
    /// # Errors
    /// `NotFound` if the machine is off; `Busy` if another client has the monitor for too long.
    fn monitor(&self, service: &Service, socket: MachineSocket) -> Result<Monitor> {
        let stream = service.runs.connect_machine(&self.run, socket, PATIENCE)?;
        Monitor::greet(stream, PATIENCE).map_err(|error| {
            let text = format!("the machine on session {} does not answer", self.session);
            Error::with_source(ErrorKind::Busy, text, error).advise("try again in some seconds")
        })
    }
}

/// The machine that runs on a session of the service's repository.
fn of_session(service: &Service, session: &SessionName) -> Result<Option<(RunId, MachineRecord)>> {
    let own = service.options.repo.as_ref().and_then(|path| path.canonicalize().ok());
    let is_here = |record: &MachineRecord| {
        record.session == session.as_str()
            && own.is_some()
            && std::path::Path::new(&record.repository).canonicalize().ok() == own
    };
    Ok(service.runs.machines()?.into_iter().find(|(_, record)| is_here(record)))
}

/// The machine on a session, if there is one, with its state.
///
/// # Errors
/// Errors of reading the runs.
pub(super) fn machine(service: &Service, session: &SessionName) -> Result<Option<Machine>> {
    let Some((run, record)) = of_session(service, session)? else { return Ok(None) };
    let (state, explanation) = state(service, &run);
    Ok(Some(Machine {
        state,
        explanation,
        run: run.to_string(),
        since: record.since_ms,
        memory_mib: record.memory_mib,
        cpus: record.cpus,
        network: record.network,
        has_screen: record.has_screen,
    }))
}

fn state(service: &Service, run: &RunId) -> (MachineState, Option<&'static str>) {
    let connected = service
        .runs
        .connect_machine(run, MachineSocket::Monitor, STATE_PATIENCE)
        .and_then(|stream| {
            Monitor::greet(stream, STATE_PATIENCE)?.execute(
                "query-status",
                Value::Null,
                STATE_PATIENCE,
            )
        });
    match connected {
        Ok(status) => meaning(status["status"].as_str().unwrap_or_default()),
        Err(error) if error.kind() == ErrorKind::NotFound => (MachineState::Starting, None),
        Err(_) => (
            MachineState::Unknown,
            Some("QEMU does not answer: the host may be busy, or another client uses its monitor"),
        ),
    }
}

/// The meaning of QEMU's word.
fn meaning(status: &str) -> (MachineState, Option<&'static str>) {
    match status {
        "running" => (MachineState::Running, None),
        "prelaunch" | "inmigrate" => (MachineState::Starting, None),
        "io-error" => (
            MachineState::IoError,
            Some(
                "the machine waits: a write to its disk failed, in most cases because the \
                 repository's drive is full; free space, then resume it",
            ),
        ),
        "suspended" => (MachineState::Suspended, None),
        "guest-panicked" | "internal-error" => {
            (MachineState::Panicked, Some("the machine has stopped with an error; reset it"))
        }
        "paused" | "debug" | "watchdog" => {
            (MachineState::Paused, Some("the machine was paused; resume it"))
        }
        _ => (MachineState::Unknown, None),
    }
}

/// Get a picture of the screen of the machine on a session.
#[utoipa::path(get, path = "/sessions/{session}/screenshot.png", tag = "sessions",
    params(("session" = String, Path)),
    responses((status = 200, body = Vec<u8>, content_type = "image/png"), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn screenshot(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(session): Names<String>,
) -> Answer<Response> {
    let picture = blocking(move || {
        let running = Running::find(&service, caller, &session)?;
        note_read(&service, &running.caller, "read screen", &format!("live/{session}"))?;
        let mut monitor = running.monitor(&service, MachineSocket::Monitor)?;
        // In QEMU's own folder. While this holds the monitor, no other client takes pictures.
        let asked = json!({ "filename": PICTURE, "format": "png" });
        monitor.execute("screendump", asked, PATIENCE)?;
        let mut picture = Vec::new();
        let file = service.runs.take_machine_file(&running.run, PICTURE)?;
        file.take(MAX_PICTURE_BYTES + 1)
            .read_to_end(&mut picture)
            .context(|| "reading the picture")?;
        if picture.len() as u64 > MAX_PICTURE_BYTES || !picture.starts_with(PNG_MARK) {
            return Err(Error::new(ErrorKind::ToolFailed, "QEMU has made no PNG picture"));
        }
        Ok(picture)
    });
    Ok(([(header::CONTENT_TYPE, "image/png")], picture.await?).into_response())
}

#[cfg(test)]
mod tests {
    use super::{MachineState, meaning};

    #[test]
    fn machine_states_that_need_attention_are_explained() {
        for (word, state, is_explained) in [
            ("running", MachineState::Running, false),
            ("io-error", MachineState::IoError, true),
            ("paused", MachineState::Paused, true),
            ("guest-panicked", MachineState::Panicked, true),
            ("new word", MachineState::Unknown, false),
        ] {
            let (found, explanation) = meaning(word);
            assert_eq!((found, explanation.is_some()), (state, is_explained), "{word}");
        }
    }
}
