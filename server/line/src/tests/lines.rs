//! Lines between sites that mean well.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::relay::Relay;
use super::*;

/// A short time after which a silent side is dead.
fn impatient() -> LineOptions {
    LineOptions { silence: Duration::from_millis(800), ..LineOptions::default() }
}

#[test]
fn control_keeps_its_order_and_all_arrives_whole_in_both_directions() {
    let sites = Sites::new();
    let (near, far) = sites.line(&LineOptions::default());
    let count = 600u32;
    // From no byte to the largest body.
    let body = |number: u32| vec![number as u8; (number as usize * 7919) % 5000 + number as usize];
    let large = |number: u32| vec![number as u8; if number % 64 == 0 { MAX_BODY_BYTES } else { 0 }];
    let send_all = |line: &TcpLine| {
        for number in 0..count {
            for class in Class::ALL {
                let body = if class == Class::Bulk { large(number) } else { body(number) };
                line.send(class, frame(number, body)).expect("the line works");
            }
        }
    };
    let receive_all = |line: &TcpLine| {
        let mut arrived = [const { BTreeSet::new() }; 3];
        while arrived.iter().any(|frames| frames.len() < count as usize) {
            let (class, frame) = receive(line, &Class::ALL);
            assert_eq!(frame.kind, 7);
            let expected =
                if class == Class::Bulk { large(frame.stream) } else { body(frame.stream) };
            assert!(frame.body == expected);
            let known = &mut arrived[class.index()];
            assert!(class != Class::Control || frame.stream as usize == known.len());
            assert!(known.insert(frame.stream), "{class:?}: frame {} came twice", frame.stream);
        }
    };
    std::thread::scope(|scope| {
        for line in [&near, &far] {
            scope.spawn(move || send_all(line));
            scope.spawn(move || receive_all(line));
        }
    });
    let statistics = near.statistics();
    assert_eq!(statistics.connections, far.statistics().connections);
    assert!(statistics.connections >= 4, "{statistics:?}");
    assert!(!statistics.congestion_control.is_empty() && statistics.round_trip.is_some());
    let payload = u64::from(count.div_ceil(64)) * MAX_BODY_BYTES as u64;
    assert!((payload..payload * 3 / 2).contains(&statistics.sent_bytes), "{statistics:?}");
}

#[test]
fn a_sender_waits_for_credit() {
    for class in Class::ALL {
        let options = LineOptions { bulk_window_bytes: 8 << 20, ..LineOptions::default() };
        let sites = Sites::with(options.clone());
        let (near, far) = sites.line(&options);
        let body_bytes = (1 << 20) - 64;
        let (sent, total) = (AtomicUsize::new(0), 20);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..total {
                    near.send(class, frame(number, vec![1; body_bytes])).expect("the line works");
                    sent.fetch_add(1, Ordering::SeqCst);
                }
            });
            let begin = Instant::now();
            while sent.load(Ordering::SeqCst) < 8 && begin.elapsed() < LONG {
                std::thread::yield_now();
            }
            // Time in which a defect would show; without one nothing can happen.
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(sent.load(Ordering::SeqCst), 8, "{class:?}: the window holds 8");
            for _ in 0..total {
                receive(&far, &[class]);
            }
        });
        assert_eq!(sent.load(Ordering::SeqCst), total as usize);
    }
}

#[test]
fn fetch_and_control_overtake_bulk() {
    let sites = Sites::new();
    let rate_bytes_per_second = Some(512 << 10);
    let (near, far) = sites.line(&LineOptions { rate_bytes_per_second, ..LineOptions::default() });
    let total = 4 << 20;
    for number in 0..64 {
        near.send(Class::Bulk, frame(number, vec![2; total / 64])).expect("the line works");
    }
    near.send(Class::Fetch, frame(1, vec![3; 16 << 10])).expect("the line works");
    near.send(Class::Control, frame(2, Vec::new())).expect("the line works");
    assert_eq!(receive(&far, &[Class::Control]).1.stream, 2);
    assert_eq!(receive(&far, &[Class::Fetch]).1.stream, 1);
    let before = far.statistics().received_bytes;
    assert!(before < total as u64 / 4, "{before} bytes came before a block that was fetched");
    near.set_rate(None);
    for _ in 0..64 {
        receive(&far, &[Class::Bulk]);
    }
}

#[test]
fn a_rate_holds_and_can_be_changed_on_a_live_line() {
    let sites = Sites::new();
    let (near, far) = sites.line(&LineOptions::default());
    let rate = 256 << 10;
    near.set_rate(Some(rate));
    assert_eq!(near.statistics().rate_limit_bytes_per_second, Some(rate));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..256 {
                near.send(Class::Bulk, frame(number, vec![4; 32 << 10])).expect("the line works");
            }
        });
        for _ in 0..6 {
            receive(&far, &[Class::Bulk]);
        }
        // 6 frames take 0.75 s; a burst is 20 ms of the rate, and a piece for each connection.
        assert!(begin.elapsed() > Duration::from_millis(500), "{:?}", begin.elapsed());
        let changed = Instant::now();
        near.set_rate(None);
        for _ in 6..256 {
            receive(&far, &[Class::Bulk]);
        }
        assert!(changed.elapsed() < Duration::from_secs(15), "at the old rate it takes 30 s");
    });
}

