//! The serial port of a machine for any number of clients.
//!
//! One thread reads what the guest writes, always: a slow client never stops the guest. The last
//! [`HISTORY_BYTES`] are kept; a new client gets them first, then what comes. A client that falls behind
//! by more misses output. What clients write goes to the guest in the order in which it came.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use coldrise_block::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};

/// Bytes of output that are kept.
pub(super) const HISTORY_BYTES: usize = 64 << 10;
/// Bytes of input that wait for the guest. Clients wait with more.
const MAX_INPUT_BYTES: usize = 4 << 10;
/// Maximum number of clients. More wait until one has left.
const MAX_CLIENTS: usize = 32;
const PIECE_BYTES: usize = 4 << 10;

/// The hub of one port. It ends with QEMU.
pub(super) struct SerialHub {
    _thread: std::thread::JoinHandle<()>,
}

impl SerialHub {
    /// Serves `port`, QEMU's end, to the clients of `listener`.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub(super) fn start(port: UnixStream, listener: UnixListener) -> Result<SerialHub> {
        let prepared = port.set_nonblocking(true).and_then(|()| listener.set_nonblocking(true));
        prepared.context(|| "preparing the serial port")?;
        let thread = std::thread::Builder::new().name("serial".to_owned());
        let hub = Hub {
            port,
            listener,
            clients: Vec::new(),
            history: History::default(),
            input: VecDeque::new(),
        };
        let thread = thread.spawn(move || hub.run());
        Ok(SerialHub { _thread: thread.context(|| "starting a thread for the serial port")? })
    }
}

/// The last output.
#[derive(Default)]
struct History {
    bytes: VecDeque<u8>,
    /// Number of bytes that came before.
    dropped: u64,
}

impl History {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let surplus = self.bytes.len().saturating_sub(HISTORY_BYTES);
        self.bytes.drain(..surplus);
        self.dropped += surplus as u64;
    }

    fn end(&self) -> u64 {
        self.dropped + self.bytes.len() as u64
    }

    /// The bytes from a place on, or from the oldest that is kept; and the place where they begin.
    fn from(&self, place: u64) -> (u64, &[u8]) {
        let place = place.max(self.dropped);
        let skipped = usize::try_from(place - self.dropped).unwrap_or(usize::MAX);
        let (one, other) = self.bytes.as_slices();
        let bytes = match skipped.checked_sub(one.len()) {
            None => one.get(skipped..),
            Some(skipped) => other.get(skipped..),
        };
        (place, bytes.unwrap_or_default())
    }
}

struct Client {
    stream: UnixStream,
    /// Up to where it has the output.
    place: u64,
}

struct Hub {
    port: UnixStream,
    listener: UnixListener,
    clients: Vec<Client>,
    history: History,
    /// Input of clients that the guest has not taken.
    input: VecDeque<u8>,
}

impl Hub {
    fn run(mut self) {
        while self.step().is_ok() {}
        // The last output, as far as clients take it at once.
        self.send();
    }

    /// Waits for something to do, and does it.
    ///
    /// # Errors
    /// QEMU has closed the port.
    fn step(&mut self) -> std::io::Result<()> {
        let has_input_room = self.input.len() < MAX_INPUT_BYTES;
        let wanted = |is_read: bool, is_written: bool| {
            let read = if is_read { PollFlags::IN } else { PollFlags::empty() };
            let written = if is_written { PollFlags::OUT } else { PollFlags::empty() };
            read | written
        };
        let mut polled = vec![PollFd::new(&self.port, wanted(true, !self.input.is_empty()))];
        let accepts = self.clients.len() < MAX_CLIENTS;
        polled.push(PollFd::new(&self.listener, wanted(accepts, false)));
        let end = self.history.end();
        polled.extend(
            self.clients.iter().map(|client| {
                PollFd::new(&client.stream, wanted(has_input_room, client.place < end))
            }),
        );
        match poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // A client that has closed shows that alone.
        let gone: Vec<bool> = polled
            .iter()
            .skip(2)
            .map(|client| client.revents().intersects(PollFlags::HUP | PollFlags::ERR))
            .collect();
        drop(polled);
        self.read_port()?;
        if accepts {
            self.accept();
        }
        self.read_clients(&gone);
        self.write_port()?;
        self.send();
        Ok(())
    }

    fn read_port(&mut self) -> std::io::Result<()> {
        let mut bytes = [0; PIECE_BYTES];
        match self.port.read(&mut bytes) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.history.push(bytes.get(..count).unwrap_or_default());
                Ok(())
            }
            Err(error) => would_wait(error),
        }
    }

    fn write_port(&mut self) -> std::io::Result<()> {
        let (bytes, _) = self.input.as_slices();
        if bytes.is_empty() {
            return Ok(());
        }
        match self.port.write(bytes) {
            Ok(count) => {
                self.input.drain(..count);
                Ok(())
            }
            Err(error) => would_wait(error),
        }
    }

    fn accept(&mut self) {
        if let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                self.clients.push(Client { stream, place: 0 });
            }
        }
    }

    /// Takes what clients have written, and forgets those that have gone. `gone` is about the first
    /// clients, in their order.
    fn read_clients(&mut self, gone: &[bool]) {
        let input = &mut self.input;
        let mut number = 0;
        self.clients.retain_mut(|client| {
            let has_gone = gone.get(number).copied().unwrap_or(false);
            number += 1;
            let room = MAX_INPUT_BYTES.saturating_sub(input.len()).min(PIECE_BYTES);
            let mut bytes = [0; PIECE_BYTES];
            let Some(free) = bytes.get_mut(..room).filter(|free| !free.is_empty()) else {
                return !has_gone;
            };
            match client.stream.read(free) {
                Ok(0) => false,
                Ok(count) => {
                    input.extend(bytes.get(..count).unwrap_or_default());
                    true
                }
                Err(error) => would_wait(error).is_ok(),
            }
        });
    }

    fn send(&mut self) {
        let history = &self.history;
        self.clients.retain_mut(|client| {
            loop {
                let (place, bytes) = history.from(client.place);
                if bytes.is_empty() {
                    return true;
                }
                match client.stream.write(bytes) {
                    Ok(count) => client.place = place + count as u64,
                    Err(error) => return would_wait(error).is_ok(),
                }
            }
        });
    }
}

/// Nothing can be read or written now: that is not an error.
fn would_wait(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
#[path = "serial_hub_tests.rs"]
mod tests;
