//! Strangers, and peers that do not keep to the protocol.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use super::relay::Relay;
use super::*;
use crate::dial::{ask, dial};
use crate::hello::{HELLO_BYTES, Hello, Welcome};
use crate::stream::TlsStream;
use crate::tls;

/// A connection of a side that has a key, before its first message.
fn connection(sites: &Sites, identity: &Identity) -> TlsStream {
    let config = tls::client(identity, |_| true).expect("TLS");
    dial(&sites.address(), &config).expect("the listener answers")
}

fn begin(sites: &Sites, identity: &Identity) -> (TlsStream, Welcome) {
    let control = connection(sites, identity);
    let hello = Hello::Begin { bulk_connections: 1, bulk_window_bytes: 8 << 20 };
    let welcome = ask(&control, &hello, LONG).expect("it is welcome");
    (control, welcome)
}

/// A line whose near side is played here: the connections of control, fetch and bulk.
fn played_line(sites: &Sites) -> (Vec<TlsStream>, TcpLine) {
    let (control, welcome) = begin(sites, &sites.near);
    let Welcome::Begun { bulk_connections, session, .. } = welcome else {
        panic!("a line begins with {welcome:?}")
    };
    let mut streams = vec![control];
    for number in 0..=bulk_connections {
        let class = if number == 0 { Class::Fetch } else { Class::Bulk };
        let stream = connection(sites, &sites.near);
        let joined = ask(&stream, &Hello::Join { class, session }, LONG).expect("it joins");
        assert_eq!(joined, Welcome::Joined);
        streams.push(stream);
    }
    (streams, sites.accepted())
}

fn write(stream: &TlsStream, bytes: &[u8]) -> std::io::Result<()> {
    for piece in bytes.chunks(32 << 10) {
        stream.write(&stream.encrypt([piece, &[]])?)?;
    }
    Ok(())
}

/// The beginning of a message.
fn header(what: u8, kind: u8, stream: u32, length: u32) -> Vec<u8> {
    [&[what, kind, 0, 0], &stream.to_le_bytes()[..], &length.to_le_bytes()].concat()
}

#[test]
fn a_peer_that_breaks_the_protocol_ends_its_line_and_no_other() {
    let bulk_window_bytes = 8 << 20;
    let sites = Sites::with(LineOptions { bulk_window_bytes, ..LineOptions::default() });
    let (other_near, other_far) = sites.line(&LineOptions::default());
    let mebibyte = 1 << 20;
    let of_class = |class: usize, length: u32| {
        let mut header = header(0, 0, 0, length);
        header[2] = class as u8;
        [header, vec![0; length as usize]].concat()
    };
    let cases: [(&str, Vec<u8>); 8] = [
        ("too long", header(0, 0, 0, mebibyte + 1)),
        ("too long", header(0, 0, 0, u32::MAX)),
        ("too long", header(1, 0, 1, 1)),
        ("unknown", header(9, 0, 0, 0)),
        ("unknown", header(1, 3, 1, 0)),
        ("unknown", vec![2, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("unknown", of_class(3, 0)),
        ("credit without bound", header(1, 2, u32::MAX, 0)),
    ];
    for connection in 0..3 {
        // The connections of control, fetch and bulk.
        let own = [
            ("more than it had credit for", of_class(connection, mebibyte).repeat(9)),
            ("of another class", of_class((connection + 1) % 3, 1)),
        ];
        for (word, bytes) in cases.iter().cloned().chain(own) {
            let (streams, far) = played_line(&sites);
            // The other side may end it before all is written.
            let _ = write(&streams[connection], &bytes);
            // Nothing is received that could make room.
            refused(far.receive(&[], LONG), ErrorKind::Corrupt, word);
        }
    }
    other_near.send(Class::Bulk, frame(1, vec![1])).expect("the other line works");
    assert_eq!(receive(&other_far, &[Class::Bulk]).1.stream, 1);
}

#[test]
fn a_message_after_the_last_one_is_refused() {
    let sites = Sites::new();
    let (streams, far) = played_line(&sites);
    write(&streams[1], &[header(3, 0, 0, 0), header(2, 0, 0, 0)].concat()).expect("it is open");
    assert_eq!(failure(&far).kind(), ErrorKind::Corrupt);
}

#[test]
fn keys_that_are_not_pinned_are_refused_by_both_sides() {
    let sites = Sites::new();
    refused(sites.connect_as(&identity()), ErrorKind::Forbidden, "refuses the key of this side");
    let options = LineOptions::default();
    refused(
        connect(&sites.address(), &sites.near, identity().key(), &options),
        ErrorKind::Forbidden,
        "another key than at the pairing",
    );
    assert!(sites.nothing_arrived());
}

#[test]
fn a_key_that_an_invitation_let_in_gets_no_line() {
    let sites = Sites::new();
    sites.listener.invite(PairingCode::generate().expect("a code"), LONG);
    refused(sites.connect_as(&identity()), ErrorKind::Forbidden, "refuses the key of this side");
    // And no connection of another's line.
    let (_control, welcome) = begin(&sites, &sites.near);
    let Welcome::Begun { session, .. } = welcome else { panic!("it begins with {welcome:?}") };
    let stranger = connection(&sites, &identity());
    let hello = Hello::Join { class: Class::Bulk, session };
    refused(ask(&stranger, &hello, LONG), ErrorKind::Io, "does not know the line");
    assert!(sites.nothing_arrived());
}

#[test]
fn an_unknown_session_and_other_versions_are_refused() {
    let sites = Sites::new();
    let stream = connection(&sites, &sites.near);
    let hello = Hello::Join { class: Class::Bulk, session: [9; 32] };
    refused(ask(&stream, &hello, LONG), ErrorKind::Io, "does not know the line");
    for (at, value) in [(0, b'C'), (8, 1), (9, 1), (9, 200)] {
        let mut message = Hello::Pair { proof: [0; 32] }.encode();
        message[at] = value;
        let stream = connection(&sites, &sites.near);
        let until = std::time::Instant::now() + LONG;
        stream.write_all_until(&message, until).expect("it is open");
        let mut answer = [0; HELLO_BYTES];
        stream.read_exact_until(&mut answer, until).expect("an answer");
        refused(Welcome::decode(&answer), ErrorKind::Unsupported, "another version");
    }
}

#[test]
fn lines_of_one_peer_are_limited_and_room_comes_back() {
    let sites = Sites::new();
    let mut lines: Vec<_> = (0..8).map(|_| sites.line(&LineOptions::default())).collect();
    refused(sites.connect_as(&sites.near), ErrorKind::Busy, "too many lines");
    let (near, far) = lines.pop().expect("eight lines");
    near.close();
    assert_eq!(far.receive(&Class::ALL, LONG).expect("no failure"), Received::Closed);
    drop(far);
    sites.line(&LineOptions::default());
}

#[test]
fn tls_1_2_is_refused() {
    let sites = Sites::new();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let old = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS12])
        .expect("TLS 1.2 is in this program")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let refusal = {
        let mut socket = TcpStream::connect(sites.address()).expect("it listens");
        let name = ServerName::try_from("far").expect("a name");
        let mut tls = ClientConnection::new(Arc::new(old), name).expect("a connection");
        loop {
            match tls.complete_io(&mut socket) {
                Ok(_) if tls.is_handshaking() => {}
                Ok(_) => panic!("TLS 1.2 was accepted"),
                Err(error) => break error.to_string(),
            }
        }
    };
    assert!(refusal.contains("ProtocolVersion"), "{refusal}");
    sites.line(&LineOptions::default());
}

