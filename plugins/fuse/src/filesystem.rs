//! The kernel's requests, as fuser passes them on.

use crate::answer::Answer;
use crate::attributes::file_type;
use crate::requests::Stat;
use crate::served::Served;
use coldrise_export::{OpenFile, Removal};
use fuser::{
    BsdFileFlags, FileHandle, FileType, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    Request, TimeOrNow, WriteFlags,
};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// Largest read and write that the kernel sends, in bytes: the kernel's own
/// limit, unless an administrator changed it.
const REQUEST_BYTES: u32 = 1 << 20;
/// Background requests (such as read-ahead) that the kernel keeps in flight.
const BACKGROUND_REQUESTS: u16 = 64;
/// Unit of the sizes in statfs(2), in bytes.
const SPACE_UNIT_BYTES: u32 = 4096;
/// Longest name that statfs(2) reports, in bytes.
const NAME_BYTES: u32 = 255;
/// Inode numbers are never reused for another node.
const GENERATION: Generation = Generation(0);

thread_local! {
    /// The read buffer. It is kept, because allocating a large buffer costs more
    /// than filling it.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// fuser's side of a mount. Requests without a method here get ENOSYS, and the
/// kernel stops sending them: extended attributes are not supported, the kernel
/// handles locks itself, and it copies ranges by reading and writing.
pub(crate) struct Filesystem {
    served: Arc<Served>,
    on_end: Option<OnEnd>,
}

/// Called when the kernel stops sending requests.
pub(crate) type OnEnd = Box<dyn FnOnce() + Send + Sync>;

impl Filesystem {
    pub(crate) fn new(served: Arc<Served>, on_end: OnEnd) -> Filesystem {
        Filesystem { served, on_end: Some(on_end) }
    }
}

fn reply_empty(answer: Answer<()>, reply: ReplyEmpty) {
    match answer {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

fn reply_entry(answer: Answer<Stat>, reply: ReplyEntry) {
    match answer {
        Ok((attributes, validity)) => reply.entry(&validity, &attributes, GENERATION),
        Err(errno) => reply.error(errno),
    }
}

fn reply_attr(answer: Answer<Stat>, reply: ReplyAttr) {
    match answer {
        Ok((attributes, validity)) => reply.attr(&validity, &attributes),
        Err(errno) => reply.error(errno),
    }
}

impl fuser::Filesystem for Filesystem {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // The kernel may lower each value.
        let _ = config.set_max_write(REQUEST_BYTES);
        if let Err(most) = config.set_max_readahead(REQUEST_BYTES) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(BACKGROUND_REQUESTS);
        for capability in [InitFlags::FUSE_PARALLEL_DIROPS, InitFlags::FUSE_ASYNC_DIO] {
            let _ = config.add_capabilities(capability);
        }
        Ok(())
    }

    fn destroy(&mut self) {
        if let Some(on_end) = self.on_end.take() {
            on_end();
        }
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        reply_entry(self.served.look_up(parent, name), reply);
    }

    fn forget(&self, _request: &Request, inode: INodeNo, lookups: u64) {
        self.served.forget(inode, lookups);
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _file: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        reply_attr(self.served.stat(inode), reply);
    }

    /// Modes can change on files that programs created; owners never change.
    fn setattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        file: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let is_of_clients = self.served.is_of_clients(inode);
        if user.is_some() || group.is_some() || (mode.is_some() && !is_of_clients) {
            return reply.error(self.served.refuse(inode, "changing a mode or an owner"));
        }
        let modified = mtime.map(|time| match time {
            TimeOrNow::SpecificTime(time) => time,
            TimeOrNow::Now => SystemTime::now(),
        });
        if mode.is_some() || modified.is_some() {
            if let Err(errno) = self.served.set(inode, mode, modified) {
                return reply.error(errno);
            }
        }
        reply_attr(self.served.change(inode, file.map(|handle| handle.0), size), reply);
    }

    fn readlink(&self, _request: &Request, inode: INodeNo, reply: ReplyData) {
        match self.served.target(inode) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, _request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.served.open(inode, flags.acc_mode() != OpenAccMode::O_RDONLY) {
            Ok((handle, flags)) => reply.opened(FileHandle(handle), flags),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        file: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        BUFFER.with_borrow_mut(|buffer| {
            // The kernel never asks for more than the negotiated size.
            let size = size.min(REQUEST_BYTES) as usize;
            if buffer.len() < size {
                buffer.resize(size, 0);
            }
            let buffer = &mut buffer[..size];
            match self.served.on_file(file.0, |file| file.read(buffer, offset)) {
                Ok(length) => reply.data(&buffer[..length]),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn write(
        &self,
        _request: &Request,
        _inode: INodeNo,
        file: FileHandle,
        offset: u64,
        bytes: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // O_SYNC includes O_DSYNC; the kernel leaves both to the file system.
        let is_synced = flags.0 & libc::O_DSYNC != 0;
        match self.served.write(file.0, bytes, offset, is_synced) {
            // The length of a request fits 32 bits.
            Ok(()) => reply.written(bytes.len() as u32),
            Err(errno) => reply.error(errno),
        }
    }

    /// Called when a program closes the file: makes its writes durable and
    /// reports a failure.
    fn flush(
        &self,
        _request: &Request,
        _inode: INodeNo,
        file: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply_empty(self.served.on_file(file.0, OpenFile::flush_if_written), reply);
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        file: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply_empty(self.served.close(file.0), reply);
    }

    fn fsync(
        &self,
        _request: &Request,
        _inode: INodeNo,
        file: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        reply_empty(self.served.on_file(file.0, OpenFile::flush), reply);
    }

    fn opendir(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.served.open_listing(inode) {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        inode: INodeNo,
        listing: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let (folder, listing) = match self.served.listing(inode, listing.0, offset == 0) {
            Ok(found) => found,
            Err(errno) => return reply.error(errno),
        };
        let dots = [(folder.file_id(), "."), (folder.parent_id(), "..")];
        let dots = dots.into_iter().map(|(inode, name)| (inode, FileType::Directory, name));
        let entries = listing
            .iter()
            .map(|entry| (entry.file_id, file_type(entry.node_type), entry.name.as_str()));
        // The offset of an entry is that of its successor.
        let all = dots.chain(entries).zip(1..);
        for ((inode, kind, name), next) in all.skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
            if reply.add(INodeNo(inode), next, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        listing: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        reply_empty(self.served.close_listing(listing.0), reply);
    }

    fn statfs(&self, _request: &Request, _inode: INodeNo, reply: ReplyStatfs) {
        match self.served.space() {
            Ok(space) => {
                let units = |bytes: u64| bytes / u64::from(SPACE_UNIT_BYTES);
                reply.statfs(
                    units(space.total_bytes),
                    units(space.free_bytes),
                    units(space.available_bytes),
                    0,
                    0,
                    SPACE_UNIT_BYTES,
                    NAME_BYTES,
                    SPACE_UNIT_BYTES,
                );
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn fallocate(
        &self,
        _request: &Request,
        _inode: INodeNo,
        file: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        reply_empty(self.served.allocate(file.0, offset, length, mode), reply);
    }

    fn lseek(
        &self,
        _request: &Request,
        _inode: INodeNo,
        file: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        match self.served.seek(file.0, offset, whence) {
            Ok(at) => reply.offset(at),
            Err(errno) => reply.error(errno),
        }
    }

    fn mknod(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _device: u32,
        reply: ReplyEntry,
    ) {
        if mode & libc::S_IFMT != libc::S_IFREG {
            return reply.error(self.served.refuse(parent, "making a device"));
        }
        reply_entry(self.served.make(parent, name, mode & !umask, true), reply);
    }

    fn mkdir(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        reply_entry(self.served.make_folder(parent, name, mode & !umask), reply);
    }

    fn create(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        match self.served.make_and_open(parent, name, mode & !umask, flags) {
            Ok(((attributes, validity), handle, flags)) => {
                reply.created(&validity, &attributes, GENERATION, FileHandle(handle), flags);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn symlink(
        &self,
        _request: &Request,
        parent: INodeNo,
        _name: &OsStr,
        _target: &Path,
        reply: ReplyEntry,
    ) {
        reply.error(self.served.refuse(parent, "making a link"));
    }

    fn link(
        &self,
        _request: &Request,
        _inode: INodeNo,
        parent: INodeNo,
        _name: &OsStr,
        reply: ReplyEntry,
    ) {
        reply.error(self.served.refuse(parent, "making a link"));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(self.served.remove(parent, name, Removal::File), reply);
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(self.served.remove(parent, name, Removal::Folder), reply);
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply_empty(self.served.rename(parent, name, new_parent, new_name, flags), reply);
    }
}
