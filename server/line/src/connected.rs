//! A line over TLS connections: two threads for each.
//!
//! The kernel notices a dead peer: it closes a connection whose bytes are not acknowledged; so does
//! the control connection, on which each side says something at least every quarter of the
//! silence that the other allows. Readers never wait for their user, so a slow user does not look
//! dead.

use std::io::ErrorKind as IoKind;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Context, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::credit::{Credit, windows};
use crate::failure::{End, Failure};
use crate::frame::{Class, Frame, cost_bytes};
use crate::inbox::Inbox;
use crate::line::{Line, LineStatistics, Received};
use crate::options::LineOptions;
use crate::outbox::{Outbox, Work};
use crate::pace::{Meter, Pace};
use crate::socket;
use crate::stream::{NETWORK_ADVICE, TlsStream};
use crate::wire::{Message, MessageReader};

/// Most time that closing takes.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);
/// Bytes that are read at a time.
const READ_BYTES: usize = 64 << 10;

/// A line over a network. Dropped without [`Line::close`], it fails at the peer.
pub struct TcpLine(Arc<Connections>);

/// State that the threads of a line share.
pub(crate) struct Connections {
    peer: String,
    streams: Vec<(Class, TlsStream)>,
    inbox: Inbox,
    outbox: Outbox,
    credit: Credit,
    pace: Pace,
    sent: Meter,
    received: Meter,
    silence: Duration,
    readers: Mutex<Readers>,
    reader_ended: Condvar,
}

struct Readers {
    running: usize,
    /// Connections whose peer still sends.
    open: usize,
}

impl TcpLine {
    /// Starts a line of connections that belong together, the control connection first.
    pub(crate) fn start(
        peer: String,
        streams: Vec<(Class, TlsStream)>,
        options: &LineOptions,
        peer_window_bytes: u64,
    ) -> Result<TcpLine> {
        for (class, stream) in &streams {
            let silence = (*class == Class::Control).then_some(options.silence);
            stream.begin(silence).context(|| "setting an option of a socket")?;
        }
        let connections = Arc::new(Connections {
            peer,
            inbox: Inbox::new(windows(options.bulk_window_bytes)),
            outbox: Outbox::new(),
            credit: Credit::new(windows(peer_window_bytes)),
            pace: Pace::new(options.rate_bytes_per_second),
            sent: Meter::new(),
            received: Meter::new(),
            silence: options.silence,
            readers: Mutex::new(Readers { running: streams.len(), open: streams.len() }),
            reader_ended: Condvar::new(),
            streams,
        });
        let line = TcpLine(connections);
        for at in 0..line.0.streams.len() {
            let (reader, writer) = (Arc::clone(&line.0), Arc::clone(&line.0));
            spawn("line-read", move || reader.read(at))?;
            spawn("line-write", move || writer.write(at))?;
        }
        Ok(line)
    }

