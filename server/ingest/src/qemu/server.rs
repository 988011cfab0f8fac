//! A `qemu-nbd` that serves one image on its host.

use std::path::PathBuf;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::{HostProgram, Limits, ProgramStart, ScratchSpace};

use super::{QemuImage, plain_message, refused};
use crate::libnbd::Endpoint;

/// Maximum number of clients: the readers, the queries, one to spare.
const MAX_CLIENTS: u32 = 8;
/// A program that refused an image ends by itself; this is the time limit for its message.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same limit when a request fails on a program that already served: its message, if
/// any, is already written, and it may be ending.
const SHORT_PATIENCE: Duration = Duration::from_millis(200);

/// The program. Dropping it ends it.
///
/// It inherits its listening socket. So a connection that is made right after the start waits until the program is
/// ready, and fails if it refuses the image. No polling is needed.
pub struct ImageServer {
    program: HostProgram,
    limits: Limits,
    name: String,
    socket: PathBuf,
}

impl ImageServer {
    /// Starts the program at the socket `socket` of a private folder; `bitmap` is a persistent dirty
    /// bitmap of the image to export. The first connection shows whether it accepts the image.
    pub(crate) fn start(
        image: &QemuImage,
        bitmap: Option<&str>,
        space: &ScratchSpace,
        socket: &str,
    ) -> Result<ImageServer> {
        let name = image.name();
        let limits = Limits::of_serving(image.allocated_bytes, image.files.len());
        let mut words = vec!["--read-only".to_owned(), "--persistent".to_owned()];
        words.extend(bitmap.map(|bitmap| format!("--bitmap={bitmap}")));
        words.extend([format!("--shared={MAX_CLIENTS}"), "--".to_owned(), name.clone()]);
        let program = space.start(ProgramStart {
            program: "qemu-nbd".to_owned(),
            words,
            socket: Some(socket.to_owned()),
            bounds: Some(image.bounds(limits)),
            ..Default::default()
        })?;
        Ok(ImageServer { program, limits, name, socket: space.file(socket) })
    }

    /// The listening address, on its host.
    pub fn socket(&self) -> &PathBuf {
        &self.socket
    }

    /// The same, if that is this host.
    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::Socket(self.socket.clone())
    }

    /// Replaces the client's `error` by the reason why the program did not serve, if it
    /// gave one.
    pub fn explain_refusal(&self, what: &str, error: Error) -> Error {
        match self.reason(&error, PATIENCE) {
            Some(reason) => refused(what, reason),
            None => error.context(what),
        }
    }

    /// Like [`ImageServer::explain_refusal`], for a request that failed.
    pub(crate) fn explain_failure(&self, error: Error) -> Error {
        match self.reason(&error, SHORT_PATIENCE) {
            Some(reason) => Error::with_source(ErrorKind::ToolFailed, error.to_string(), reason),
            None => error,
        }
    }

    fn reason(&self, error: &Error, patience: Duration) -> Option<String> {
        // The program can only cause a broken connection or a refused request.
        if error.kind() != ErrorKind::Io {
            return None;
        }
        let state = self.program.state(patience).ok()?;
        state.end.and_then(|end| end.limit_reached(&self.limits)).or_else(|| {
            let is_silent = state.messages.trim().is_empty();
            (!is_silent).then(|| plain_message(&state.messages, &self.name))
        })
    }
}
