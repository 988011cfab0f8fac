//! The tasks, done on this host.

use std::collections::HashMap;
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use coldrise_block::{
    Context, Error, ErrorKind, Result, ScratchFolder, remove_abandoned_folders_in,
    remove_if_present,
};

use crate::channel::Channel;
use crate::disk_file::{check_disk_file, discard_disk_file, hold_disk_file, open_disk_file};
use crate::files::{
    MAX_FILE_BYTES, look, read_file, read_folder, read_from, remove_tpm, write_file,
};
use crate::freezes::Freezes;
use crate::image_files;
use crate::kvm::kvm_works;
use crate::messages::{Answer, Facts, Outcome, PROTOCOL_VERSION, Request};
use crate::qemu::QemuFacts;
use crate::relay;
use crate::scratch::{Space, default_scratch, free_bytes};
use crate::sockets;
use crate::virsh;

/// How long a task waits for the end of a program.
const MAX_PATIENCE: Duration = Duration::from_secs(60);
/// Groups that decide what a user may do with machines.
const GROUPS: [&str; 5] = ["libvirt", "kvm", "libvirt-qemu", "qemu", "tss"];

/// This host. Dropping it removes the folders that were made through it.
#[derive(Default)]
pub struct HostTasks {
    spaces: Mutex<HashMap<PathBuf, Arc<Space>>>,
    freezes: Freezes,
    /// Sockets that were made room for.
    sockets: Mutex<Vec<PathBuf>>,
    /// Connections to sockets at which this program listens.
    relays: Mutex<HashMap<PathBuf, Arc<Mutex<Receiver<PathBuf>>>>>,
    /// Files and block devices that take a disk.
    disks: Mutex<Vec<File>>,
}

impl HostTasks {
    /// Thaws the guests that were frozen, ends the programs and removes the folders and sockets. For the end of a connection.
    pub fn end(&self) {
        self.freezes.thaw_all();
        let spaces = std::mem::take(&mut *self.spaces());
        spaces.values().for_each(|space| space.stop_programs());
        self.sockets().drain(..).for_each(|socket| sockets::remove(&socket));
    }

    fn disks(&self) -> MutexGuard<'_, Vec<File>> {
        locked(&self.disks)
    }

    fn sockets(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        locked(&self.sockets)
    }

    fn spaces(&self) -> MutexGuard<'_, HashMap<PathBuf, Arc<Space>>> {
        locked(&self.spaces)
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Channel for HostTasks {
    fn call(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Facts => facts().map(Answer::Facts),
            Request::QemuFacts => Ok(Answer::QemuFacts(QemuFacts::here())),
            Request::Virsh { uri, words, input, patience_ms } => {
                self.freezes.before(&uri, &words);
                let patience = Duration::from_millis(patience_ms);
                virsh::run(&uri, &words, input.as_deref(), patience).map(Answer::Text)
            }
            Request::AskVirsh { uri, commands, patience_ms } => {
                let patience = Duration::from_millis(patience_ms);
                let answers = virsh::ask(&uri, &commands, patience).into_iter();
                let outcome = |answer: Result<String>| Outcome::from(answer.map(Answer::Text));
                Ok(Answer::Each(answers.map(outcome).collect()))
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
            Request::LookAtFile { path } => image_files::look_at(&path).map(Answer::File),
            Request::Claim { space, name } => {
                self.with_space(&space, |space| space.claim(&name)).map(|()| Answer::Done)
            }
            Request::WatchFiles { space, paths } => {
                self.with_space(&space, |space| space.watch(&paths)).map(|()| Answer::Done)
            }
            Request::FilesState { space } => {
                self.with_space(&space, |space| space.files_state()).map(Answer::Watched)
            }
            Request::ReadFile { path, max_bytes } => {
                Ok(Answer::Content(STANDARD.encode(read_file(&path, max_bytes)?)))
            }
            Request::ReadFrom { path, offset, max_bytes } => {
                Ok(Answer::Content(STANDARD.encode(read_from(&path, offset, max_bytes)?)))
            }
            Request::FreePort => free_port().map(Answer::Number),
            Request::ReadFolder { path, max_bytes } => {
                read_folder(&path, max_bytes).map(Answer::Files)
            }
            Request::Look { paths } => {
                Ok(Answer::Found(paths.iter().map(|path| look(path)).collect()))
            }
            Request::WriteFile { path, content, is_private } => {
                let invalid = |_| Error::new(ErrorKind::InvalidInput, "the file is not base64");
                let content = STANDARD.decode(content).map_err(invalid)?;
                write_file(&path, &content, is_private).map(|()| Answer::Done)
            }
            Request::OpenDisk { path, size_bytes, force } => {
                let (file, facts) = open_disk_file(&path, size_bytes, 0, force)?;
                self.disks().push(file);
                Ok(Answer::Disk(facts))
            }
            Request::HoldDisk { path } => {
                self.disks().extend(hold_disk_file(&path)?);
                Ok(Answer::Done)
            }
            Request::CheckDisk { path, size_bytes, force } => {
                check_disk_file(&path, size_bytes, force).map(|()| Answer::Done)
            }
            Request::DiscardDisk { path, made } => {
                discard_disk_file(&path, made);
                Ok(Answer::Done)
            }
            Request::RemoveFile { path } => remove_if_present(&path).map(|_| Answer::Done),
            Request::RemoveTpm { folder } => remove_tpm(&folder).map(|()| Answer::Done),
            Request::PrepareSocket { path } => {
                self.sockets().push(path.clone());
                sockets::prepare(&path).map(|()| Answer::Done)
            }
            Request::Listen { path } => {
                let connections = Arc::new(Mutex::new(relay::listen(&path)?));
                locked(&self.relays).insert(path, connections);
                Ok(Answer::Done)
            }
            Request::NextConnection { path } => {
                let connections = locked(&self.relays).get(&path).cloned();
                let connections = connections.ok_or_else(|| {
                    Error::new(ErrorKind::InvalidInput, "this program does not listen there")
                })?;
                let next = relay::next(&locked(&connections))?;
                Ok(next.map_or(Answer::Done, Answer::Path))
            }
            Request::SocketPath { name } => sockets::socket_path(&name).map(Answer::Path),
            Request::ShareSocket { path, uri, owner } => {
                sockets::share(&path, &uri, owner.as_deref()).map(|()| Answer::Done)
            }
        }
    }

    fn reach(&self, socket: &Path) -> Result<PathBuf> {
        Ok(socket.to_owned())
    }

    fn reach_port(&self, port: u16) -> Result<u16> {
        Ok(port)
    }

    fn offer(&self, _local: &Path, _there: &Path) -> Result<()> {
        Ok(())
    }

    fn is_lost(&self) -> bool {
        false
    }

    fn name(&self) -> Option<&str> {
        None
    }
}

fn free_port() -> Result<u64> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    Ok(address.context(|| "looking for a free port")?.port().into())
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
        lacks_kvm: kvm_works().err().map(str::to_owned),
    })
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
}
