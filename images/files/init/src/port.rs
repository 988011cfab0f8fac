//! The virtio port to Coldrise.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coldrise_files_protocol::{Answer, MAGIC, MAX_FRAME_BYTES, NONCE_BYTES, PORT, Request, frame};
use rustix::event::{PollFd, PollFlags, poll};

/// Answers are buffered up to this size: each write stops the machine for a moment.
const BUFFER_BYTES: usize = 64 << 10;
/// The kernel shows the port this long after it has loaded the driver, at most: QEMU names it by messages.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often an unconnected port is looked at.
const INTERVAL: Duration = Duration::from_millis(10);
/// The same for a machine that waits for its next command longer than `SHORT_WAIT`: each look takes an emulated
/// processor half a millisecond.
const LONG_INTERVAL: Duration = Duration::from_millis(100);
const SHORT_WAIT: Duration = Duration::from_secs(1);

/// The command that asked is gone, or has a new greeting.
#[derive(Debug)]
pub(crate) struct Abandoned;

pub(crate) struct Port {
    file: std::fs::File,
    buffer: Vec<u8>,
    is_abandoned: bool,
}

impl Port {
    /// Waits for the port, and opens it.
    pub(crate) fn open() -> Result<Port> {
        let until = Instant::now() + PATIENCE;
        let node = loop {
            match node()? {
                Some(node) if node.exists() => break node,
                _ if Instant::now() > until => {
                    return Err(Error::new(ErrorKind::NotFound, "no virtio port"));
                }
                _ => std::thread::sleep(INTERVAL),
            }
        };
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true);
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
        Ok(Port { file: options.open(node)?, buffer: Vec::new(), is_abandoned: false })
    }

    /// Waits for the next request, and answers greetings before it.
    pub(crate) fn request(&mut self) -> Result<Request> {
        self.buffer.clear();
        self.is_abandoned = false;
        loop {
            let mut length = [0; 4];
            self.read(&mut length)?;
            if MAGIC.starts_with(&length) {
                let mut rest = [0; MAGIC.len() - 4 + NONCE_BYTES];
                self.read(&mut rest)?;
                self.greet(&[&length[..], &rest].concat())?;
                continue;
            }
            let length = u32::from_le_bytes(length) as usize;
            if length > MAX_FRAME_BYTES {
                continue;
            }
            let mut body = vec![0; length];
            self.read(&mut body)?;
            if let Ok(request) = Request::parse(&body) {
                return Ok(request);
            }
        }
    }

    /// Answers a greeting. The kernel may deliver the first bytes of a connection before it counts the
    /// port as connected: the answer waits for that. It is dropped if more arrives first, from a later
    /// command: the one that greeted is gone, it asks for nothing before it has the answer.
    fn greet(&mut self, mut greeting: &[u8]) -> Result<()> {
        while !greeting.is_empty() {
            let events = self.poll(PollFlags::IN | PollFlags::OUT)?;
            if events.contains(PollFlags::IN) {
                break;
            }
            if events.contains(PollFlags::HUP) {
                std::thread::sleep(INTERVAL);
                continue;
            }
            match self.file.write(greeting) {
                Ok(count) => greeting = greeting.get(count..).unwrap_or_default(),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                // The client has disconnected.
                Err(_) => break,
            }
        }
        Ok(())
    }

    fn read(&mut self, mut bytes: &mut [u8]) -> Result<()> {
        let mut waited = Duration::ZERO;
        let mut wait = || {
            let interval = if waited < SHORT_WAIT { INTERVAL } else { LONG_INTERVAL };
            std::thread::sleep(interval);
            waited += interval;
        };
        while !bytes.is_empty() {
            match self.file.read(bytes) {
                // No client is connected.
                Ok(0) => wait(),
                Ok(count) => bytes = bytes.get_mut(count..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let events = self.poll(PollFlags::IN)?;
                    if events.contains(PollFlags::HUP) {
                        wait();
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn poll(&self, events: PollFlags) -> Result<PollFlags> {
        let mut ports = [PollFd::new(&self.file, events)];
        poll(&mut ports, None)?;
        Ok(ports[0].revents())
    }

    /// Sends an answer, perhaps later.
    pub(crate) fn send(&mut self, answer: &Answer) -> std::result::Result<(), Abandoned> {
        self.buffer.extend_from_slice(&frame(&answer.body()));
        if self.buffer.len() >= BUFFER_BYTES || self.is_abandoned {
            self.flush()?;
        }
        Ok(())
    }

    /// Sends what was collected.
    pub(crate) fn flush(&mut self) -> std::result::Result<(), Abandoned> {
        let buffer = std::mem::take(&mut self.buffer);
        let mut rest = buffer.as_slice();
        while !rest.is_empty() {
            let events = self.poll(PollFlags::IN | PollFlags::OUT).unwrap_or(PollFlags::HUP);
            if self.is_abandoned
                || events.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)
            {
                self.is_abandoned = true;
                return Err(Abandoned);
            }
            match self.file.write(rest) {
                Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(_) => {
                    self.is_abandoned = true;
                    return Err(Abandoned);
                }
            }
        }
        Ok(())
    }
}

/// The port's device, if the kernel knows its name already.
fn node() -> Result<Option<PathBuf>> {
    for port in std::fs::read_dir("/sys/class/virtio-ports")? {
        let port = port?;
        let name = std::fs::read_to_string(port.path().join("name")).unwrap_or_default();
        if name.trim() == PORT {
            return Ok(Some(Path::new("/dev").join(port.file_name())));
        }
    }
    Ok(None)
}
