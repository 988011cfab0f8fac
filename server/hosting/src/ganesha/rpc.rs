//! The subset of ONC RPC that asks whether a server answers (RFC 5531, RFC 1833).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// The programs' numbers.
pub(super) const NFS_PROGRAM: u32 = 100_003;
/// Answers the first request of a mount by NFSv3.
pub(super) const MOUNT_PROGRAM: u32 = 100_005;
const PORTMAP_PROGRAM: u32 = 100_000;

const PORTMAP_VERSION: u32 = 2;
const PORTMAP_PORT: u16 = 111;
/// Procedures: every program's first does nothing; the port mapper's third returns a port.
const NULL: u32 = 0;
const GET_PORT: u32 = 3;
const TCP: u32 = 6;

const CALL_ID: u32 = 0x636f_6c64;
const RPC_VERSION: u32 = 2;
const LAST_FRAGMENT: u32 = 1 << 31;
/// A reply's words before its results: id, reply, accepted, no verifier (2), done.
const REPLY_WORDS: usize = 6;
/// Maximum length of an answer, in bytes.
const LONGEST_REPLY: usize = 1024;

const PATIENCE: Duration = Duration::from_secs(2);

/// Whether the address accepts connections.
pub(super) fn is_listening(address: SocketAddr) -> bool {
    TcpStream::connect_timeout(&reachable(address), PATIENCE).is_ok()
}

/// Whether a program answers at the address.
pub(super) fn answers(address: SocketAddr, program: u32, version: u32) -> bool {
    call(address, program, version, NULL, &[]).is_some()
}

/// Whether this machine's rpcbind answers.
pub(super) fn has_rpcbind() -> bool {
    answers(rpcbind(), PORTMAP_PROGRAM, PORTMAP_VERSION)
}

/// The registered port of a program at this machine's rpcbind.
pub(super) fn registered_port(program: u32, version: u32) -> Option<u16> {
    let arguments = [program, version, TCP, 0];
    let results = call(rpcbind(), PORTMAP_PROGRAM, PORTMAP_VERSION, GET_PORT, &arguments)?;
    u16::try_from(*results.first()?).ok().filter(|port| *port != 0)
}

fn rpcbind() -> SocketAddr {
    ([127, 0, 0, 1], PORTMAP_PORT).into()
}

/// An address that reaches a server listening on all addresses.
fn reachable(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_unspecified() {
        address
    } else if address.is_ipv4() {
        ([127, 0, 0, 1], address.port()).into()
    } else {
        ([0, 0, 0, 0, 0, 0, 0, 1], address.port()).into()
    }
}

/// The results of a successful call; `None` otherwise.
fn call(
    address: SocketAddr,
    program: u32,
    version: u32,
    procedure: u32,
    arguments: &[u32],
) -> Option<Vec<u32>> {
    let mut stream = TcpStream::connect_timeout(&reachable(address), PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    stream.set_write_timeout(Some(PATIENCE)).ok()?;
    // No credentials and no verifier: two words each.
    let mut words = vec![CALL_ID, 0, RPC_VERSION, program, version, procedure, 0, 0, 0, 0];
    words.extend_from_slice(arguments);
    // A few words, so it fits.
    let mut message = (LAST_FRAGMENT | (words.len() * 4) as u32).to_be_bytes().to_vec();
    message.extend(words.iter().flat_map(|word| word.to_be_bytes()));
    stream.write_all(&message).ok()?;
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let length = usize::try_from(u32::from_be_bytes(length) & !LAST_FRAGMENT).ok()?;
    let mut reply = vec![0; Some(length).filter(|length| *length <= LONGEST_REPLY)?];
    stream.read_exact(&mut reply).ok()?;
    let words: Vec<u32> = reply
        .chunks_exact(4)
        .map(|word| word.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)))
        .collect();
    let is_done = words.starts_with(&[CALL_ID, 1, 0]) && words.get(REPLY_WORDS - 1) == Some(&0);
    is_done.then(|| words[REPLY_WORDS..].to_vec())
}
