//! The side that listens: one port for lines of pinned peers and for pairing.

use std::collections::HashSet;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustls::{ServerConfig, ServerConnection};

use crate::code::{PairingCode, ProvenKeys};
use crate::connected::TcpLine;
use crate::frame::Class;
use crate::gate::{Gate, Pass};
use crate::hello::{HELLO_BYTES, Hello, Refusal, SessionId, Welcome};
use crate::identity::{Identity, PeerKey};
use crate::options::{LineOptions, MAX_BULK_CONNECTIONS};
use crate::peers::{Joined, Peers, Proof};
use crate::socket;
use crate::stream::{TlsStream, drain};
use crate::tls;

/// Most time for TLS and the first message, and then again for all connections of a line.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(15);
/// Pause after the system refused to accept a connection, such as for too many open files.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// Accepts lines of pinned peers, and pairings while there is an invitation. At first there are
/// neither peers nor an invitation: all are refused.
pub struct Listener {
    shared: Arc<Shared>,
    address: SocketAddr,
    arrivals: Mutex<Receiver<Arrival>>,
}

/// An event of a listener.
pub enum Arrival {
    /// A line, whole.
    Line {
        /// Whose it is.
        peer: PeerKey,
        /// The line.
        line: TcpLine,
    },
    /// A peer proved the code, which is used up now. Store the key, then accept.
    Pairing(Box<Pairing>),
    /// [`crate::MAX_WRONG_CODES`] wrong codes: the invitation is void. A peer tries codes.
    CodeSpoiled,
    /// Nothing, within the time.
    Nothing,
}

/// A new peer that waits for the answer. Dropped, it is refused.
pub struct Pairing {
    stream: TlsStream,
    key: PeerKey,
    address: SocketAddr,
    proof: [u8; 32],
}

struct Shared {
    socket: TcpListener,
    key: PeerKey,
    config: Arc<ServerConfig>,
    options: LineOptions,
    gate: Arc<Gate>,
    peers: Arc<Peers>,
    arrivals: Sender<Arrival>,
    is_closed: AtomicBool,
}

/// A connection that has proved a key, and its first message.
struct Greeted {
    stream: TlsStream,
    key: PeerKey,
    hello: std::result::Result<Hello, Refusal>,
}

impl Pairing {
    /// The key to pin.
    pub fn key(&self) -> PeerKey {
        self.key
    }

    /// Where it comes from.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Tells the peer that its key is stored, and proves this side's.
    ///
    /// # Errors
    /// `Io` if the peer has gone. Then it does not know this side's key: pair again.
    pub fn accept(self) -> Result<()> {
        let answer = Welcome::Paired { proof: self.proof }.encode();
        self.stream
            .write_all_until(&answer, Instant::now() + HANDSHAKE_LIMIT)
            .context(|| format!("pairing with {}", self.address))
    }
}

