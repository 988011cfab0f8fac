//! Files that programs keep in a session's folder: create, rename and remove.

use crate::answer::{Answer, refused};
use crate::requests::Stat;
use crate::served::{Served, Tree};
use coldrise_block::{Error, ErrorKind};
use coldrise_export::{Creation, Node, Removal};
use fuser::{Errno, FopenFlags, INodeNo, RenameFlags};
use std::ffi::OsStr;
use std::time::SystemTime;

/// Attributes and open file of a new file.
pub(crate) type Created = (Stat, u64, FopenFlags);

impl Served {
    /// Creates a file. An existing file is returned, or is an error if `is_exclusive`.
    pub(crate) fn make(
        &self,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        is_exclusive: bool,
    ) -> Answer<Stat> {
        self.answer(|tree| tree.make(parent, name, mode, is_exclusive).map(|(_, stat)| stat))
    }

    /// Creates a file as `make` does, and opens it.
    pub(crate) fn make_and_open(
        &self,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> Answer<Created> {
        self.answer(|tree| {
            let (node, stat) = tree.make(parent, name, mode, flags & libc::O_EXCL != 0)?;
            let for_writing = flags & libc::O_ACCMODE != libc::O_RDONLY;
            let (handle, flags) = tree.open_handle(&node, for_writing)?;
            Ok((stat, handle, flags))
        })
    }

    pub(crate) fn make_folder(&self, parent: INodeNo, name: &OsStr, mode: u32) -> Answer<Stat> {
        self.answer(|tree| {
            let folder = tree.node(parent)?;
            let made = tree.folders.make_folder(&folder, text(name)?, mode & 0o7777);
            tree.known(made.map_err(|error| denied(&folder, &error))?).map(|(_, stat)| stat)
        })
    }

    pub(crate) fn remove(&self, parent: INodeNo, name: &OsStr, what: Removal) -> Answer<()> {
        self.answer(|tree| {
            let folder = tree.node(parent)?;
            let removed = tree.folders.remove(&folder, text(name)?, what);
            removed.map_err(|error| denied(&folder, &error))
        })
    }

    pub(crate) fn rename(
        &self,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Answer<()> {
        self.answer(|tree| {
            let (from, to) = (tree.node(parent)?, tree.node(new_parent)?);
            let (name, new_name) = (text(name)?, text(new_name)?);
            if flags == RenameFlags::RENAME_NOREPLACE {
                // Another client may take the name between this check and the rename,
                // as on other file systems of several hosts.
                if tree.folders.find(&to, new_name).is_ok() {
                    return Err(Errno::EEXIST);
                }
            } else if !flags.is_empty() {
                return Err(Errno::EINVAL);
            }
            tree.folders.rename(&from, name, &to, new_name).map_err(|error| match error.kind() {
                ErrorKind::Unsupported => Errno::EXDEV,
                _ => denied(&from, &error),
            })
        })
    }

    /// Sets permissions and the modification time.
    pub(crate) fn set(
        &self,
        inode: INodeNo,
        mode: Option<u32>,
        modified: Option<SystemTime>,
    ) -> Answer<()> {
        self.answer(|tree| {
            let node = tree.node(inode)?;
            if !node.is_of_clients() {
                // Times are those of the session's writes. Setting them succeeds
                // without effect, because copy programs fail otherwise.
                return Ok(());
            }
            let set = tree.folders.set(&node, mode.map(|mode| mode & 0o7777), modified);
            set.map_err(|error| denied(&node, &error))
        })
    }

    /// Whether a program created the file; false for the session's own files.
    pub(crate) fn is_of_clients(&self, inode: INodeNo) -> bool {
        self.answer(|tree| Ok(tree.node(inode)?.is_of_clients())).unwrap_or(false)
    }
}

impl Tree {
    fn make(
        &self,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        is_exclusive: bool,
    ) -> Answer<(Node, Stat)> {
        let folder = self.node(parent)?;
        let how = if is_exclusive { Creation::Guarded } else { Creation::Unchecked };
        let made = self.folders.create(&folder, text(name)?, how, mode & 0o7777);
        self.known(made.map_err(|error| denied(&folder, &error))?)
    }

    /// Counts the look-up that the kernel derives from this answer.
    pub(crate) fn known(&self, node: Node) -> Answer<(Node, Stat)> {
        let stat = self.stat(&node)?;
        if !self.nodes.look_up(node.clone()) {
            let text = "another open file has the same inode number";
            return Err(refused(node.path(), &Error::new(ErrorKind::Internal, text)));
        }
        Ok((node, stat))
    }
}

fn text(name: &OsStr) -> Answer<&str> {
    // All names are valid UTF-8, so no file has this name.
    name.to_str().ok_or(Errno::EINVAL)
}

/// The errno for a refused change: EPERM among a session's own files, EROFS in a
/// point.
fn denied(node: &Node, error: &Error) -> Errno {
    let errno = refused(node.path(), error);
    match error.kind() {
        ErrorKind::ReadOnly if node.is_live() => Errno::EPERM,
        _ => errno,
    }
}
