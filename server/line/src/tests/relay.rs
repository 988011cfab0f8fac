//! A network between two sites that looks at what passes, stops, and breaks.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// Passes each connection on to the target.
pub(super) struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_frozen: bool,
    sockets: Vec<TcpStream>,
    /// What came from the dialing side, by connection.
    recorded: Vec<Vec<u8>>,
}

impl Relay {
    pub(super) fn to(target: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("its address");
        let shared = Arc::<Shared>::default();
        let relay = Relay { address, shared: Arc::clone(&shared) };
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let near = near.expect("a connection");
                let far = TcpStream::connect(target).expect("the target");
                shared.pass_on(near, far);
            }
        });
        relay
    }

    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Nothing passes any more; the connections stay.
    pub(super) fn freeze(&self) {
        self.shared.state.lock().is_frozen = true;
    }

    /// Breaks all connections.
    pub(super) fn cut(&self) {
        for socket in &self.shared.state.lock().sockets {
            // It may have ended.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// What the dialing side has sent, by connection.
    pub(super) fn recorded(&self) -> Vec<Vec<u8>> {
        self.shared.state.lock().recorded.clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
        self.shared.state.lock().is_frozen = false;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn pass_on(self: &Arc<Shared>, near: TcpStream, far: TcpStream) {
        let mut state = self.state.lock();
        let connection = state.recorded.len();
        state.recorded.push(Vec::new());
        for (from, to, record) in [(&near, &far, Some(connection)), (&far, &near, None)] {
            let copy = |socket: &TcpStream| socket.try_clone().expect("a second handle");
            let (from, to) = (copy(from), copy(to));
            state.sockets.push(copy(&from));
            let shared = Arc::clone(self);
            std::thread::spawn(move || shared.pass_one_way(from, to, record));
        }
    }

    fn pass_one_way(&self, mut from: TcpStream, mut to: TcpStream, record: Option<usize>) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count) = from.read(&mut buffer) {
            let mut state = self.state.lock();
            self.changed.wait_while(&mut state, |state| state.is_frozen);
            if let Some(connection) = record {
                state.recorded[connection].extend_from_slice(&buffer[..count]);
            }
            drop(state);
            if count == 0 || to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }
}
