//! The tasks, done on this host.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use coldrise_block::{
    read_at_most, remove_abandoned_folders_in, Context, Error, ErrorKind, Result, ScratchFolder,
};
use rustix::fs::OFlags;

use crate::channel::Channel;
use crate::files;
use crate::freezes::Freezes;
use crate::messages::{Answer, Facts, Request, PROTOCOL_VERSION};
use crate::scratch::{default_scratch, free_bytes, Space};
use crate::virsh;

/// Maximum size of a file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// How long a task waits for the end of a program.
const MAX_PATIENCE: Duration = Duration::from_secs(60);
/// Groups that decide what a user may do with machines.
const GROUPS: [&str; 5] = ["libvirt", "kvm", "libvirt-qemu", "qemu", "tss"];

/// This host. Dropping it removes the folders that were made through it.
#[derive(Default)]
pub struct HostTasks {
    spaces: Mutex<HashMap<PathBuf, Arc<Space>>>,
    freezes: Freezes,
}

impl HostTasks {
    /// Thaws the guests that were frozen, ends the programs and removes the folders. For the end of a connection.
    pub fn end(&self) {
        self.freezes.thaw_all();
        let spaces = std::mem::take(&mut *self.spaces());
        spaces.values().for_each(|space| space.stop_programs());
    }

    fn spaces(&self) -> MutexGuard<'_, HashMap<PathBuf, Arc<Space>>> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with a folder that was made through this connection: no other one is touched.
    fn with_space<T>(&self, path: &Path, act: impl FnOnce(&Space) -> Result<T>) -> Result<T> {
        let space = self.spaces().get(path).cloned();
        let space = space.ok_or_else(|| {
            let text = format!("{} is not a folder of this backup", path.display());
            Error::new(ErrorKind::InvalidInput, text)
        })?;
        act(&space)
    }
}

impl Channel for HostTasks {
    fn call(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Facts => facts().map(Answer::Facts),
            Request::Virsh { uri, words, input, patience_ms } => {
                self.freezes.before(&uri, &words);
                let patience = Duration::from_millis(patience_ms);
                virsh::run(&uri, &words, input.as_deref(), patience).map(Answer::Text)
            }
            Request::MakeSpace { parent, group } => {
                let space = Space::new(&parent.unwrap_or_else(default_scratch), group)?;
                let folder = space.folder().to_owned();
                self.spaces().insert(folder.clone(), Arc::new(space));
                Ok(Answer::Path(folder))
            }
            Request::AddImage { space, name, size_bytes, cluster_bytes, bitmap } => {
                let add =
                    |space: &Space| space.add(&name, size_bytes, cluster_bytes, bitmap.as_deref());
                self.with_space(&space, add).map(|()| Answer::Done)
            }
            Request::WriteDocument { space, name, text } => {
                self.with_space(&space, |space| space.write(&name, &text)).map(|()| Answer::Done)
            }
            Request::RawOfQcow2 { space, image, max_bytes } => {
                let invalid = |_| Error::new(ErrorKind::InvalidInput, "the image is not base64");
                let image = STANDARD.decode(image).map_err(invalid)?;
                let max_bytes = max_bytes.min(MAX_FILE_BYTES);
                let raw = self.with_space(&space, |space| space.raw_of_qcow2(&image, max_bytes))?;
                Ok(Answer::Content(STANDARD.encode(raw)))
            }
            Request::RemoveSpace { space } => {
                let removed = self.spaces().remove(&space);
                removed.inspect(|space| space.stop_programs());
                Ok(Answer::Done)
            }
            Request::StartProgram { space, start } => {
                self.with_space(&space, |space| space.start(&start)).map(Answer::Number)
            }
            Request::ProgramState { space, number, patience_ms } => {
                let program = self.with_space(&space, |space| space.program(number))?;
                let patience = Duration::from_millis(patience_ms).min(MAX_PATIENCE);
                Ok(Answer::Program(program.state(patience)))
            }
            Request::StopProgram { space, number } => {
                self.with_space(&space, |space| space.stop(number)).map(|()| Answer::Done)
            }
            Request::IsInUse { space } => Ok(Answer::Flag(ScratchFolder::is_in_use(&space))),
            Request::RemoveAbandoned { parent } => {
                remove_abandoned_folders_in(&parent.unwrap_or_else(default_scratch));
                Ok(Answer::Done)
            }
            Request::LookAtFile { path } => files::look_at(&path).map(Answer::File),
            Request::Claim { space, name } => {
                self.with_space(&space, |space| space.claim(&name)).map(|()| Answer::Done)
            }
            Request::WatchFiles { space, paths } => {
                self.with_space(&space, |space| space.watch(&paths)).map(|()| Answer::Done)
            }
            Request::FilesState { space } => {
                self.with_space(&space, |space| space.files_state()).map(Answer::Files)
            }
            Request::ReadFile { path, max_bytes } => {
                let bytes = read_file(&path, max_bytes.min(MAX_FILE_BYTES))?;
                Ok(Answer::Content(STANDARD.encode(bytes)))
            }
        }
    }

    fn reach(&self, socket: &Path) -> Result<PathBuf> {
        Ok(socket.to_owned())
    }

    fn name(&self) -> Option<&str> {
        None
    }
}

