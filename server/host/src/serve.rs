//! The program at the other end: tasks from a connection, and the way to a socket.

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::channel::Channel;
use crate::messages::{Envelope, Outcome, Reply, read_frame, write_frame};
use crate::sockets::end_connection;
use crate::tasks::HostTasks;

/// A server that says nothing for this long is gone. It asks for [`crate::Request::Facts`] more often.
pub const SILENCE: Duration = Duration::from_secs(60);
/// Maximum number of tasks at a time.
const MAX_TASKS: usize = 16;
const BUFFER_BYTES: usize = 256 << 10;

/// Does the tasks that come from `input` until its end, and then removes everything.
///
/// # Errors
/// Errors of the connection, and `InvalidInput` for anything but requests.
pub fn serve(input: impl Into<OwnedFd>, output: impl Write + Send + 'static) -> Result<()> {
    let tasks = Arc::new(HostTasks::default());
    let served = serve_with(&tasks, File::from(input.into()), output);
    tasks.end();
    served
}

fn serve_with(
    tasks: &Arc<HostTasks>,
    // Not buffered: what a buffer holds, the wait for the next message does not see.
    mut input: File,
    output: impl Write + Send + 'static,
) -> Result<()> {
    let output = Arc::new(Mutex::new(output));
    loop {
        if let Err(error) = wait_for(&input) {
            // A dead line looks like a quiet one to sshd: QEMU would wait for its disks.
            end_connection(std::process::id());
            return Err(error);
        }
        let Some(Envelope { number, request }) = read_frame(&mut input)? else { return Ok(()) };
        let (task, output) = (Arc::clone(tasks), Arc::clone(&output));
        let reply = move |outcome| {
            let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
            // The reader sees the end of the connection.
            let _ = write_frame(&mut *output, &Reply { number, outcome });
        };
        if Arc::strong_count(tasks) > MAX_TASKS + 1 {
            let error = Error::new(
                ErrorKind::Busy,
                "too many tasks at a time: run fewer, as bisect does with --parallel 1",
            );
            reply(Outcome::from(Err(error)));
            continue;
        }
        std::thread::spawn(move || reply(Outcome::from(task.call(request))));
    }
}

/// Waits for the first byte of a message.
fn wait_for(input: &impl AsFd) -> Result<()> {
    let mut wanted = [PollFd::new(input, PollFlags::IN)];
    let limit = Timespec { tv_sec: SILENCE.as_secs() as i64, tv_nsec: 0 };
    let ready = rustix::io::retry_on_intr(|| poll(&mut wanted, Some(&limit)));
    match ready.map_err(std::io::Error::from).context(|| "waiting for the server")? {
        0 => Err(Error::new(ErrorKind::Io, "the server has said nothing for a minute")),
        _ => Ok(()),
    }
}

/// Connects standard input and output to a Unix socket, until one side ends.
///
/// # Errors
/// Errors of the socket.
pub fn bridge(
    socket: &Path,
    mut input: impl Read + Send + 'static,
    mut output: impl Write,
) -> Result<()> {
    let what = || format!("connecting to {}", socket.display());
    let mut from = UnixStream::connect(socket).context(what)?;
    let mut to = from.try_clone().context(what)?;
    std::thread::spawn(move || {
        let _ = copy(&mut input, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    copy(&mut from, &mut output).context(what)
}

fn copy(from: &mut impl Read, to: &mut impl Write) -> std::io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        to.write_all(&buffer[..count])?;
        to.flush()?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{Answer, Request};

    #[test]
    fn folders_vanish_with_the_connection() {
        let parent = tempfile::tempdir().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        let output = far.try_clone().unwrap();
        let server = std::thread::spawn(move || serve(far, output));
        let request = Request::MakeSpace { parent: Some(parent.path().to_owned()), group: None };
        write_frame(&mut near, &Envelope { number: 9, request }).unwrap();
        let reply: Reply = read_frame(&mut near).unwrap().unwrap();
        assert_eq!(reply.number, 9);
        let answer: Result<Answer> = reply.outcome.into();
        let Ok(Answer::Path(space)) = answer else { panic!("{answer:?}") };
        assert!(space.is_dir());
        near.shutdown(Shutdown::Both).unwrap();
        server.join().unwrap().unwrap();
        assert!(!space.exists());
    }

    /// A server asks again after 15 s, which would hide a message that was left in a buffer.
    #[test]
    fn messages_that_come_at_once_are_answered_at_once() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let output = far.try_clone().unwrap();
        let server = std::thread::spawn(move || serve(far, output));
        let mut messages = Vec::new();
        for number in 1..=3 {
            write_frame(&mut messages, &Envelope { number, request: Request::FreePort }).unwrap();
        }
        near.write_all(&messages).unwrap();
        near.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let answered = (0..3).map(|_| read_frame::<Reply>(&mut near).unwrap().unwrap().number);
        let mut answered: Vec<u64> = answered.collect();
        answered.sort_unstable();
        assert_eq!(answered, [1, 2, 3]);
        near.shutdown(Shutdown::Both).unwrap();
        server.join().unwrap().unwrap();
    }

    #[test]
    fn a_server_with_another_protocol_is_refused() {
        let (mut near, far) = UnixStream::pair().unwrap();
        near.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let output = far.try_clone().unwrap();
        assert_eq!(serve(far, output).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
