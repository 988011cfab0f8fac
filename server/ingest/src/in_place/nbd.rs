//! NBD exports that are read and written in place.

use std::sync::atomic::AtomicBool;

use coldrise_block::{Error, ErrorKind, Result};

use super::{Port, Target};
use crate::source::{NbdReader, NbdSource, Reader, Source, check_bitmap_name};
use crate::zeroing::write_zero_bytes;

/// An export.
pub(super) struct NbdTarget<'c> {
    source: NbdSource<'c>,
}

impl<'c> NbdTarget<'c> {
    /// Connects to a server that the user named.
    pub(super) fn open(
        uri: &str,
        bitmap: Option<&str>,
        writes: bool,
        cancel: &'c AtomicBool,
    ) -> Result<NbdTarget<'c>> {
        bitmap.map_or(Ok(()), check_bitmap_name)?;
        let source = NbdSource::open_uri(uri, bitmap, cancel).map_err(|e| e.context(uri))?;
        if writes && source.facts().is_read_only {
            let text = format!("{uri}: the export is read-only: serve it for writing");
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        Ok(NbdTarget { source })
    }
}

impl Target for NbdTarget<'_> {
    fn source(&self) -> &dyn Source {
        &self.source
    }

    fn port(&self) -> Result<Box<dyn Port + '_>> {
        Ok(Box::new(NbdPort { connection: self.source.connect()? }))
    }

    fn finish(&self) -> Result<()> {
        self.source.flush()
    }
}

struct NbdPort<'s, 'c> {
    connection: NbdReader<'s, 'c>,
}

impl NbdPort<'_, '_> {
    /// The length of a range in whole units of the server: only the disk's last block is shorter.
    fn whole(&self, length: usize) -> usize {
        length.next_multiple_of(self.connection.facts().minimum_block_bytes as usize)
    }
}

impl Port for NbdPort<'_, '_> {
    fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        let whole = self.whole(buffer.len());
        if whole == buffer.len() {
            return self.connection.read_at(buffer, offset_bytes);
        }
        let mut padded = vec![0; whole];
        self.connection.read_at(&mut padded, offset_bytes)?;
        buffer.copy_from_slice(&padded[..buffer.len()]);
        Ok(())
    }

    fn write_at(&mut self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let whole = self.whole(bytes.len());
        let mut padded = Vec::new();
        let bytes = if whole == bytes.len() {
            bytes
        } else {
            padded.extend_from_slice(bytes);
            padded.resize(whole, 0);
            &padded
        };
        self.connection.with_connection(offset_bytes, |c| c.write_at(bytes, offset_bytes))
    }

    fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let length_bytes =
            length_bytes.next_multiple_of(self.connection.facts().minimum_block_bytes);
        if self.connection.facts().can_zero {
            return self
                .connection
                .with_connection(offset_bytes, |c| c.write_zeroes(offset_bytes, length_bytes));
        }
        write_zero_bytes(offset_bytes, length_bytes, |bytes, at| {
            self.connection.with_connection(at, |c| c.write_at(bytes, at))
        })
    }
}
