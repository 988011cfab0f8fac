//! The hub between a guest and its clients: memory, order, slow clients.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use super::{HISTORY_BYTES, SerialHub};

const PATIENCE: Option<Duration> = Some(Duration::from_secs(20));

struct Port {
    guest: UnixStream,
    path: PathBuf,
    _hub: SerialHub,
    _folder: tempfile::TempDir,
}

fn port() -> Port {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serial");
    let listener = UnixListener::bind(&path).unwrap();
    let (guest, port) = UnixStream::pair().unwrap();
    guest.set_read_timeout(PATIENCE).unwrap();
    guest.set_write_timeout(PATIENCE).unwrap();
    let hub = SerialHub::start(port, listener).unwrap();
    Port { guest, path, _hub: hub, _folder: folder }
}

impl Port {
    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(&self.path).unwrap();
        client.set_read_timeout(PATIENCE).unwrap();
        client.set_write_timeout(PATIENCE).unwrap();
        client
    }
}

fn read(client: &mut UnixStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    client.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_client_gets_the_past_and_the_future_once() {
    let mut port = port();
    port.guest.write_all(b"early ").unwrap();
    let mut first = port.client();
    assert_eq!(read(&mut first, 6), b"early ");
    port.guest.write_all(b"late").unwrap();
    assert_eq!(read(&mut first, 4), b"late");
    let mut second = port.client();
    assert_eq!(read(&mut second, 10), b"early late");
    // Both write; both see the guest's answer.
    first.write_all(b"ro").unwrap();
    assert_eq!(read(&mut port.guest, 2), b"ro");
    second.write_all(b"ot").unwrap();
    assert_eq!(read(&mut port.guest, 2), b"ot");
    port.guest.write_all(b"#").unwrap();
    assert_eq!((read(&mut first, 1), read(&mut second, 1)), (b"#".to_vec(), b"#".to_vec()));
    drop(first);
    port.guest.write_all(b"!").unwrap();
    assert_eq!(read(&mut second, 1), b"!");
    // The end of the guest is the end of its clients.
    drop(port.guest);
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_slow_client_does_not_stop_the_guest() {
    let mut port = port();
    let mut slow = port.client();
    port.guest.write_all(b"x").unwrap();
    assert_eq!(read(&mut slow, 1), b"x");
    let piece: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    // 64 MiB that nobody reads.
    for _ in 0..64 {
        port.guest.write_all(&piece).unwrap();
    }
    port.guest.write_all(b"end").unwrap();
    let mut fresh = port.client();
    let mut tail = Vec::new();
    while !tail.ends_with(b"end") {
        let mut bytes = [0; 4096];
        let count = fresh.read(&mut bytes).unwrap();
        assert!(count > 0, "the hub has ended");
        tail.extend_from_slice(&bytes[..count]);
    }
    // What was kept, and what was still on its way through the sockets.
    assert!((HISTORY_BYTES..4 << 20).contains(&tail.len()), "{} bytes", tail.len());
    let mut rest = Vec::new();
    while !rest.ends_with(b"end") {
        let mut bytes = [0; 4096];
        let count = slow.read(&mut bytes).unwrap();
        assert!(count > 0, "the hub has ended");
        rest.extend_from_slice(&bytes[..count]);
    }
    assert!(rest.len() < 8 << 20, "the slow client missed what was not kept");
}

#[test]
fn input_that_the_guest_does_not_take_waits_in_bounds() {
    let mut port = port();
    let client = port.client();
    port.guest.write_all(b"x").unwrap();
    let mut reader = client.try_clone().unwrap();
    assert_eq!(read(&mut reader, 1), b"x");
    let sent: Vec<u8> = (0..=255).cycle().take(4 << 20).collect();
    let expected = sent.clone();
    let mut writer = client.try_clone().unwrap();
    let writing = std::thread::spawn(move || writer.write_all(&sent).unwrap());
    // Output goes on meanwhile.
    port.guest.write_all(b"y").unwrap();
    assert_eq!(read(&mut reader, 1), b"y");
    assert_eq!(read(&mut port.guest, expected.len()), expected);
    writing.join().unwrap();
}
