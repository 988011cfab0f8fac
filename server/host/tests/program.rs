//! The program, as a server starts it.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use coldrise_host::{read_frame, write_frame, Envelope, Reply, Request};

/// A server asks again after 15 s, which would hide a message that was left in a buffer.
#[test]
fn messages_that_come_at_once_are_answered_at_once() {
    let mut program = Command::new(env!("CARGO_BIN_EXE_coldrise-host"))
        .arg("serve")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut messages = Vec::new();
    for number in 1..=3 {
        write_frame(&mut messages, &Envelope { number, request: Request::FreePort }).unwrap();
    }
    let mut input = program.stdin.take().unwrap();
    input.write_all(&messages).unwrap();
    let mut output = program.stdout.take().unwrap();
    let (sender, replies) = channel();
    let reader = std::thread::spawn(move || {
        while let Ok(Some(reply)) = read_frame::<Reply>(&mut output) {
            sender.send(reply.number).unwrap();
        }
    });
    let mut answered: Vec<u64> =
        (0..3).map_while(|_| replies.recv_timeout(Duration::from_secs(10)).ok()).collect();
    answered.sort_unstable();
    drop(input);
    assert!(program.wait().unwrap().success());
    reader.join().unwrap();
    assert_eq!(answered, [1, 2, 3]);
}