    pub(crate) fn connections(&self) -> &Arc<Connections> {
        &self.0
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(work).context(|| "starting a thread of a line")?;
    Ok(())
}

impl Connections {
    /// Ends the line; the first end counts.
    pub(crate) fn end(&self, end: End) {
        self.credit.end(end.clone());
        self.inbox.end(end.clone());
        self.outbox.end(end);
        self.pace.end();
        for (_, stream) in &self.streams {
            stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether the line has failed or was closed.
    pub(crate) fn has_ended(&self) -> bool {
        self.inbox.has_ended()
    }

    fn read(&self, at: usize) {
        let (class, stream) = &self.streams[at];
        if let Err(failure) = self.read_messages(*class, stream) {
            self.end(End::Failed(failure));
        }
        self.readers.lock().running -= 1;
        self.reader_ended.notify_all();
    }

    /// Until the peer closes the connection.
    fn read_messages(&self, class: Class, stream: &TlsStream) -> std::result::Result<(), Failure> {
        let mut buffer = vec![0; READ_BYTES];
        let mut plain = Vec::new();
        let mut reader = MessageReader::default();
        let mut is_open = true;
        loop {
            plain.clear();
            let count = stream.read(&mut buffer, &mut plain);
            match count.map_err(|error| self.broken(Some(error)))? {
                None if is_open => return Err(self.broken(None)),
                None => return Ok(()),
                Some(count) => self.received.add(count as u64),
            }
            let reserve = |of: Class, length| match class.carries().contains(&of) {
                true => self.inbox.reserve(of, cost_bytes(length)),
                false => Err(Failure::protocol("a frame came on a connection of another class")),
            };
            reader.read(&plain, reserve, |message| {
                match message {
                    _ if !is_open => return Err(Failure::protocol("it sent more after its end")),
                    Message::Frame(class, frame) => {
                        self.note_fetch(class);
                        self.inbox.push(class, frame);
                    }
                    Message::Grant { class, bytes } => self.credit.add(class, bytes)?,
                    Message::Alive => {}
                    Message::Close => {
                        is_open = false;
                        self.note_close();
                    }
                }
                Ok(())
            })?;
        }
    }

    /// Bulk lets fetched blocks pass.
    fn note_fetch(&self, class: Class) {
        if class == Class::Fetch {
            let (_, control) = &self.streams[0];
            let round_trip = socket::round_trip(control.socket());
            self.outbox.fetched(round_trip.unwrap_or_default());
        }
    }

    fn note_close(&self) {
        let mut readers = self.readers.lock();
        readers.open -= 1;
        if readers.open == 0 {
            drop(readers);
            self.end(End::ClosedByPeer);
        }
    }

    fn write(&self, at: usize) {
        let (class, stream) = &self.streams[at];
        if let Err(error) = self.write_messages(*class, stream) {
            self.end(End::Failed(self.broken(Some(error))));
        }
    }

    fn write_messages(&self, class: Class, stream: &TlsStream) -> std::io::Result<()> {
        loop {
            match self.outbox.next(class, self.silence / 4) {
                Work::Send(message) => self.write_message(stream, &message)?,
                Work::Idle => self.write_message(stream, &Message::Alive)?,
                Work::Stop => return Ok(()),
                Work::Close => {
                    self.write_message(stream, &Message::Close)?;
                    stream.shutdown(Shutdown::Write);
                    return Ok(());
                }
            }
        }
    }

    fn write_message(&self, stream: &TlsStream, message: &Message) -> std::io::Result<()> {
        let (header, mut body) = message.encode();
        let mut header: &[u8] = &header;
        while !header.is_empty() || !body.is_empty() {
            let (piece, rest) = body.split_at(body.len().min(self.pace.piece_bytes()));
            let encrypted = stream.encrypt([header, piece])?;
            self.pace.send(message.urgency(), encrypted.len());
            stream.write(&encrypted)?;
            self.sent.add(encrypted.len() as u64);
            (header, body) = (&[], rest);
        }
        Ok(())
    }

    /// Why a connection failed, or ended without the peer's last message (`None`).
    fn broken(&self, error: Option<std::io::Error>) -> Failure {
        let kind = error.as_ref().map(std::io::Error::kind);
        // When the kernel drops a connection, only one of its threads gets the timeout as the reason.
        let is_silent = matches!(kind, Some(IoKind::WouldBlock | IoKind::TimedOut))
            || self.received.idle() > self.silence / 2;
        let (text, advice) = match (error, kind) {
            _ if is_silent => (
                format!("the other side has been silent for {} s", self.silence.as_secs_f32()),
                NETWORK_ADVICE,
            ),
            (None, _) | (_, Some(IoKind::ConnectionReset | IoKind::BrokenPipe)) => (
                "the other side ended without closing it".to_owned(),
                "look for the reason at the other site",
            ),
            (Some(error), _) => (format!("a connection failed: {error}"), NETWORK_ADVICE),
        };
        Failure { kind: ErrorKind::Io, text, advice }
    }
}

impl Line for TcpLine {
    fn send(&self, class: Class, frame: Frame) -> Result<()> {
        frame.check()?;
        self.0.note_fetch(class);
        self.0.credit.take(class, frame.cost_bytes(), &self.0.peer)?;
        self.0.outbox.push(class, frame, &self.0.peer)
    }

    fn receive(&self, from: &[Class], limit: Duration) -> Result<Received> {
        let received = self.0.inbox.receive(from, limit, &self.0.peer)?;
        if let Received::Frame { class, frame } = &received {
            self.0.outbox.grant(*class, frame.cost_bytes());
        }
        Ok(received)
    }

    fn close(&self) {
        self.0.credit.end(End::Closed);
        self.0.inbox.end(End::Closed);
        self.0.outbox.close();
        // The peer answers the last message of each connection by ending it.
        let mut readers = self.0.readers.lock();
        let still_running = |readers: &mut Readers| readers.running > 0;
        self.0.reader_ended.wait_while_for(&mut readers, still_running, CLOSE_LIMIT);
        drop(readers);
        self.0.end(End::Closed);
    }

    fn set_rate(&self, bytes_per_second: Option<u64>) {
        self.0.pace.set(bytes_per_second);
    }

    fn statistics(&self) -> LineStatistics {
        let (sent_bytes, sent_bytes_per_second) = self.0.sent.read();
        let (received_bytes, received_bytes_per_second) = self.0.received.read();
        let (first, last) = (self.0.streams.first(), self.0.streams.last());
        LineStatistics {
            sent_bytes,
            received_bytes,
            sent_bytes_per_second,
            received_bytes_per_second,
            round_trip: first.and_then(|(_, control)| socket::round_trip(control.socket())),
            congestion_control: last
                .map(|(_, bulk)| socket::congestion_control(bulk.socket()))
                .unwrap_or_default(),
            connections: self.0.streams.len(),
            rate_limit_bytes_per_second: self.0.pace.rate(),
        }
    }

    fn peer(&self) -> String {
        self.0.peer.clone()
    }
}

impl Drop for TcpLine {
    fn drop(&mut self) {
        self.0.end(End::Closed);
    }
}
