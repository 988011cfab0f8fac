//! The open files of one node.

use coldrise_block::Result;
use coldrise_export::OpenFile;
use std::sync::Arc;

/// Files of a node, and the number of their opens.
#[derive(Default)]
pub(crate) struct HeldFiles {
    reader: Option<Arc<OpenFile>>,
    writer: Option<Arc<OpenFile>>,
    /// The number of opens for reading and for writing.
    pub(crate) readers: u32,
    pub(crate) writers: u32,
}

impl HeldFiles {
    /// A usable file: one opened for writing also reads.
    pub(crate) fn get(&self, for_writing: bool) -> Option<Arc<OpenFile>> {
        match (&self.writer, &self.reader) {
            (Some(writer), _) => Some(Arc::clone(writer)),
            (None, Some(reader)) if !for_writing => Some(Arc::clone(reader)),
            _ => None,
        }
    }

    pub(crate) fn put(&mut self, file: &Arc<OpenFile>, for_writing: bool) {
        if for_writing {
            self.writer = Some(Arc::clone(file));
            self.reader = None;
        } else {
            self.reader = Some(Arc::clone(file));
        }
    }

    pub(crate) fn is_held_for_writing(&self) -> bool {
        self.writer.is_some()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.reader.is_none() && self.writer.is_none() && self.readers == 0 && self.writers == 0
    }

    /// Drops everything if there is no open. Flushes first; if that fails the file stays,
    /// so that the next flush fails, too.
    pub(crate) fn close_unopened(&mut self) -> Result<()> {
        if self.readers == 0 && self.writers == 0 {
            if let Some(writer) = &self.writer {
                writer.flush_if_written()?;
            }
            self.clear();
        }
        Ok(())
    }

    /// Drops everything.
    pub(crate) fn clear(&mut self) {
        self.reader = None;
        self.writer = None;
    }

    /// Stops the open files permanently, after a defect.
    pub(crate) fn poison(&self) {
        for file in self.reader.iter().chain(&self.writer) {
            file.poison();
        }
    }
}
