//! Lists and reads files of an opened device. Nothing outside of it is reached: paths are resolved
//! with its root as `/`, and links are followed only on the way to the path that was asked for.

use std::ffi::CStr;
use std::fs::File;
use std::io::{Error, Read};
use std::os::fd::OwnedFd;

use coldrise_files_protocol::{
    Answer, CONTENT_BYTES, Entry, EntryKind, Failure, MAX_DEPTH, MAX_PATH_BYTES,
};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2,
    readlinkat, statat,
};

use crate::devices::Opened;
use crate::port::Port;
use crate::{Refusal, abandoned, text};

type Done = Result<(), Refusal>;

/// Tells the path, and what a folder holds.
pub(crate) fn list(port: &mut Port, opened: &Opened, path: &[u8]) -> Done {
    let (top, entry) = find(opened, path)?;
    send(port, Answer::Entry(entry.clone()))?;
    if entry.kind != EntryKind::Folder {
        return Ok(());
    }
    for name in names(port, &top, b"")? {
        match look(&top, &name) {
            Ok(entry) => send(port, Answer::Entry(entry))?,
            Err(error) => unread(port, &name, &error)?,
        }
    }
    Ok(())
}

/// Tells the path and everything below it.
pub(crate) fn walk(port: &mut Port, opened: &Opened, path: &[u8], is_read: bool) -> Done {
    let (top, entry) = find(opened, path)?;
    let kind = entry.kind;
    send(port, Answer::Entry(entry.clone()))?;
    match kind {
        EntryKind::Folder => walk_folder(port, &top, b"", 0, is_read),
        EntryKind::File if is_read => content(port, top, &entry),
        _ => Ok(()),
    }
}

/// Opens the path: a folder or a file for reading, anything else as a mere place.
fn find(opened: &Opened, path: &[u8]) -> Result<(OwnedFd, Entry), Refusal> {
    let root = openat(CWD, &opened.root, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    let open = |flags| openat2(&root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve);
    let place = open(OFlags::PATH)?;
    let stat = fstat(&place)?;
    let entry = entry(&stat, Vec::new(), Vec::new());
    match entry.kind {
        EntryKind::Folder => Ok((open(OFlags::RDONLY | OFlags::DIRECTORY)?, entry)),
        EntryKind::File => Ok((open(OFlags::RDONLY | OFlags::NONBLOCK)?, entry)),
        _ => Ok((place, entry)),
    }
}

fn walk_folder(
    port: &mut Port,
    folder: &OwnedFd,
    above: &[u8],
    depth: usize,
    is_read: bool,
) -> Done {
    for name in names(port, folder, above)? {
        let mut path = above.to_vec();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&name);
        if path.len() > MAX_PATH_BYTES || depth > MAX_DEPTH {
            return Err(Refusal(
                Failure::Unreadable,
                "the folders are nested too deeply".to_owned(),
            ));
        }
        let entry = match look(folder, &name) {
            Ok(entry) => Entry { path, ..entry },
            Err(error) => {
                unread(port, &path, &error)?;
                continue;
            }
        };
        send(port, Answer::Entry(entry.clone()))?;
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let open = |more| openat(folder, name.as_slice(), flags | more, Mode::empty());
        match entry.kind {
            EntryKind::Folder => match open(OFlags::DIRECTORY) {
                Ok(below) => walk_folder(port, &below, &entry.path, depth + 1, is_read)?,
                Err(error) => unread(port, &entry.path, &error.into())?,
            },
            EntryKind::File if is_read => match open(OFlags::RDONLY) {
                Ok(file) => content(port, file, &entry)?,
                Err(error) => unread(port, &entry.path, &error.into())?,
            },
            _ => {}
        }
    }
    Ok(())
}

/// Sends as much content as the entry promises, at most.
fn content(port: &mut Port, file: OwnedFd, entry: &Entry) -> Done {
    let mut file = File::from(file).take(entry.size_bytes);
    let mut piece = vec![0; CONTENT_BYTES];
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                send(port, Answer::Content(piece.get(..count).unwrap_or_default().to_vec()))?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return unread(port, &entry.path, &error),
        }
    }
}

/// The names in a folder, sorted.
fn names(port: &mut Port, folder: &OwnedFd, path: &[u8]) -> Result<Vec<Vec<u8>>, Refusal> {
    let mut names = Vec::new();
    let listed = Dir::read_from(folder).and_then(|mut entries| {
        entries.try_for_each(|entry| {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
            Ok(())
        })
    });
    if let Err(error) = listed {
        unread(port, path, &error.into())?;
    }
    names.sort_unstable();
    Ok(names)
}

fn look(folder: &OwnedFd, name: &[u8]) -> Result<Entry, Error> {
    let stat = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let target = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => {
            let target = readlinkat(folder, name, Vec::new())?;
            CStr::to_bytes(&target).to_vec()
        }
        _ => Vec::new(),
    };
    Ok(entry(&stat, name.to_vec(), target))
}

fn entry(stat: &Stat, path: Vec<u8>, target: Vec<u8>) -> Entry {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => EntryKind::File,
        FileType::Directory => EntryKind::Folder,
        FileType::Symlink => EntryKind::Link,
        _ => EntryKind::Special,
    };
    let size = if kind == EntryKind::File { stat.st_size } else { 0 };
    Entry {
        path,
        kind,
        mode: stat.st_mode & 0o7777,
        owner: stat.st_uid,
        group: stat.st_gid,
        size_bytes: u64::try_from(size).unwrap_or_default(),
        modified_s: stat.st_mtime,
        modified_ns: u32::try_from(stat.st_mtime_nsec).unwrap_or_default(),
        target,
    }
}

fn send(port: &mut Port, answer: Answer) -> Done {
    port.send(&answer).map_err(|_| abandoned())
}

fn unread(port: &mut Port, path: &[u8], error: &Error) -> Done {
    let path = String::from_utf8_lossy(path);
    send(port, Answer::Unread(format!("/{path}: {}", text(error))))
}
