//! The side that dials.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use crate::code::{PairingCode, ProvenKeys};
use crate::connected::TcpLine;
use crate::frame::Class;
use crate::hello::{HELLO_BYTES, Hello, KNOWS_NO_LINE, REFUSES_KEY, SessionId, Welcome};
use crate::identity::{Identity, PeerKey};
use crate::options::{LineOptions, MAX_BULK_CONNECTIONS};
use crate::socket;
use crate::stream::{NETWORK_ADVICE, TlsStream};
use crate::tls;

/// Most time that one connection takes to be made.
const CONNECT_LIMIT: Duration = Duration::from_secs(15);
/// Most time that the other side takes to store a new link.
const PAIRING_LIMIT: Duration = Duration::from_secs(60);

/// Makes a line to a peer that listens at `address`, a host or IP address and a port.
///
/// # Errors
/// `InvalidInput` if `address` has no port; `Forbidden` if another key answers or this side's key is
/// refused; `Busy` if the peer has too many lines of this side; `Unsupported` if it speaks another version; `Io` if
/// it cannot be reached.
pub fn connect(
    address: &str,
    identity: &Identity,
    peer: PeerKey,
    options: &LineOptions,
) -> Result<TcpLine> {
    connect_all(address, identity, peer, options)
        .context(|| format!("connecting to the other site at {address}"))
}

fn connect_all(
    address: &str,
    identity: &Identity,
    peer: PeerKey,
    options: &LineOptions,
) -> Result<TcpLine> {
    let config = tls::client(identity, move |key| *key == peer)?;
    first_of(address, |remote| match begin(address, remote, &config, options) {
        // It was restarted in between: the next time it knows.
        Err(error) if error.message().contains(KNOWS_NO_LINE) => {
            begin(address, remote, &config, options)
        }
        begun => begun,
    })
}

/// Begins a line. Its other connections are made meanwhile, as many as this side wants: so it takes four round trips, and three more
/// only if the other side wants more of them.
fn begin(
    address: &str,
    remote: SocketAddr,
    config: &Arc<ClientConfig>,
    options: &LineOptions,
) -> Result<TcpLine> {
    let socket = reach(remote)?;
    socket::prepare(&socket, options.silence)?;
    let wish = options.wanted_connections(&socket);
    std::thread::scope(|scope| {
        let join = |class| {
            let (session, given) = channel();
            let thread = scope.spawn(move || join_one(remote, config, options, class, &given));
            (session, thread)
        };
        let classes = std::iter::once(Class::Fetch)
            .chain(std::iter::repeat_n(Class::Bulk, usize::from(wish)));
        // Without a session, because this fails, they end.
        let mut joining: Vec<_> = classes.map(join).collect();
        let control = secure(socket, remote, config)?;
        let hello =
            Hello::Begin { bulk_connections: wish, bulk_window_bytes: options.bulk_window_bytes };
        let answer = ask(&control, &hello, CONNECT_LIMIT)?;
        let Welcome::Begun { bulk_connections, bulk_window_bytes, session } = answer else {
            return Err(out_of_turn());
        };
        let bulk = usize::from(bulk_connections);
        if bulk_connections < wish || bulk > MAX_BULK_CONNECTIONS {
            return Err(out_of_turn());
        }
        joining.extend(std::iter::repeat_n(Class::Bulk, bulk - usize::from(wish)).map(join));
        let mut streams = vec![(Class::Control, control)];
        for (given, _) in &joining {
            // One that failed says why below.
            let _ = given.send(session);
        }
        for (_, thread) in joining {
            let defect = |_| Error::new(ErrorKind::Internal, "a thread of a line failed");
            streams.push(thread.join().map_err(defect)??);
        }
        TcpLine::start(address.to_owned(), streams, options, bulk_window_bytes)
    })
}

/// Makes a further connection, which joins the line once its session is known.
fn join_one(
    remote: SocketAddr,
    config: &Arc<ClientConfig>,
    options: &LineOptions,
    class: Class,
    session: &Receiver<SessionId>,
) -> Result<(Class, TlsStream)> {
    let stream = dial_one(remote, config)?;
    socket::prepare(stream.socket(), options.silence)?;
    let session = session.recv().map_err(|_| out_of_turn())?;
    match ask(&stream, &Hello::Join { class, session }, CONNECT_LIMIT)? {
        Welcome::Joined => Ok((class, stream)),
        _ => Err(out_of_turn()),
    }
}

