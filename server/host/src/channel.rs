//! The way to a host.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coldrise_block::{Context, Result};

use crate::messages::{Answer, Request};

/// The way to a host.
pub trait Channel: Send + Sync {
    /// Does a task there.
    ///
    /// # Errors
    /// Those of the task; `Io` if the connection is lost.
    fn call(&self, request: Request) -> Result<Answer>;

    /// The path at which a Unix socket of the host can be connected to from here.
    ///
    /// # Errors
    /// If the way cannot be made.
    fn reach(&self, socket: &Path) -> Result<PathBuf>;

    /// The TCP port of loopback here that leads to a port of loopback there.
    ///
    /// # Errors
    /// If the way cannot be made.
    fn reach_port(&self, port: u16) -> Result<u16>;

    /// Lets connections to a socket `there` on the host lead to the socket `local` here.
    ///
    /// # Errors
    /// If the way cannot be made.
    fn offer(&self, local: &Path, there: &Path) -> Result<()>;

    /// Whether the connection is lost, and so each further task fails.
    fn is_lost(&self) -> bool;

    /// The host's name; `None` for this host.
    fn name(&self) -> Option<&str>;
}

/// How long a server of a socket may take for its first byte.
const GREETING_LIMIT: Duration = Duration::from_secs(10);

/// Waits until a server behind a Unix socket speaks first, as NBD's do.
///
/// # Errors
/// Errors of the connection; after 10 s.
pub fn greets(socket: &Path) -> Result<()> {
    let what = || format!("connecting to {}", socket.display());
    let mut stream = UnixStream::connect(socket).context(what)?;
    stream.set_read_timeout(Some(GREETING_LIMIT)).context(what)?;
    stream.read_exact(&mut [0; 8]).context(what)
}
