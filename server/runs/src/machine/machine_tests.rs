//! What readers do with the folder of a machine whose QEMU is hostile.

use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use coldrise_block::ErrorKind;

use super::*;
use crate::Run;
use crate::tests::begin;

const PATIENCE: Duration = Duration::from_millis(100);

fn record() -> MachineRecord {
    MachineRecord {
        repository: "/srv/backup".to_owned(),
        session: "trial".to_owned(),
        since_ms: 5,
        memory_mib: 512,
        cpus: 2,
        network: "isolated".to_owned(),
        has_screen: true,
    }
}

/// A run with a machine, in a folder whose path is too long for an address of a socket.
fn begun() -> (tempfile::TempDir, RunsFolder, Run, MachineFiles) {
    let scratch = tempfile::tempdir().unwrap();
    let folder = RunsFolder::at(scratch.path().join("r".repeat(120)));
    let run = begin(&folder, "boot");
    let machine = run.machine_files().unwrap();
    (scratch, folder, run, machine)
}

#[test]
fn a_machine_is_there_while_its_run_lives() {
    let (_scratch, folder, run, machine) = begun();
    assert_eq!(folder.machines().unwrap(), []);
    machine.tell(&record()).unwrap();
    let id = run.id().unwrap().clone();
    assert_eq!(folder.machines().unwrap(), [(id.clone(), record())]);
    assert_eq!(folder.read(&id).unwrap().machine, Some(record()));
    let listener = machine.listen_serial().unwrap();
    let mut client = folder.connect_machine(&id, MachineSocket::Serial, PATIENCE).unwrap();
    listener.accept().unwrap().0.write_all(b"login: ").unwrap();
    let mut read = [0; 7];
    client.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"login: ");
    // A killed process leaves its files.
    let left = folder.run_path(&id).join(MACHINE_RECORD);
    let text = std::fs::read(&left).unwrap();
    drop(machine);
    assert_eq!(folder.machines().unwrap(), []);
    assert!(!folder.run_path(&id).join(QEMU_FOLDER).exists());
    std::fs::write(&left, text).unwrap();
    run.finish(0, None, None);
    assert_eq!(folder.machines().unwrap(), []);
}

#[test]
fn links_in_qemus_folder_are_not_followed() {
    let (scratch, folder, run, machine) = begun();
    let id = run.id().unwrap().clone();
    let _secret = UnixListener::bind(scratch.path().join("secret")).unwrap();
    std::fs::write(scratch.path().join("key"), "secret").unwrap();
    let qemu = machine.qemu_folder();
    symlink(scratch.path().join("secret"), qemu.join("screen")).unwrap();
    std::fs::write(qemu.join("qmp"), "").unwrap();
    symlink(scratch.path().join("key"), qemu.join("picture")).unwrap();
    symlink(scratch.path(), qemu.join("folder")).unwrap();
    for socket in [MachineSocket::Screen, MachineSocket::Monitor, MachineSocket::Keys] {
        let refused = folder.connect_machine(&id, socket, PATIENCE).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotFound, "{socket:?}");
    }
    assert!(folder.take_machine_file(&id, "picture").is_err());
    drop(machine);
    assert!(!qemu.exists());
    assert!(scratch.path().join("key").exists(), "links are not followed");
}

#[test]
fn machines_with_damaged_records_are_not_listed() {
    let (_scratch, folder, run, machine) = begun();
    let path = folder.run_path(run.id().unwrap()).join(MACHINE_RECORD);
    for content in ["", "{}", "[", &" ".repeat(1 << 20)] {
        std::fs::write(&path, content).unwrap();
        assert_eq!(folder.machines().unwrap(), []);
    }
    drop(machine);
}

#[test]
fn a_crowd_at_a_socket_is_refused_in_time() {
    let (_scratch, folder, run, machine) = begun();
    let id = run.id().unwrap().clone();
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let path = machine.qemu_folder().join("qmp");
    let short = tempfile::tempdir().unwrap();
    symlink(machine.qemu_folder(), short.path().join("f")).unwrap();
    let address = SocketAddrUnix::new(short.path().join("f/qmp")).unwrap();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    assert!(path.exists());
    let mut clients = Vec::new();
    let refused = loop {
        match folder.connect_machine(&id, MachineSocket::Monitor, PATIENCE) {
            Ok(client) => clients.push(client),
            Err(error) => break error,
        }
        assert!(clients.len() < 10);
    };
    assert_eq!(refused.kind(), ErrorKind::Busy);
}
