//! A socket at which this program listens itself, where sshd makes none: each connection to it waits for a session of SSH
//! that takes it.
//!
//! ```text
//!   QEMU ─▶ SOCKET ─▶ this program ◀─ SOCKET.1 ◀─ coldrise-host connect SOCKET.1 ◀═ SSH ═ the backup server
//! ```

use std::io::copy;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};

/// How long a task waits for a connection.
const PATIENCE: Duration = Duration::from_secs(1);

/// Listens at a socket, until this process ends. The receiver gets the path of a private socket for each connection: who connects
/// to that one has the connection.
///
/// # Errors
/// Errors of the operating system.
pub(crate) fn listen(socket: &Path) -> Result<Receiver<PathBuf>> {
    let what = || format!("making {}", socket.display());
    let listener = UnixListener::bind(socket).context(what)?;
    let (sender, receiver) = channel();
    let socket = socket.to_owned();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().flatten().enumerate() {
            let mut private = socket.as_os_str().to_owned();
            private.push(format!(".{number}"));
            // A connection that cannot be served ends.
            if hand_over(stream, private.into(), &sender).is_err() {
                continue;
            }
        }
    });
    Ok(receiver)
}

fn hand_over(stream: UnixStream, private: PathBuf, to: &Sender<PathBuf>) -> std::io::Result<()> {
    let _ = std::fs::remove_file(&private);
    let listener = UnixListener::bind(&private)?;
    let _ = to.send(private.clone());
    std::thread::spawn(move || {
        let taken = listener.accept();
        let _ = std::fs::remove_file(&private);
        taken.and_then(|(other, _)| join(stream, other))
    });
    Ok(())
}

/// Copies both ways until one side ends.
fn join(one: UnixStream, other: UnixStream) -> std::io::Result<()> {
    let (mut one_in, mut other_in) = (one.try_clone()?, other.try_clone()?);
    let (mut one, mut other) = (one, other);
    std::thread::spawn(move || {
        let _ = copy(&mut one_in, &mut other_in);
        let _ = other_in.shutdown(Shutdown::Both);
    });
    let _ = copy(&mut other, &mut one);
    one.shutdown(Shutdown::Both)
}

/// The next connection's private socket; `None` if there was no connection for a while.
///
/// # Errors
/// `Io` if nothing listens any more.
pub(crate) fn next(connections: &Receiver<PathBuf>) -> Result<Option<PathBuf>> {
    match connections.recv_timeout(PATIENCE) {
        Ok(path) => Ok(Some(path)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Error::new(ErrorKind::Io, "nothing listens at the socket for the disks"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn each_connection_is_taken_by_one_session() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("a.nbd");
        let connections = listen(&socket).unwrap();
        for text in [b"one", b"two"] {
            let mut qemu = UnixStream::connect(&socket).unwrap();
            let private = next(&connections).unwrap().unwrap();
            let mut session = UnixStream::connect(&private).unwrap();
            session.write_all(text).unwrap();
            let mut read = [0; 3];
            qemu.read_exact(&mut read).unwrap();
            assert_eq!(&read, text);
            drop(session);
            assert_eq!(qemu.read(&mut read).unwrap(), 0, "it ends with its session");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
