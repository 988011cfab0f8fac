//! Connects to a Unix socket with a long path.

use std::io::Result;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};

/// Connects to a socket. An address has at most 107 bytes; the path may be longer.
pub(crate) fn connect(path: &Path) -> Result<UnixStream> {
    let found = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    UnixStream::connect(format!("/proc/self/fd/{}", found.as_raw_fd()))
}
