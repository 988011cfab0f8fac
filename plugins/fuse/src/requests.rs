//! Carries out each request: calls on the tree, and an errno if they fail.

use crate::answer::{Answer, not_here, on_open_file, refused};
use crate::attributes::{stat, validity};
use crate::handles::Listing;
use crate::served::{Served, Tree};
use coldrise_block::ErrorKind;
use coldrise_export::{Node, OpenFile, Space};
use fuser::{Errno, FileAttr, FopenFlags, INodeNo};
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;

/// Attributes, and how long the kernel may cache them.
pub(crate) type Stat = (FileAttr, Duration);

impl Served {
    pub(crate) fn look_up(&self, parent: INodeNo, name: &OsStr) -> Answer<Stat> {
        self.answer(|tree| {
            let folder = tree.node(parent)?;
            let name = name.to_str().ok_or(Errno::ENOENT)?;
            let node = tree.folders.find(&folder, name);
            let node = node.map_err(|error| refused(folder.path(), &error))?;
            tree.known(node).map(|(_, stat)| stat)
        })
    }

    pub(crate) fn forget(&self, inode: INodeNo, lookups: u64) {
        let _ = self.answer(|tree| {
            tree.nodes.forget(inode.0, lookups);
            Ok(())
        });
    }

    pub(crate) fn stat(&self, inode: INodeNo) -> Answer<Stat> {
        self.answer(|tree| tree.stat(&tree.node(inode)?))
    }

    /// Changes a file's size, through a handle if there is one.
    pub(crate) fn change(
        &self,
        inode: INodeNo,
        handle: Option<u64>,
        size: Option<u64>,
    ) -> Answer<Stat> {
        self.answer(|tree| {
            let node = tree.node(inode)?;
            if !node.is_live() {
                return Err(Errno::EROFS);
            }
            if let Some(size) = size {
                let file = match handle {
                    Some(handle) => tree.file(handle)?,
                    None => tree.open(&node, true)?,
                };
                on_open_file(&file, |file| {
                    file.set_size_bytes(size)?;
                    // This file is open only for this call, so no later call would
                    // flush it.
                    handle.map_or_else(|| file.flush_if_written(), |_| Ok(()))
                })?;
            }
            tree.stat(&node)
        })
    }

    pub(crate) fn target(&self, inode: INodeNo) -> Answer<String> {
        self.answer(|tree| {
            let link = tree.node(inode)?;
            tree.folders.target(&link).map_err(|error| refused(link.path(), &error))
        })
    }

    /// The kernel caches data of a point, which never changes. It caches no data of
    /// a session: the same disk is written through NBD and through the session's
    /// other files, and this file's cache would miss those writes. See
    /// [`crate::cached_writers`] for the exception.
    pub(crate) fn open(&self, inode: INodeNo, for_writing: bool) -> Answer<(u64, FopenFlags)> {
        self.answer(|tree| {
            let node = tree.node(inode)?;
            tree.open_handle(&node, for_writing)
        })
    }

    pub(crate) fn close(&self, handle: u64) -> Answer<()> {
        self.answer(|tree| {
            let file = tree.files.remove(handle).ok_or(Errno::EBADF)?;
            let flushed = on_open_file(&file, OpenFile::flush_if_written);
            // The session is given back before its disk can be opened through another file.
            drop(file);
            if let Some(cached) = &tree.cached {
                cached.closed(handle);
            }
            flushed
        })
    }

    pub(crate) fn write(
        &self,
        handle: u64,
        bytes: &[u8],
        offset: u64,
        is_synced: bool,
    ) -> Answer<()> {
        self.on_file(handle, |file| match file.write(bytes, offset) {
            // EFBIG: the file cannot become so large, as on other file systems.
            Err(error) if error.kind() == ErrorKind::OutOfRange => Ok(Err(Errno::EFBIG)),
            Ok(()) if is_synced => file.flush().map(Ok),
            written => written.map(Ok),
        })?
    }

    /// Punching a hole and zeroing a range are the same operation. Reserving space
    /// does nothing, because the whole disk is writable while there is space.
    pub(crate) fn allocate(&self, handle: u64, offset: u64, length: u64, mode: i32) -> Answer<()> {
        self.answer(|tree| {
            let file = tree.file(handle)?;
            let end = offset.checked_add(length).ok_or(Errno::EFBIG)?;
            let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
            let is_possible = keeps_size || end <= file.size_bytes();
            match mode & !libc::FALLOC_FL_KEEP_SIZE {
                0 if is_possible => Ok(()),
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE if is_possible => {
                    on_open_file(&file, |file| file.punch_hole(offset, length))
                }
                0 | libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE => Err(Errno::EFBIG),
                _ => Err(Errno::EOPNOTSUPP),
            }
        })
    }

