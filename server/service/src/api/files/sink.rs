//! The bytes of a download on their way to the client.

use std::io::{self, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::body::Bytes;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::Gone;

/// Size of a piece that is sent, in bytes.
const PIECE_BYTES: usize = 256 << 10;
/// A client that takes nothing for this long has gone: others wait for the machine.
const STALL_PATIENCE: Duration = Duration::from_secs(60);

/// Sends pieces to the client.
pub(super) struct Sink {
    pub(super) sender: mpsc::Sender<Bytes>,
    pub(super) handle: Handle,
    pub(super) pending: Vec<u8>,
    pub(super) gone: Gone,
}

impl Clone for Sink {
    fn clone(&self) -> Sink {
        let (sender, handle, gone) = (self.sender.clone(), self.handle.clone(), self.gone.clone());
        Sink { sender, handle, pending: Vec::new(), gone }
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= PIECE_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.gone.check().map_err(io::Error::other)?;
        let piece = Bytes::from(std::mem::take(&mut self.pending));
        let sent = self.sender.send(piece);
        let sent = self.handle.block_on(async { tokio::time::timeout(STALL_PATIENCE, sent).await });
        match sent {
            Ok(Ok(())) if self.gone.check().is_ok() => Ok(()),
            _ => {
                self.gone.set();
                Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client has gone"))
            }
        }
    }
}

/// The pieces of an answer. If they end before all is sent, the connection is cut: a part must not pass for
/// the whole.
pub(super) struct Pieces {
    pub(super) receiver: mpsc::Receiver<Bytes>,
    pub(super) is_whole: Arc<AtomicBool>,
    pub(super) is_cut: bool,
}

impl futures_core::Stream for Pieces {
    type Item = io::Result<Bytes>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<io::Result<Bytes>>> {
        match self.receiver.poll_recv(context) {
            Poll::Ready(None) if !self.is_cut && !self.is_whole.load(Ordering::SeqCst) => {
                self.is_cut = true;
                Poll::Ready(Some(Err(io::Error::other("the download broke off"))))
            }
            polled => polled.map(|piece| piece.map(Ok)),
        }
    }
}
