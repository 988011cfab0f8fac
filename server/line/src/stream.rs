//! One TLS connection: a blocking socket, and TLS behind a lock. One thread reads, another writes.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustls::Connection;

use crate::identity::PeerKey;

/// Bytes that are encrypted, or read, at a time.
pub(crate) const PIECE_BYTES: usize = 64 << 10;

/// A connection after its handshake.
pub(crate) struct TlsStream {
    socket: TcpStream,
    tls: Mutex<Connection>,
}

/// A socket whose reads and writes all end by one time.
struct Deadline<'a> {
    socket: &'a TcpStream,
    until: Instant,
}

impl Deadline<'_> {
    fn left(&self) -> std::io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(IoKind::TimedOut.into()),
            false => Ok(Some(left)),
        }
    }
}

impl Read for Deadline<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        (&mut &*self.socket).read(buffer)
    }
}

impl Write for Deadline<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        (&mut &*self.socket).write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl TlsStream {
    /// Does the handshake, until `until` at the latest.
    ///
    /// # Errors
    /// `Forbidden` if either side refuses the other's key; `Io` for everything else.
    pub(crate) fn handshake(
        socket: TcpStream,
        tls: impl Into<Connection>,
        until: Instant,
    ) -> Result<TlsStream> {
        let stream = TlsStream { socket, tls: Mutex::new(tls.into()) };
        {
            let mut tls = stream.tls.lock();
            let mut socket = Deadline { socket: &stream.socket, until };
            while tls.is_handshaking() {
                tls.complete_io(&mut socket).map_err(refusal)?;
            }
        }
        Ok(stream)
    }

    /// The peer's key, which TLS has proved.
    pub(crate) fn peer_key(&self) -> Option<PeerKey> {
        let tls = self.tls.lock();
        tls.peer_certificates().and_then(|keys| keys.first()).map(|key| PeerKey::of(key))
    }

    /// A value that only the two ends of this connection know.
    pub(crate) fn exporter(&self) -> Result<[u8; 32]> {
        let tls = self.tls.lock();
        tls.export_keying_material([0; 32], b"EXPORTER-coldrise-pairing", None)
            .map_err(|error| Error::new(ErrorKind::Internal, format!("TLS exporter: {error}")))
    }

    /// Sends a message of the beginning of a connection.
    pub(crate) fn write_all_until(&self, bytes: &[u8], until: Instant) -> Result<()> {
        let mut tls = self.tls.lock();
        let mut socket = Deadline { socket: &self.socket, until };
        tls.writer().write_all(bytes).map_err(refusal)?;
        while tls.wants_write() {
            tls.complete_io(&mut socket).map_err(refusal)?;
        }
        Ok(())
    }

    /// Receives one. The peer sends nothing behind it before it has an answer.
    pub(crate) fn read_exact_until(&self, bytes: &mut [u8], until: Instant) -> Result<()> {
        let mut tls = self.tls.lock();
        let mut socket = Deadline { socket: &self.socket, until };
        rustls::Stream::new(&mut *tls, &mut socket).read_exact(bytes).map_err(refusal)
    }

    /// From here on reads fail after `silence`; writes wait as long as they have to.
    pub(crate) fn begin(&self, silence: Duration) -> std::io::Result<()> {
        self.socket.set_write_timeout(None)?;
        self.socket.set_read_timeout(Some(silence))
    }

    /// Encrypts and sends at most [`PIECE_BYTES`]. Called by one thread only. Gives the bytes on
    /// the wire.
    pub(crate) fn write_piece(&self, parts: [&[u8]; 2]) -> std::io::Result<usize> {
        let mut encrypted = Vec::with_capacity(parts[0].len() + parts[1].len() + 256);
        {
            let mut tls = self.tls.lock();
            for part in parts {
                tls.writer().write_all(part)?;
            }
            while tls.wants_write() {
                tls.write_tls(&mut encrypted)?;
            }
        }
        (&mut &self.socket).write_all(&encrypted)?;
        Ok(encrypted.len())
    }

    /// Reads what is there, waits for something, and appends it to `plain`, which stays below
    /// twice [`PIECE_BYTES`]. Called by one thread only. Gives the bytes on the wire; 0 at the end.
    pub(crate) fn read_piece(
        &self,
        buffer: &mut [u8],
        plain: &mut Vec<u8>,
    ) -> std::io::Result<usize> {
        let count = loop {
            match (&mut &self.socket).read(buffer) {
                Err(error) if error.kind() == IoKind::Interrupted => {}
                result => break result?,
            }
        };
        let mut encrypted = &buffer[..count];
        let mut tls = self.tls.lock();
        loop {
            // Also what came with the last bytes of the handshake.
            let state = tls.process_new_packets().map_err(std::io::Error::other)?;
            let waiting = state.plaintext_bytes_to_read();
            let begin = plain.len();
            plain.resize(begin + waiting, 0);
            tls.reader().read_exact(&mut plain[begin..])?;
            if encrypted.is_empty() {
                return Ok(count);
            }
            tls.read_tls(&mut encrypted)?;
        }
    }

    pub(crate) fn shutdown(&self, how: Shutdown) {
        // It may be gone already.
        let _ = self.socket.shutdown(how);
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }
}

/// What a failed handshake means.
fn refusal(error: std::io::Error) -> Error {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let refused = match tls {
        Some(rustls::Error::InvalidCertificate(_)) => Some((
            "it has another key than at the pairing",
            "if it was set up again, remove the link at both sites and add it again; otherwise \
             find out who answers at this address",
        )),
        Some(rustls::Error::AlertReceived(_)) => Some((
            "it refuses the key of this side",
            "the link may have been removed there: remove it here, too, and add it again",
        )),
        _ => None,
    };
    match refused {
        Some((text, advice)) => Error::new(ErrorKind::Forbidden, text).advise(advice),
        None if matches!(error.kind(), IoKind::TimedOut | IoKind::WouldBlock) => {
            Error::new(ErrorKind::Io, "it did not answer in time")
        }
        None => Error::with_source(ErrorKind::Io, "the connection failed", error),
    }
}
