//! A `qemu-nbd` child that serves one image.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result, ScratchFolder, ScratchKind};

use super::child::ConfinedChild;
use super::limits::Limits;
use super::{plain_message, refused, QemuImage};
use crate::libnbd::Endpoint;

/// A child that refused an image ends by itself; this is the time limit for its message.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same limit when a request fails on a child that already served: its message, if
/// any, is already written, and the child may be ending.
const SHORT_PATIENCE: Duration = Duration::from_millis(200);

/// The child. Dropping it ends it.
///
/// The listening socket is ours and the child inherits it (systemd socket activation). So
/// a connection that is made right after the start waits until the child is ready, and
/// fails if the child refuses the image. No polling is needed.
pub(crate) struct ImageServer {
    child: ConfinedChild,
    name: String,
    directory: ScratchFolder,
}

/// Makes stdin the socket that qemu-nbd expects as descriptor 3, and limits the process. The
/// arguments travel as `$@`: the shell never parses them.
const START_SCRIPT: &str = "exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; \
                            exec prlimit \"$@\"";

impl ImageServer {
    /// Starts the child for up to `max_clients` clients; `bitmap` is a persistent dirty
    /// bitmap of the image to export. The first connection shows whether the child
    /// accepts the image.
    pub(crate) fn start(
        image: &QemuImage,
        bitmap: Option<&str>,
        max_clients: u32,
    ) -> Result<ImageServer> {
        let directory = ScratchFolder::new(ScratchKind::Image)?;
        let listener = UnixListener::bind(directory.path().join("nbd"))
            .context(|| "making a private socket")?;
        let name = image.name();
        let limits = Limits::of_serving(image);
        let mut command = Command::new("/bin/sh");
        command.args(["-c", START_SCRIPT, "prlimit"]).args(limits.arguments());
        command.args(["--", "qemu-nbd", "--read-only"]);
        if let Some(bitmap) = bitmap {
            command.arg(format!("--bitmap={bitmap}"));
        }
        command.arg(format!("--shared={max_clients}")).arg("--").arg(&name);
        command.stdin(Stdio::from(OwnedFd::from(listener))).stdout(Stdio::null());
        let (child, _) = ConfinedChild::start("qemu-nbd", command, image, limits)?;
        Ok(ImageServer { child, name, directory })
    }

    /// The listening address.
    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint::Socket(self.directory.path().join("nbd"))
    }

    /// Replaces the client's `error` by the reason why the child did not serve, if the
    /// child gave one.
    pub(crate) fn explain_refusal(&self, what: &str, error: Error) -> Error {
        match self.reason(&error, PATIENCE) {
            Some(reason) => refused(what, reason),
            None => error.context(what),
        }
    }

    /// Like [`ImageServer::explain_refusal`], for a request that failed. Ends the child.
    pub(crate) fn explain_failure(&self, error: Error) -> Error {
        match self.reason(&error, SHORT_PATIENCE) {
            Some(reason) => Error::with_source(ErrorKind::ToolFailed, error.to_string(), reason),
            None => error,
        }
    }

    fn reason(&self, error: &Error, patience: Duration) -> Option<String> {
        // The child can only cause a broken connection or a refused request.
        if error.kind() != ErrorKind::Io {
            return None;
        }
        let end = self.child.end_within(patience).unwrap_or_else(|| {
            self.child.kill();
            self.child.wait()
        });
        if let Some(why) = self.child.limit_reached(&end) {
            return Some(why);
        }
        let is_silent = end.messages.iter().all(u8::is_ascii_whitespace);
        (!is_silent).then(|| plain_message(&end.messages, &self.name))
    }
}
