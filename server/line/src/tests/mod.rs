//! Lines over loopback.

mod hostile;
mod lines;
mod pairing;
mod relay;

use std::time::Duration;

use coldrise_block::{ErrorKind, Result};

use crate::*;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(30);

/// Two sides that have each other's key.
struct Sites {
    near: Identity,
    far: Identity,
    listener: Listener,
}

impl Sites {
    fn new() -> Sites {
        Sites::with(LineOptions::default())
    }

    fn with(options: LineOptions) -> Sites {
        let (near, far) = (identity(), identity());
        let listener = Listener::bind("127.0.0.1:0", &far, options).expect("a free port");
        listener.set_peers([near.key()]);
        Sites { near, far, listener }
    }

    fn address(&self) -> String {
        self.listener.local_address().to_string()
    }

    /// A line, both its ends, the near one first.
    fn line(&self, options: &LineOptions) -> (TcpLine, TcpLine) {
        self.line_at(&self.address(), options)
    }

    fn line_at(&self, address: &str, options: &LineOptions) -> (TcpLine, TcpLine) {
        let near = connect(address, &self.near, self.far.key(), options).expect("a line");
        (near, self.accepted())
    }

    fn accepted(&self) -> TcpLine {
        match self.listener.accept(LONG).expect("the listener listens") {
            Arrival::Line { peer, line } if peer == self.near.key() => line,
            _ => panic!("no line arrived"),
        }
    }

    fn connect_as(&self, identity: &Identity) -> Result<TcpLine> {
        connect(&self.address(), identity, self.far.key(), &LineOptions::default())
    }

    /// That nothing arrived which the listener hands over.
    fn nothing_arrived(&self) -> bool {
        matches!(self.listener.accept(Duration::ZERO), Ok(Arrival::Nothing))
    }
}

fn identity() -> Identity {
    Identity::generate().expect("a new key")
}

fn frame(stream: u32, body: Vec<u8>) -> Frame {
    Frame { stream, kind: 7, body }
}

/// The next frame of these classes.
fn receive(line: &dyn Line, from: &[Class]) -> (Class, Frame) {
    match line.receive(from, LONG).expect("the line works") {
        Received::Frame { class, frame } => (class, frame),
        other => panic!("a frame, not {other:?}"),
    }
}

/// The error that ends a line.
fn failure(line: &dyn Line) -> coldrise_block::Error {
    loop {
        match line.receive(&Class::ALL, LONG) {
            Ok(Received::Frame { .. }) => {}
            Ok(other) => panic!("a failure, not {other:?}"),
            Err(error) => return error,
        }
    }
}

fn refused<T>(result: Result<T>, kind: ErrorKind, word: &str) {
    let error = result.err().expect("it is refused");
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.full_message().contains(word), "{error:?}");
}
