//! A connection to a server, with a limit on the bytes and the time of its answers.
//!
//! The library that speaks SMTP reads a line into memory however long it is, and connects by itself. So it
//! connects to a port of this host, from which a thread carries the bytes, TLS and all:
//!
//! ```text
//!   lettre ──127.0.0.1:PORT──▶ relay ──▶ mail server
//!          ◀───────────────────────────  at most MAX_BYTES
//! ```
//!
//! Another program of this host that is faster at the port reaches the mail server in its own name, and the
//! mail is sent with the next attempt.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};

/// Limit of a server's answers: its certificates and a few lines.
const MAX_BYTES: u64 = 256 << 10;
/// Time limit of the whole connection. Above that of any answer.
const LIMIT: Duration = Duration::from_secs(50);

/// Connects to the server and returns the port of 127.0.0.1 that leads there, for one connection.
///
/// # Errors
/// Errors of the system, the last one if the host has several addresses.
pub(super) fn start(host: &str, port: u16, timeout: Duration) -> Result<u16> {
    let server = connect(host, port, timeout)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context(|| "listening")?;
    let local = listener.local_addr().context(|| "listening")?.port();
    let thread = std::thread::Builder::new().name("mail relay".to_owned());
    let spawned = thread.spawn(move || {
        let _ = carry(&listener, server);
    });
    spawned.context(|| "starting a thread for mail").map(|_| local)
}

fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStream> {
    let found = (host, port).to_socket_addrs().context(|| format!("looking up {host}"))?;
    let mut last = Error::new(ErrorKind::NotFound, format!("{host} has no address"));
    for address in found {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Error::io(format!("connecting to {address}"), error),
        }
    }
    Err(last)
}

fn carry(listener: &TcpListener, server: TcpStream) -> std::io::Result<()> {
    // The caller connects at once; one that does not is gone.
    let client = accept(listener, Instant::now() + Duration::from_secs(5))?;
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    std::thread::Builder::new().name("mail relay".to_owned()).spawn(move || {
        let _ = std::io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    })?;
    let carried = carry_answers(&server, &client);
    // Ends both threads and the caller, whatever it waits for.
    let _ = (server.shutdown(Shutdown::Both), client.shutdown(Shutdown::Both));
    carried
}

fn accept(listener: &TcpListener, deadline: Instant) -> std::io::Result<TcpStream> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => return stream.set_nonblocking(false).map(|()| stream),
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => return Err(error),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn carry_answers(mut server: &TcpStream, mut client: &TcpStream) -> std::io::Result<()> {
    let deadline = Instant::now() + LIMIT;
    let (mut bytes, mut left) = ([0; 4096], MAX_BYTES);
    while let Some(wait) = deadline.checked_duration_since(Instant::now()) {
        server.set_read_timeout(Some(wait.max(Duration::from_millis(1))))?;
        let count = server.read(&mut bytes)?;
        left = left.saturating_sub(count as u64);
        if count == 0 || left == 0 {
            break;
        }
        client.write_all(bytes.get(..count).unwrap_or_default())?;
    }
    Ok(())
}
