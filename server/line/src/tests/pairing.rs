//! Pairing by a code.

use std::net::TcpListener;
use std::time::Instant;

use rustls::ServerConnection;

use super::*;
use crate::dial::{ask, dial};
use crate::hello::{HELLO_BYTES, Hello, Welcome};
use crate::stream::TlsStream;
use crate::tls;

/// A far side with an open invitation, and a new near side.
fn invited(valid: Duration) -> (Sites, Identity, PairingCode) {
    let sites = Sites::new();
    let code = PairingCode::generate().expect("a code");
    sites.listener.invite(typed(&code), valid);
    (sites, identity(), code)
}

/// The code as it is carried to the other site.
fn typed(code: &PairingCode) -> PairingCode {
    code.to_string().parse().expect("its own text")
}

fn arrived_pairing(sites: &Sites) -> Pairing {
    match sites.listener.accept(LONG).expect("the listener listens") {
        Arrival::Pairing(pairing) => *pairing,
        _ => panic!("no pairing arrived"),
    }
}

#[test]
fn pairing_exchanges_keys_and_uses_up_its_code() {
    let (sites, near, code) = invited(CODE_VALID);
    let address = sites.address();
    let paired = std::thread::scope(|scope| {
        let pairing_near = scope.spawn(|| pair_with(&address, &near, &code));
        let pairing = arrived_pairing(&sites);
        assert_eq!(pairing.key(), near.key());
        assert!(pairing.address().ip().is_loopback());
        sites.listener.set_peers([pairing.key()]);
        pairing.accept().expect("the near side waits");
        pairing_near.join().expect("no panic").expect("it is paired")
    });
    assert_eq!(paired, sites.far.key());
    connect(&address, &near, paired, &LineOptions::default()).expect("a line");
    // The code is used up: whoever saw it, too late.
    refused(pair_with(&address, &near, &code), ErrorKind::Forbidden, "wrong, used or expired");
    refused(pair_with(&address, &identity(), &code), ErrorKind::Forbidden, "no open code");
}

#[test]
fn a_pairing_that_is_not_accepted_fails_at_the_near_side() {
    let (sites, near, code) = invited(CODE_VALID);
    let address = sites.address();
    std::thread::scope(|scope| {
        let pairing_near = scope.spawn(|| pair_with(&address, &near, &code));
        drop(arrived_pairing(&sites));
        refused(pairing_near.join().expect("no panic"), ErrorKind::Io, "ended the connection");
    });
    refused(sites.connect_as(&near), ErrorKind::Forbidden, "refuses the key");
}

#[test]
fn wrong_codes_are_refused_and_a_few_end_the_invitation() {
    let (sites, near, code) = invited(CODE_VALID);
    for _ in 0..MAX_WRONG_CODES {
        let guess = PairingCode::generate().expect("a code");
        let guessed = pair_with(&sites.address(), &near, &guess);
        refused(guessed, ErrorKind::Forbidden, "wrong, used or expired");
    }
    assert!(matches!(sites.listener.accept(LONG), Ok(Arrival::CodeSpoiled)));
    refused(pair_with(&sites.address(), &near, &code), ErrorKind::Forbidden, "no open code");
    assert!(sites.nothing_arrived());
    // A later invitation counts anew.
    sites.listener.invite(typed(&code), CODE_VALID);
    let guess = PairingCode::generate().expect("a code");
    refused(pair_with(&sites.address(), &near, &guess), ErrorKind::Forbidden, "wrong");
    let keys = std::thread::scope(|scope| {
        let pairing_near = scope.spawn(|| pair_with(&sites.address(), &near, &code));
        arrived_pairing(&sites).accept().expect("the near side waits");
        pairing_near.join().expect("no panic")
    });
    assert_eq!(keys.expect("it is paired"), sites.far.key());
}

#[test]
fn an_expired_code_is_refused() {
    let (sites, near, code) = invited(Duration::ZERO);
    refused(pair_with(&sites.address(), &near, &code), ErrorKind::Forbidden, "no open code");
    // Also of a side that has a key here.
    let known = pair_with(&sites.address(), &sites.near, &code);
    refused(known, ErrorKind::Forbidden, "wrong, used or expired");
    assert!(sites.nothing_arrived());
}

/// Who sits between the sites can end each connection and begin another one, but a proof
/// belongs to one of them.
#[test]
fn a_proof_that_an_attacker_passes_on_is_wrong() {
    let (sites, near, code) = invited(CODE_VALID);
    let attacker = identity();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let between = listener.local_addr().expect("its address").to_string();
    std::thread::scope(|scope| {
        let pairing_near = scope.spawn(|| pair_with(&between, &near, &code));
        let until = Instant::now() + LONG;
        let config = tls::server(&attacker, |_| true).expect("TLS");
        let tls = ServerConnection::new(config).expect("TLS");
        let (socket, _) = listener.accept().expect("the near side");
        let with_near = TlsStream::handshake(socket, tls, until).expect("any key is taken");
        let mut message = [0; HELLO_BYTES];
        with_near.read_exact_until(&mut message, until).expect("its proof");
        let hello = Hello::decode(&message).expect("a proof");
        let config = tls::client(&attacker, |_| true).expect("TLS");
        let with_far = dial(&sites.address(), &config).expect("it is invited");
        refused(ask(&with_far, &hello, LONG), ErrorKind::Forbidden, "wrong, used or expired");
        // Nor can it prove the far side to the near one.
        let Hello::Pair { proof } = hello else { panic!("{hello:?} is not a proof") };
        let answer = Welcome::Paired { proof }.encode();
        with_near.write_all_until(&answer, until).expect("it waits");
        let paired = pairing_near.join().expect("no panic");
        refused(paired, ErrorKind::Forbidden, "does not know the code");
    });
    assert!(sites.nothing_arrived());
}

#[test]
fn a_code_is_read_as_people_type_it() {
    let code: PairingCode = "7K2M-9QXW-41TE-0ZHB".parse().expect("a code");
    assert_eq!(code.to_string(), "7K2M-9QXW-41TE-0ZHB");
    for typed in ["7k2m9qxw4ltEoZhb", " 7K2M 9QXW 4iTE OZHB "] {
        let typed: PairingCode = typed.parse().expect("a code");
        assert_eq!(typed.to_string(), code.to_string());
    }
    for wrong in
        ["", "7K2M-9QXW-41TE", "7K2M-9QXW-41TE-0ZHBB", "7K2M-9QXW-41TE-0ZHU", "7K2M-9QXW-41TE-0ZHé"]
    {
        refused(wrong.parse::<PairingCode>(), ErrorKind::InvalidInput, "groups of four");
    }
    let (one, other) = (PairingCode::generate(), PairingCode::generate());
    assert_ne!(one.expect("a code").to_string(), other.expect("a code").to_string());
}
