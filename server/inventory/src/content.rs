//! The bytes of a disk, in any format.

use std::sync::Arc;

use coldrise_block::Result;
use coldrise_export::{Export, ExportTree};

/// A disk or an image file, open for reading. Its data stays until it is dropped, even if the point
/// is forgotten or the session ends meanwhile. All calls may come from many threads.
pub struct Content {
    // Dropped before the tree, whose lease it uses.
    export: Export,
    _tree: Arc<ExportTree>,
}

impl Content {
    pub(crate) fn open(tree: Arc<ExportTree>, address: &str) -> Result<Content> {
        Ok(Content { export: tree.open(address, true)?, _tree: tree })
    }

    /// The exact address: `latest` is resolved.
    pub fn address(&self) -> &str {
        self.export.name()
    }

    /// Its size, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.export.disk().size_bytes()
    }

    /// Fills `buffer` from `offset_bytes` on.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `Corrupt` for damage; errors of the operating system.
    pub fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        self.export.check()?;
        self.export.disk().read_at(buffer, offset_bytes)
    }
}