#[test]
fn closing_delivers_all_sent_frames() {
    let sites = Sites::new();
    let (near, far) = sites.line(&LineOptions::default());
    for number in 0..500 {
        near.send(Class::Bulk, frame(number, vec![5; 8 << 10])).expect("the line works");
    }
    near.send(Class::Control, frame(0, Vec::new())).expect("the line works");
    near.close();
    let mut bulk = 0;
    loop {
        match far.receive(&Class::ALL, LONG).expect("no failure") {
            Received::Frame { class, .. } => bulk += usize::from(class == Class::Bulk),
            Received::Closed => break,
            Received::Nothing => panic!("the end came in time"),
        }
    }
    assert_eq!(bulk, 500);
    refused(far.send(Class::Control, frame(0, Vec::new())), ErrorKind::Io, "by the other side");
    refused(near.send(Class::Control, frame(0, Vec::new())), ErrorKind::Io, "is closed");
    refused(near.receive(&Class::ALL, LONG), ErrorKind::Io, "is closed");
}

#[test]
fn a_line_that_ends_without_close_fails_at_the_other_side() {
    let sites = Sites::new();
    let (near, far) = sites.line(&LineOptions::default());
    drop(near);
    refused(Err::<(), _>(failure(&far)), ErrorKind::Io, "ended without closing it");
}

#[test]
fn a_silent_network_is_noticed_at_both_sides_and_a_waiting_sender_fails() {
    let sites = Sites::with(impatient());
    let relay = Relay::to(sites.listener.local_address());
    let (near, far) = sites.line_at(&relay.address(), &impatient());
    // Longer than the time of silence: a line that is idle stays.
    let idle = near.receive(&Class::ALL, Duration::from_millis(1600)).expect("alive");
    assert_eq!(idle, Received::Nothing);
    near.send(Class::Control, frame(1, Vec::new())).expect("the line works");
    assert_eq!(receive(&far, &Class::ALL).1.stream, 1);
    relay.freeze();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let send_forever = || loop {
            if let Err(error) = near.send(Class::Bulk, frame(0, vec![0; MAX_BODY_BYTES])) {
                return error;
            }
        };
        let sender = scope.spawn(send_forever);
        for error in [failure(&far), failure(&near), sender.join().expect("no panic")] {
            refused(Err::<(), _>(error), ErrorKind::Io, "silent for 0.8 s");
        }
    });
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[test]
fn a_broken_network_is_noticed_and_the_next_line_works() {
    let sites = Sites::new();
    let relay = Relay::to(sites.listener.local_address());
    let (near, far) = sites.line_at(&relay.address(), &LineOptions::default());
    relay.cut();
    assert_eq!(failure(&near).kind(), ErrorKind::Io);
    assert_eq!(failure(&far).kind(), ErrorKind::Io);
    let (near, far) = sites.line_at(&relay.address(), &LineOptions::default());
    near.send(Class::Fetch, frame(3, vec![1])).expect("the line works");
    assert_eq!(receive(&far, &[Class::Fetch]).1, frame(3, vec![1]));
}

#[test]
fn a_removed_peer_loses_its_lines_at_once_and_cannot_come_back() {
    let sites = Sites::new();
    let (near, far) = sites.line(&LineOptions::default());
    sites.listener.set_peers([identity().key()]);
    refused(Err::<(), _>(failure(&far)), ErrorKind::Forbidden, "its link was removed");
    assert_eq!(failure(&near).kind(), ErrorKind::Io);
    refused(sites.connect_as(&sites.near), ErrorKind::Forbidden, "may have been removed");
}

#[test]
fn an_identity_survives_its_bytes_and_keys_survive_their_text() {
    let identity = identity();
    let again = Identity::from_pkcs8(identity.pkcs8()).expect("its own bytes");
    assert_eq!(again.key(), identity.key());
    let text = identity.key().to_string();
    assert_eq!(text.parse::<PeerKey>().expect("its own text"), identity.key());
    let mut damaged = identity.pkcs8().to_vec();
    damaged.truncate(20);
    refused(Identity::from_pkcs8(&damaged), ErrorKind::Corrupt, "damaged");
    for wrong in [&text[1..], "", "+1", &text.replace(|_| true, "é")] {
        refused(wrong.parse::<PeerKey>(), ErrorKind::InvalidInput, "is not a key");
    }
    refused(format!("+{}", &text[1..]).parse::<PeerKey>(), ErrorKind::InvalidInput, "is not a key");
}

#[test]
fn unreachable_addresses_are_reported() {
    let sites = Sites::new();
    let address = sites.address();
    refused(
        connect("no port", &sites.near, sites.far.key(), &LineOptions::default()),
        ErrorKind::InvalidInput,
        "HOST:PORT",
    );
    sites.listener.close();
    refused(sites.listener.accept(LONG), ErrorKind::Io, "has ended");
    refused(
        connect(&address, &sites.near, sites.far.key(), &LineOptions::default()),
        ErrorKind::Io,
        "it cannot be reached",
    );
}

#[test]
fn a_line_in_memory_behaves_alike() {
    let (near, far) = pair();
    near.send(Class::Bulk, frame(1, vec![1])).expect("the line works");
    near.send(Class::Control, frame(2, Vec::new())).expect("the line works");
    assert_eq!(receive(&far, &Class::ALL).1.stream, 2, "control goes first");
    assert_eq!(receive(&far, &Class::ALL).1.stream, 1);
    refused(
        near.send(Class::Bulk, frame(0, vec![0; MAX_BODY_BYTES + 1])),
        ErrorKind::InvalidInput,
        "longer",
    );
    near.close();
    assert_eq!(far.receive(&Class::ALL, LONG).expect("no failure"), Received::Closed);
    let (near, far) = pair();
    near.cut();
    assert_eq!(failure(&far).kind(), ErrorKind::Io);
    let (near, far) = pair();
    drop(near);
    assert_eq!(failure(&far).kind(), ErrorKind::Io);
}
