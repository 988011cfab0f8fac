//! Makes, removes and renames client files in sessions. Every call is durable on return,
//! and keeps the session open for a while.

use crate::OpenNode;
use crate::node::{Named, named};
use coldrise_block::Result;
use coldrise_export::{Creation, NodeType, Removal};
use std::sync::Arc;
use std::time::SystemTime;

const PERMISSIONS: u32 = 0o7777;

impl OpenNode {
    /// A folder that is about to change: keeps its session open for a while.
    fn begin_change(self: &Arc<Self>) -> Result<()> {
        self.check_folder()?;
        if self.node.takes_files() {
            self.file(true)?;
        }
        Ok(())
    }

    /// Makes an empty file, or returns the existing one. Errors as of
    /// [`Folders::create`](coldrise_export::Folders::create).
    pub fn create(self: &Arc<Self>, name: &str, how: Creation, mode: u32) -> Result<Arc<OpenNode>> {
        self.begin_change()?;
        let made = self.shared.folders.create(&self.node, name, how, mode & PERMISSIONS)?;
        Ok(self.child(made))
    }

    /// Makes a folder. Errors as of [`OpenNode::create`], guarded.
    pub fn make_folder(self: &Arc<Self>, name: &str, mode: u32) -> Result<Arc<OpenNode>> {
        self.begin_change()?;
        let made = self.shared.folders.make_folder(&self.node, name, mode & PERMISSIONS)?;
        Ok(self.child(made))
    }

    /// Removes a file, even if it is open, or an empty folder.
    pub fn remove(self: &Arc<Self>, name: &str) -> Result<Named<()>> {
        self.begin_change()?;
        named(self.shared.folders.remove(&self.node, name, Removal::Any))
    }

    /// Renames a file or folder, and atomically replaces a file or empty folder of the new
    /// name. `ErrorKind::Unsupported` between sessions.
    pub fn rename(
        self: &Arc<Self>,
        name: &str,
        to: &OpenNode,
        new_name: &str,
    ) -> Result<Named<()>> {
        self.begin_change()?;
        to.check()?;
        named(self.shared.folders.rename(&self.node, name, &to.node, new_name))
    }

    /// Sets the modification time and the permissions; permissions are shown to clients and
    /// not enforced. On other files than clients' it succeeds without effect: copy programs
    /// fail otherwise.
    pub fn change(self: &Arc<Self>, mode: Option<u32>, modified: Option<SystemTime>) -> Result<()> {
        self.check()?;
        if !self.node.is_of_clients() {
            return Ok(());
        }
        if self.node_type() == NodeType::File {
            self.file(true)?;
        }
        let mode = mode.map(|mode| mode & PERMISSIONS);
        let changed = self.shared.folders.set(&self.node, mode, modified);
        self.has_changed();
        changed
    }
}
