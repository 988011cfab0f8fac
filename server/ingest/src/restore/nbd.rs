//! NBD exports as targets.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use coldrise_block::{Context, Error, ErrorKind, Result};

use super::{Sink, SinkWriter};
use crate::libnbd::{Connection, Endpoint};

/// Connections that write, if the server supports several per export.
const WRITERS: usize = 2;
/// Bytes of one write of zeroes, if the server cannot zero.
const ZERO_WRITE_BYTES: u64 = 1 << 20;

/// An export that is being written.
pub(super) struct NbdSink<'c> {
    /// The connection for flushes, and for writes if the server supports only one.
    control: Mutex<Connection<'c>>,
    endpoint: Endpoint,
    name: String,
    alignment_bytes: u64,
    can_zero: bool,
    can_flush: bool,
    is_shared: bool,
    cancel: &'c AtomicBool,
}

impl<'c> NbdSink<'c> {
    /// Connects to a server that the user named.
    pub(super) fn open_uri(
        uri: &str,
        size_bytes: u64,
        cancel: &'c AtomicBool,
    ) -> Result<NbdSink<'c>> {
        NbdSink::open(Endpoint::Uri(uri.to_string()), uri, size_bytes, cancel)
            .context(|| uri.to_string())
    }

    fn open(
        endpoint: Endpoint,
        name: &str,
        size_bytes: u64,
        cancel: &'c AtomicBool,
    ) -> Result<NbdSink<'c>> {
        let control = Connection::open(&endpoint, &[], cancel)?;
        let facts = *control.facts();
        if facts.is_read_only {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                "the export is read-only: serve it for writing",
            ));
        }
        let needed = size_bytes.next_multiple_of(facts.minimum_block_bytes);
        if facts.size_bytes < needed {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("the export has {} bytes, the disk needs {needed}", facts.size_bytes),
            ));
        }
        Ok(NbdSink {
            control: Mutex::new(control),
            endpoint,
            name: name.to_string(),
            alignment_bytes: facts.minimum_block_bytes,
            can_zero: facts.can_zero,
            can_flush: facts.can_flush,
            is_shared: facts.can_multi_conn,
            cancel,
        })
    }

    /// A thread that panicked with the connection left it closed or intact.
    fn control(&self) -> MutexGuard<'_, Connection<'c>> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sink for NbdSink<'_> {
    fn needs_zeroes(&self) -> bool {
        true
    }

    fn alignment_bytes(&self) -> u64 {
        self.alignment_bytes
    }

    fn useful_writers(&self) -> usize {
        // With one connection a second thread still reads while the first one
        // writes.
        WRITERS
    }

    fn writer(&self) -> Result<Box<dyn SinkWriter + '_>> {
        let connection = if self.is_shared {
            let opened = Connection::open(&self.endpoint, &[], self.cancel);
            Some(opened.context(|| self.name.clone())?)
        } else {
            None
        };
        Ok(Box::new(NbdWriter { sink: self, connection, zeroes: Vec::new() }))
    }

    fn finish(&self) -> Result<()> {
        // Either the server announced that a flush covers the writes of all
        // connections, or this was the only connection.
        if self.can_flush {
            self.control().flush().context(|| self.name.clone())?;
        }
        Ok(())
    }
}

struct NbdWriter<'s, 'c> {
    sink: &'s NbdSink<'c>,
    /// `None`: writes through the sink's own connection.
    connection: Option<Connection<'c>>,
    zeroes: Vec<u8>,
}

impl<'c> NbdWriter<'_, 'c> {
    fn with_connection<T>(
        &mut self,
        offset_bytes: u64,
        call: impl FnOnce(&mut Connection<'c>) -> Result<T>,
    ) -> Result<T> {
        match &mut self.connection {
            Some(connection) => call(connection),
            None => call(&mut self.sink.control()),
        }
        .context(|| format!("{} at offset {offset_bytes}", self.sink.name))
    }
}

impl SinkWriter for NbdWriter<'_, '_> {
    fn write_at(&mut self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let unit = self.sink.alignment_bytes as usize;
        let whole = bytes.len() - bytes.len() % unit;
        let (body, tail) = bytes.split_at(whole);
        if !body.is_empty() {
            self.with_connection(offset_bytes, |connection| {
                connection.write_at(body, offset_bytes)
            })?;
        }
        if tail.is_empty() {
            return Ok(());
        }
        // Only the last block of the disk can be shorter than the server's unit.
        let mut padded = vec![0; unit];
        padded[..tail.len()].copy_from_slice(tail);
        let offset = offset_bytes + whole as u64;
        self.with_connection(offset, |connection| connection.write_at(&padded, offset))
    }

    fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let length_bytes = length_bytes.next_multiple_of(self.sink.alignment_bytes);
        if self.sink.can_zero {
            return self.with_connection(offset_bytes, |connection| {
                connection.write_zeroes(offset_bytes, length_bytes)
            });
        }
        let mut zeroes = std::mem::take(&mut self.zeroes);
        zeroes.resize(ZERO_WRITE_BYTES as usize, 0);
        let end = offset_bytes + length_bytes;
        let mut at = offset_bytes;
        while at < end {
            let length = ZERO_WRITE_BYTES.min(end - at);
            let piece = &zeroes[..length as usize];
            self.with_connection(at, |connection| connection.write_at(piece, at))?;
            at += length;
        }
        self.zeroes = zeroes;
        Ok(())
    }
}
