//! One TLS connection: a blocking socket, and TLS behind a lock. One thread reads, another writes.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustls::{AlertDescription, Connection};

use crate::hello::Refusal;
use crate::identity::PeerKey;

/// For connections that fail without an error message.
pub(crate) const NETWORK_ADVICE: &str =
    "check the address, the network between the sites, and that Coldrise runs at the other one";

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
        let mut tls = tls.into();
        // The size of one write is bounded here.
        tls.set_buffer_limit(None);
        // Else the hello waits for the acknowledgement of the handshake's last record, which the
        // peer delays by 40 ms.
        socket.set_nodelay(true).context(|| "setting an option of a socket")?;
        let mut deadline = Deadline { socket: &socket, until };
        while tls.is_handshaking() {
            tls.complete_io(&mut deadline).map_err(refusal)?;
        }
        Ok(TlsStream { socket, tls: Mutex::new(tls) })
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
        let mut filled = 0;
        while filled < bytes.len() {
            match tls.reader().read(&mut bytes[filled..]) {
                Ok(0) => return Err(refusal(IoKind::UnexpectedEof.into())),
                Ok(count) => filled += count,
                Err(error) if error.kind() == IoKind::WouldBlock => {
                    tls.complete_io(&mut socket).map_err(refusal)?;
                }
                Err(error) => return Err(refusal(error)),
            }
        }
        Ok(())
    }

    /// From here on reads fail after `silence`, if there is one; writes wait as long as the kernel
    /// lets them.
    pub(crate) fn begin(&self, silence: Option<Duration>) -> std::io::Result<()> {
        self.socket.set_write_timeout(None)?;
        self.socket.set_read_timeout(silence)
    }

    /// Encrypts. Called by one thread only, which sends the result before it calls again.
    pub(crate) fn encrypt(&self, parts: [&[u8]; 2]) -> std::io::Result<Vec<u8>> {
        let mut encrypted = Vec::with_capacity(parts[0].len() + parts[1].len() + 256);
        let mut tls = self.tls.lock();
        for part in parts {
            tls.writer().write_all(part)?;
        }
        while tls.wants_write() {
            tls.write_tls(&mut encrypted)?;
        }
        Ok(encrypted)
    }

    /// Sends what [`TlsStream::encrypt`] gave.
    pub(crate) fn write(&self, encrypted: &[u8]) -> std::io::Result<()> {
        (&mut &self.socket).write_all(encrypted)
    }

    /// Appends to `plain` what is there, else waits for something. Called by one thread only. Gives the
    /// bytes on the wire; `None` at the end.
    pub(crate) fn read(
        &self,
        buffer: &mut [u8],
        plain: &mut Vec<u8>,
    ) -> std::io::Result<Option<usize>> {
        // With the last bytes of the handshake more may have come.
        self.decrypt(&[], plain)?;
        if !plain.is_empty() {
            return Ok(Some(0));
        }
        loop {
            match (&mut &self.socket).read(buffer) {
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Ok(0) => return Ok(None),
                Ok(count) => {
                    self.decrypt(&buffer[..count], plain)?;
                    return Ok(Some(count));
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn decrypt(&self, mut encrypted: &[u8], plain: &mut Vec<u8>) -> std::io::Result<()> {
        let mut tls = self.tls.lock();
        loop {
            let state = tls.process_new_packets().map_err(std::io::Error::other)?;
            let begin = plain.len();
            plain.resize(begin + state.plaintext_bytes_to_read(), 0);
            tls.reader().read_exact(&mut plain[begin..])?;
            if encrypted.is_empty() {
                return Ok(());
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

/// Reads what a refused peer still sends, for a second at most: closing a socket with unread bytes
/// would take the refusal away from the peer.
pub(crate) fn drain(socket: &TcpStream) {
    let until = Instant::now() + Duration::from_secs(1);
    let mut rest = Deadline { socket, until }.take(64 << 10);
    // It may be gone already.
    let _ = socket.shutdown(Shutdown::Write);
    let _ = std::io::copy(&mut rest, &mut std::io::sink());
}

/// The error of a failed handshake.
fn refusal(error: std::io::Error) -> Error {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(_)) => {
            Error::new(ErrorKind::Forbidden, "it has another key than at the pairing").advise(
                "if it was set up again, remove the link at both sites and add it again; otherwise \
                 find out who answers at this address",
            )
        }
        Some(rustls::Error::AlertReceived(AlertDescription::AccessDenied)) => {
            Refusal::UnknownKey.error()
        }
        _ if matches!(error.kind(), IoKind::TimedOut | IoKind::WouldBlock) => {
            Error::new(ErrorKind::Io, "it did not answer in time").advise(NETWORK_ADVICE)
        }
        // rustls would name its manual.
        _ if error.kind() == IoKind::UnexpectedEof => {
            Error::new(ErrorKind::Io, "the other side ended the connection").advise(NETWORK_ADVICE)
        }
        _ => {
            Error::with_source(ErrorKind::Io, "the connection failed", error).advise(NETWORK_ADVICE)
        }
    }
}
