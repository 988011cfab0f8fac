//! Making, removing and renaming what clients keep in sessions. All of it is durable on return,
//! and keeps the session open for a while.

use crate::node::{named, Named};
use crate::OpenNode;
use coldrise_block::Result;
use coldrise_export::{Creation, NodeType, Removal};
use std::sync::Arc;
use std::time::SystemTime;

const PERMISSIONS: u32 = 0o7777;

impl OpenNode {
    /// A folder that is about to change: it keeps its session open for a while.
    fn begin_change(self: &Arc<Self>) -> Result<()> {
        self.check_folder()?;
        if self.node.takes_files() {
            self.file(true)?;
        }
        Ok(())
    }

    /// Makes an empty file, or finds the one that is there. Errors as of
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

    /// Removes a file, whoever has it open, or an empty folder.
    pub fn remove(self: &Arc<Self>, name: &str) -> Result<Named<()>> {
        self.begin_change()?;
        named(self.shared.folders.remove(&self.node, name, Removal::Any))
    }

    /// Gives a file or folder another name; a file or empty folder that had it goes, at the same
    /// moment. `ErrorKind::Unsupported` between sessions.
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

    /// Sets permissions, which are told to clients and not enforced, and the time of the last
    /// change. Of other files than clients' it is accepted and forgotten: programs that copy
    /// insist.
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