impl Listener {
    /// Listens at `address`, a host or IP address and a port.
    ///
    /// # Errors
    /// `InvalidInput` if `address` has no port; `Io` if the port is taken.
    pub fn bind(address: &str, identity: &Identity, options: LineOptions) -> Result<Listener> {
        let said = || format!("listening for other sites at {address}");
        let socket = TcpListener::bind(address).map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidInput => {
                Error::new(ErrorKind::InvalidInput, format!("{}: it is not HOST:PORT", said()))
            }
            _ => Error::io(said(), error),
        })?;
        let own_address = socket.local_addr().context(said)?;
        let peers = Arc::<Peers>::default();
        let admitting = Arc::clone(&peers);
        let config = tls::server(identity, move |key| admitting.admits(key))?;
        let (arrivals, receiver) = channel();
        let shared = Arc::new(Shared {
            socket,
            key: identity.key(),
            config,
            options,
            gate: Arc::default(),
            peers,
            arrivals,
            is_closed: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        spawn(move || accepting.accept_all()).context(said)?;
        Ok(Listener { shared, address: own_address, arrivals: Mutex::new(receiver) })
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Pins these keys and no others. Lines of keys that are gone fail at once.
    pub fn set_peers(&self, peers: impl IntoIterator<Item = PeerKey>) {
        self.shared.peers.set_pinned(peers.into_iter().collect::<HashSet<_>>());
    }

    /// Lets one peer pair that knows the code. Replaces an earlier invitation.
    pub fn invite(&self, code: PairingCode, valid: Duration) {
        self.shared.peers.invite(code, valid);
    }

    /// The next arrival; waits for it for `limit` at most.
    ///
    /// # Errors
    /// `Io` after [`Listener::close`].
    pub fn accept(&self, limit: Duration) -> Result<Arrival> {
        let arrivals = self.arrivals.lock();
        let limit = if self.shared.is_closed() { Duration::ZERO } else { limit };
        match arrivals.recv_timeout(limit) {
            Ok(Arrival::Nothing) | Err(_) if self.shared.is_closed() => {
                Err(Error::new(ErrorKind::Io, "listening for other sites has ended"))
            }
            Ok(arrival) => Ok(arrival),
            Err(_) => Ok(Arrival::Nothing),
        }
    }

    /// Frees the port. Open lines keep running.
    pub fn close(&self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        // Wakes who waits in `accept`; and the thread below. The socket is there, so nothing can fail.
        let _ = self.shared.arrivals.send(Arrival::Nothing);
        let _ = rustix::net::shutdown(&self.shared.socket, rustix::net::Shutdown::Both);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name("line-accept".to_owned()).spawn(work)?;
    Ok(())
}

impl Shared {
    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    fn accept_all(self: Arc<Shared>) {
        while !self.is_closed() {
            match self.socket.accept() {
                Ok((socket, address)) => {
                    // Beyond the limits the socket is closed without an answer.
                    let Some(pass) = self.gate.enter(address.ip()) else { continue };
                    let shared = Arc::clone(&self);
                    // If the system has no thread for it, closed, too.
                    let _ = spawn(move || shared.greet(socket, address, pass));
                }
                Err(_) if self.is_closed() => return,
                Err(_) => std::thread::sleep(REFUSED_PAUSE),
            }
        }
    }

    /// From TLS to the answer. A connection that fails here concerns its peer only.
    fn greet(&self, socket: TcpStream, address: SocketAddr, pass: Pass) {
        let until = Instant::now() + HANDSHAKE_LIMIT;
        let Ok(copy) = socket.try_clone() else { return };
        match self.greeted(socket, until) {
            Ok(Greeted { stream, key, hello }) => {
                // The peer sees for itself that its connection ended.
                let _ = match hello {
                    Ok(Hello::Begin { bulk_connections, bulk_window_bytes }) => {
                        drop(pass);
                        let wanted = usize::from(bulk_connections);
                        self.begin(stream, key, address, wanted, bulk_window_bytes)
                    }
                    Ok(Hello::Join { class, session }) => self.join(stream, key, class, &session),
                    Ok(Hello::Pair { proof }) => self.pair(stream, key, address, &proof),
                    Err(refusal) => refuse(&stream, refusal),
                };
            }
            Err(_) => drain(&copy),
        }
    }

    fn greeted(&self, socket: TcpStream, until: Instant) -> Result<Greeted> {
        let tls = ServerConnection::new(Arc::clone(&self.config))
            .map_err(|error| Error::with_source(ErrorKind::Internal, "preparing TLS", error))?;
        let stream = TlsStream::handshake(socket, tls, until)?;
        let key = stream.peer_key().ok_or_else(|| Refusal::UnknownKey.error())?;
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact_until(&mut hello, until)?;
        socket::prepare(stream.socket(), self.options.silence)?;
        Ok(Greeted { stream, key, hello: Hello::decode(&hello) })
    }

    /// Begins a line, waits for its other connections, and hands it over.
    fn begin(
        &self,
        control: TlsStream,
        key: PeerKey,
        address: SocketAddr,
        wanted_connections: usize,
        bulk_window_bytes: u64,
    ) -> Result<()> {
        let (session, joining) = match self.peers.begin_line(key)? {
            Ok(begun) => begun,
            Err(refusal) => return refuse(&control, refusal),
        };
        let own_wish = usize::from(self.options.wanted_connections(control.socket()));
        let bulk = own_wish.max(wanted_connections).min(MAX_BULK_CONNECTIONS);
        let until = Instant::now() + HANDSHAKE_LIMIT;
        let welcome = Welcome::Begun {
            bulk_connections: bulk as u8,
            bulk_window_bytes: self.options.bulk_window_bytes,
            session,
        };
        let streams = control
            .write_all_until(&welcome.encode(), until)
            .and_then(|()| collect(control, &joining, bulk, until));
        self.peers.end_joining(&session);
        let line = TcpLine::start(address.to_string(), streams?, &self.options, bulk_window_bytes)?;
        self.gate.know(address.ip());
        if self.peers.note_line(key, line.connections()) {
            // Fails only if the listener was dropped.
            let _ = self.arrivals.send(Arrival::Line { peer: key, line });
        }
        Ok(())
    }

    fn join(
        &self,
        stream: TlsStream,
        key: PeerKey,
        class: Class,
        session: &SessionId,
    ) -> Result<()> {
        let line = match self.peers.line_to_join(key, session) {
            Ok(line) => line,
            Err(refusal) => return refuse(&stream, refusal),
        };
        stream.write_all_until(&Welcome::Joined.encode(), Instant::now() + HANDSHAKE_LIMIT)?;
        // Fails if the line is complete or has ended meanwhile.
        let _ = line.send((class, stream));
        Ok(())
    }

    fn pair(
        &self,
        stream: TlsStream,
        key: PeerKey,
        address: SocketAddr,
        proof: &[u8; 32],
    ) -> Result<()> {
        let keys = ProvenKeys { exporter: stream.exporter()?, near: key, far: self.key };
        let arrival = match self.peers.check_code(&keys, proof) {
            Proof::Right(code) => {
                let proof = code.far_proof(&keys);
                Arrival::Pairing(Box::new(Pairing { stream, key, address, proof }))
            }
            Proof::Wrong => return refuse(&stream, Refusal::WrongCode),
            Proof::Spoiled => {
                refuse(&stream, Refusal::WrongCode)?;
                Arrival::CodeSpoiled
            }
        };
        let _ = self.arrivals.send(arrival);
        Ok(())
    }
}

/// Waits for the other connections of a line: one for fetch and `bulk` others.
fn collect(
    control: TlsStream,
    joining: &Receiver<Joined>,
    bulk: usize,
    until: Instant,
) -> Result<Vec<Joined>> {
    let mut streams = vec![(Class::Control, control)];
    while streams.len() < 2 + bulk {
        let left = until.saturating_duration_since(Instant::now());
        let joined = joining
            .recv_timeout(left)
            .map_err(|_| Error::new(ErrorKind::Io, "not all connections of a line came"))?;
        let most = if joined.0 == Class::Fetch { 1 } else { bulk };
        if streams.iter().filter(|(class, _)| *class == joined.0).count() < most {
            streams.push(joined);
        }
    }
    // Statistics look at a bulk connection last.
    streams.sort_by_key(|(class, _)| class.index());
    Ok(streams)
}

fn refuse(stream: &TlsStream, refusal: Refusal) -> Result<()> {
    let answer = Welcome::Refused(refusal).encode();
    stream.write_all_until(&answer, Instant::now() + HANDSHAKE_LIMIT)?;
    drain(stream.socket());
    Ok(())
}