/// Pairs with the side that made `code` and listens at `address`. When this returns, that side has
/// stored this side's key; the caller stores the key that this gives.
///
/// # Errors
/// `Forbidden` if the code is wrong, used or expired, or if another host answers; otherwise as [`connect`].
pub fn pair_with(address: &str, identity: &Identity, code: &PairingCode) -> Result<PeerKey> {
    let paired = pair_at(address, identity, code).map_err(|error| match error.message() {
        // Without an invitation, it lets in no new key.
        text if text.contains(REFUSES_KEY) => {
            let text = "it has no open code: it was used, has expired, or was not seen yet";
            let advice = "create a code at the other site while its server runs, and try again after a second";
            Error::new(ErrorKind::Forbidden, text).advise(advice)
        }
        _ => error,
    });
    paired.context(|| format!("pairing with the other site at {address}"))
}

fn pair_at(address: &str, identity: &Identity, code: &PairingCode) -> Result<PeerKey> {
    // Whose key it is, the code will prove.
    let config = tls::client(identity, |_| true)?;
    let stream = dial(address, &config)?;
    let far = stream.peer_key().ok_or_else(out_of_turn)?;
    let keys = ProvenKeys { exporter: stream.exporter()?, near: identity.key(), far };
    let hello = Hello::Pair { proof: code.near_proof(&keys) };
    match ask(&stream, &hello, PAIRING_LIMIT)? {
        Welcome::Paired { proof } if code.is_far_proof(&keys, &proof) => Ok(far),
        Welcome::Paired { .. } => {
            let text = "the host that answers there does not know the code";
            let advice = "find out who answers at this address; make a new code at the other site";
            Err(Error::new(ErrorKind::Forbidden, text).advise(advice))
        }
        _ => Err(out_of_turn()),
    }
}

fn out_of_turn() -> Error {
    let advice = "run the same version of Coldrise at both sites";
    Error::new(ErrorKind::Corrupt, "the other side broke the protocol").advise(advice)
}

/// Sends the first message of a connection, and receives the answer.
pub(crate) fn ask(stream: &TlsStream, hello: &Hello, limit: Duration) -> Result<Welcome> {
    let until = Instant::now() + limit;
    stream.write_all_until(&hello.encode(), until)?;
    let mut answer = [0; HELLO_BYTES];
    stream.read_exact_until(&mut answer, until)?;
    Welcome::decode(&answer)
}

/// Connects to the first address of a name that answers.
pub(crate) fn dial(address: &str, config: &Arc<ClientConfig>) -> Result<TlsStream> {
    first_of(address, |remote| dial_one(remote, config))
}

/// Tries the addresses of a name, until one answers.
fn first_of<T>(address: &str, to: impl Fn(SocketAddr) -> Result<T>) -> Result<T> {
    let found = address.to_socket_addrs().map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidInput => {
            Error::new(ErrorKind::InvalidInput, "it is not of the form HOST:PORT")
        }
        _ => Error::with_source(ErrorKind::Io, "looking its name up failed", error)
            .advise(NETWORK_ADVICE),
    })?;
    let mut last = Error::new(ErrorKind::Io, "its name has no address").advise(NETWORK_ADVICE);
    for remote in found {
        match to(remote) {
            Err(error) if error.kind() == ErrorKind::Io => last = error,
            result => return result,
        }
    }
    Err(last)
}

fn dial_one(remote: SocketAddr, config: &Arc<ClientConfig>) -> Result<TlsStream> {
    secure(reach(remote)?, remote, config)
}

fn reach(remote: SocketAddr) -> Result<TcpStream> {
    TcpStream::connect_timeout(&remote, CONNECT_LIMIT).map_err(|error| {
        Error::with_source(ErrorKind::Io, "it cannot be reached", error).advise(NETWORK_ADVICE)
    })
}

fn secure(socket: TcpStream, remote: SocketAddr, config: &Arc<ClientConfig>) -> Result<TlsStream> {
    let until = Instant::now() + CONNECT_LIMIT;
    // Not sent, not checked: TLS wants some name.
    let name = ServerName::IpAddress(remote.ip().into());
    let tls = ClientConnection::new(Arc::clone(config), name)
        .map_err(|error| Error::with_source(ErrorKind::Internal, "preparing TLS failed", error))?;
    TlsStream::handshake(socket, tls, until)
}