    /// SEEK_DATA and SEEK_HOLE; the kernel handles the other modes of lseek(2).
    pub(crate) fn seek(&self, handle: u64, offset: i64, whence: i32) -> Answer<i64> {
        self.answer(|tree| {
            let file = tree.file(handle)?;
            let from = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
            if from >= file.size_bytes() {
                return Err(Errno::ENXIO);
            }
            let found = match whence {
                libc::SEEK_DATA => on_open_file(&file, |file| file.next_stored(from))?,
                libc::SEEK_HOLE => Some(on_open_file(&file, |file| file.next_hole(from))?),
                _ => return Err(Errno::EINVAL),
            };
            found.and_then(|at| i64::try_from(at).ok()).ok_or(Errno::ENXIO)
        })
    }

    /// A listing is made when it is read from its start, and again after a rewind.
    pub(crate) fn open_listing(&self, inode: INodeNo) -> Answer<u64> {
        self.answer(|tree| {
            tree.node(inode)?;
            Ok(tree.listings.add(Listing::default()))
        })
    }

    /// The folder and its entries.
    pub(crate) fn listing(
        &self,
        inode: INodeNo,
        handle: u64,
        is_start: bool,
    ) -> Answer<(Node, Listing)> {
        self.answer(|tree| {
            let folder = tree.node(inode)?;
            let begun = tree.listings.get(handle).ok_or(Errno::EBADF)?;
            if !is_start {
                return Ok((folder, begun));
            }
            let entries = tree.folders.entries(&folder);
            let entries = entries.map_err(|error| refused(folder.path(), &error))?;
            let listing = Arc::new(entries);
            tree.listings.replace(handle, Arc::clone(&listing));
            Ok((folder, listing))
        })
    }

    pub(crate) fn close_listing(&self, handle: u64) -> Answer<()> {
        self.answer(|tree| {
            tree.listings.remove(handle);
            Ok(())
        })
    }

    pub(crate) fn space(&self) -> Answer<Space> {
        self.answer(|tree| tree.folders.space().map_err(|error| refused("free space", &error)))
    }

    /// Refuses a request that a name or a file never allows.
    pub(crate) fn refuse(&self, inode: INodeNo, what: &str) -> Errno {
        let answered = self.answer(|tree| Err::<(), _>(not_here(&tree.node(inode)?, what)));
        answered.err().unwrap_or(Errno::EROFS)
    }
}

impl Tree {
    pub(crate) fn open_handle(&self, node: &Node, for_writing: bool) -> Answer<(u64, FopenFlags)> {
        if !node.is_live() {
            let file = self.open(node, for_writing)?;
            return Ok((self.files.add(file), FopenFlags::FOPEN_KEEP_CACHE));
        }
        let cached = self.cached.as_ref().filter(|_| for_writing && !node.is_of_clients());
        if let Some(cached) = cached {
            return cached.open(node, || Ok(self.files.add(self.open(node, true)?)));
        }
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        Ok((self.files.add(self.open(node, for_writing)?), flags))
    }

    pub(crate) fn node(&self, inode: INodeNo) -> Answer<Node> {
        self.nodes.get(inode.0).ok_or(Errno::ESTALE)
    }

    fn file(&self, handle: u64) -> Answer<Arc<OpenFile>> {
        self.files.get(handle).ok_or(Errno::EBADF)
    }

    pub(crate) fn stat(&self, node: &Node) -> Answer<Stat> {
        let attributes = self.folders.attributes(node);
        let attributes = attributes.map_err(|error| refused(node.path(), &error))?;
        Ok((stat(node, &attributes, self.owner), validity(node)))
    }

    /// Opens a file. Opening a session's own read-only files for writing is a
    /// permission error (EACCES); in a point it is EROFS.
    fn open(&self, node: &Node, for_writing: bool) -> Answer<Arc<OpenFile>> {
        self.folders.open(node, for_writing).map_err(|error| {
            let errno = refused(node.path(), &error);
            match error.kind() {
                ErrorKind::ReadOnly if node.is_live() => Errno::EACCES,
                _ => errno,
            }
        })
    }
}