fn facts() -> Result<Facts> {
    let scratch = default_scratch();
    let own = rustix::process::getgroups().unwrap_or_default();
    let own: Vec<u32> = own.iter().map(|group| group.as_raw()).collect();
    let text = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let groups = text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, number) = (fields.next()?, fields.nth(1)?.parse::<u32>().ok()?);
        (GROUPS.contains(&name) && own.contains(&number)).then(|| name.to_owned())
    });
    Ok(Facts {
        version: PROTOCOL_VERSION,
        is_root: rustix::process::geteuid().is_root(),
        groups: groups.collect(),
        scratch_free_bytes: free_bytes(&scratch)?,
        scratch,
        has_kvm: Path::new("/dev/kvm").exists(),
    })
}

/// Reads a regular file.
fn read_file(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let what = || format!("reading {}", path.display());
    // A folder of a machine is not trusted: a link in it could name any file of root.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).context(what)?;
    if !file.metadata().context(what)?.is_file() {
        let text = format!("{} is not a regular file", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    read_at_most(file, path, max_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_the_connection_are_written() {
        let parent = tempfile::tempdir().unwrap();
        let tasks = HostTasks::default();
        let make = Request::MakeSpace { parent: Some(parent.path().to_owned()), group: None };
        let Ok(Answer::Path(space)) = tasks.call(make) else { panic!("no folder") };
        let write = |space: &Path, name: &str| {
            let (space, name) = (space.to_owned(), name.to_owned());
            tasks.call(Request::WriteDocument { space, name, text: "x".to_owned() })
        };
        write(&space, "backup.xml").unwrap();
        for name in ["../other", "/etc/x", "qemu/x", "", "."] {
            assert_eq!(write(&space, name).unwrap_err().kind(), ErrorKind::InvalidInput, "{name}");
        }
        assert_eq!(write(parent.path(), "x").unwrap_err().kind(), ErrorKind::InvalidInput);
        tasks.call(Request::RemoveSpace { space: parent.path().to_owned() }).unwrap();
        assert!(space.join("backup.xml").exists());
        tasks.end();
        assert!(!space.exists() && parent.path().exists());
    }

    #[test]
    fn only_small_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vars");
        std::fs::write(&path, vec![7; 100]).unwrap();
        assert_eq!(read_file(&path, 100).unwrap(), vec![7; 100]);
        assert_eq!(read_file(&path, 99).unwrap_err().kind(), ErrorKind::InvalidInput);
        for other in [folder.path(), Path::new("/dev/zero")] {
            assert!(read_file(other, 100).is_err());
        }
        std::os::unix::fs::symlink(&path, folder.path().join("link")).unwrap();
        assert!(read_file(&folder.path().join("link"), 100).is_err());
        assert_eq!(
            read_file(&folder.path().join("no"), 1).unwrap_err().kind(),
            ErrorKind::NotFound
        );
    }
}