#[test]
fn idle_and_invalid_connections_do_not_block_a_peer() {
    let sites = Sites::new();
    let target = sites.listener.local_address();
    let strangers: Vec<TcpStream> = (0..500).map(|_| stranger(target)).collect();
    let mut nonsense = stranger(target);
    // It may be closed already.
    let _ = nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n");
    sites.line(&LineOptions::default());
    let is_open = |mut stranger: &TcpStream| {
        stranger.set_read_timeout(Some(Duration::from_millis(1))).expect("an option");
        match stranger.read_exact(&mut [0]) {
            Ok(_) => false,
            Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
        }
    };
    let open = strangers.iter().filter(|stranger| is_open(stranger)).count();
    assert!(open <= 32, "{open} strangers of one address are in their handshake");
    assert!(sites.nothing_arrived());
}

/// A connection from another address than the peer's.
fn stranger(target: SocketAddr) -> TcpStream {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )
    .expect("a socket");
    let own: SocketAddr = "127.0.0.2:0".parse().expect("an address");
    rustix::net::bind(&socket, &own).expect("an address of this machine");
    rustix::net::connect(&socket, &target).expect("it listens");
    TcpStream::from(socket)
}

#[test]
fn a_recorded_line_cannot_be_replayed_and_shows_no_plaintext() {
    let sites = Sites::new();
    let relay = Relay::to(sites.listener.local_address());
    let (near, far) = sites.line_at(&relay.address(), &LineOptions::default());
    let secret = b"the content of a disk".repeat(100);
    for class in Class::ALL {
        near.send(class, frame(1, secret.clone())).expect("the line works");
        assert!(receive(&far, &[class]).1.body == secret);
    }
    near.close();
    let recorded = relay.recorded();
    assert_eq!(recorded.len(), near.statistics().connections);
    let word = &secret[..21];
    for bytes in &recorded {
        assert!(!bytes.windows(word.len()).any(|window| window == word));
        assert!(!bytes.windows(8).any(|window| window == b"coldline"));
    }
    assert!(recorded.iter().map(Vec::len).sum::<usize>() > 3 * secret.len());
    for bytes in recorded {
        let mut socket = TcpStream::connect(sites.address()).expect("it listens");
        // The listener may refuse it before all is written.
        let _ = socket.write_all(&bytes);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let _ = socket.read_to_end(&mut Vec::new());
    }
    assert!(sites.nothing_arrived());
}
