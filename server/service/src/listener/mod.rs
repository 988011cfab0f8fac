//! Connections: HTTPS on TCP, plain HTTP on a Unix socket.
//!
//! Each connection is a task. [`connections::Connections`] bounds their number: when it is reached, one
//! without a known caller, or the longest idle one, is closed for a new one, so a crowd cannot lock
//! others out. Limits of size: 32 to 64 KiB and 64 headers for the head of a request. Limits of time: 10 s for TLS,
//! 10 s for the head of a request, 60 s for a client that does not take its answer.

mod connections;
mod tls;

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use coldrise_block::{Context, Error, ErrorKind, Result};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::watch;
use tower::ServiceExt;

use crate::api::Problem;
use crate::folders::make_socket_folder;
use crate::service::SharedService;
pub(crate) use connections::Busy;
use connections::{Connections, Slot};
pub(crate) use tls::{Certificate, fingerprint};

const TLS_TIMEOUT: Duration = Duration::from_secs(10);
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without an acknowledgement of sent data.
const SEND_TIMEOUT_MS: u32 = 60_000;
/// Time for connections to end when the service stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Wait after a failed accept, for example when no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
const MAX_TCP_CONNECTIONS: usize = 1024;
const MAX_UNIX_CONNECTIONS: usize = 256;
const MAX_HTTP2_STREAMS: u32 = 64;
/// Heads of requests up to this size are always taken, and those above twice the size never, in bytes.
/// hyper compares what it has before it reads more.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// Maximum number of headers.
const MAX_HEADERS: usize = 64;

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Peer {
    /// A TCP client.
    Tcp(SocketAddr),
    /// A process of this host.
    Unix {
        /// Its effective user id.
        uid: u32,
    },
}

/// The connection of a request.
#[derive(Clone)]
pub(crate) struct Connection(Arc<Slot>);

impl Connection {
    /// Its caller has proved who they are: it keeps its place while it is busy.
    pub(crate) fn set_known(&self) {
        self.0.set_known();
    }

    /// The connection is busy while the result lives, for answers that outlive their request.
    pub(crate) fn busy(&self) -> Busy {
        self.0.busy()
    }
}

/// The listeners of the service.
pub(crate) struct Listeners {
    router: Router,
    certificate: Arc<Certificate>,
    service: SharedService,
    stop: watch::Receiver<bool>,
    tcp: Arc<Connections>,
    unix: Arc<Connections>,
    /// The inode of the Unix socket.
    socket: Mutex<Option<u64>>,
}

impl Listeners {
    pub(crate) fn new(
        router: Router,
        certificate: Arc<Certificate>,
        service: SharedService,
        stop: watch::Receiver<bool>,
    ) -> Listeners {
        let tcp = Arc::new(Connections::new(MAX_TCP_CONNECTIONS));
        let unix = Arc::new(Connections::new(MAX_UNIX_CONNECTIONS));
        Listeners { router, certificate, service, stop, tcp, unix, socket: Mutex::new(None) }
    }

    /// The service.
    pub(crate) fn service(&self) -> &SharedService {
        &self.service
    }

    /// Binds the HTTPS port: on the loopback address until a user exists. Returns the socket and
    /// whether it is the configured one.
    ///
    /// # Errors
    /// Errors of binding, with the address.
    pub(crate) async fn bind_tcp(&self, has_users: bool) -> Result<(TcpListener, bool)> {
        let wanted = self.service.options.listen;
        let address =
            if has_users || wanted.ip().is_loopback() { wanted } else { loopback(wanted) };
        let listener = TcpListener::bind(address).await;
        let listener = listener.context(|| format!("listening on {address}"))?;
        Ok((listener, address == wanted))
    }

    /// Binds the Unix socket, and removes the one of a killed service.
    ///
    /// # Errors
    /// Errors of binding, with the path.
    pub(crate) fn bind_unix(&self) -> Result<UnixListener> {
        let path = &self.service.options.socket;
        let what = || format!("listening on {}", path.display());
        if let Some(folder) = path.parent() {
            make_socket_folder(folder)?;
        }
        remove_stale_socket(path)?;
        let listener = UnixListener::bind(path).context(what)?;
        *self.socket.lock() = inode(path);
        // Every user may connect; the peer's credentials decide.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).context(what)?;
        Ok(listener)
    }

    /// Removes the Unix socket if it is still this service's.
    pub(crate) fn remove_socket(&self) {
        let path = &self.service.options.socket;
        let own = *self.socket.lock();
        if own.is_some() && inode(path) == own {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Serves TCP clients until the service stops, or until `end` resolves.
    pub(crate) async fn serve_tcp(
        self: Arc<Self>,
        listener: TcpListener,
        end: impl std::future::Future<Output = ()>,
    ) {
        let mut stop = self.stop.clone();
        tokio::pin!(end);
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = stop.wait_for(|stop| *stop) => return,
                () = &mut end => return,
            };
            match accepted {
                Ok((stream, address)) => {
                    let Some(slot) = self.tcp.take(Some(address.ip().to_canonical())) else {
                        continue;
                    };
                    let listeners = self.clone();
                    tokio::spawn(async move { listeners.serve_tls(stream, address, slot).await });
                }
                Err(error) => pause(&error).await,
            }
        }
    }

    /// Serves clients of the Unix socket until the service stops.
    pub(crate) async fn serve_unix(self: Arc<Self>, listener: UnixListener) {
        let mut stop = self.stop.clone();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = stop.wait_for(|stop| *stop) => return,
            };
            match accepted {
                Ok((stream, _)) => {
                    let Ok(peer) = stream.peer_cred() else { continue };
                    let Some(slot) = self.unix.take(None) else { continue };
                    let listeners = self.clone();
                    let peer = Peer::Unix { uid: peer.uid() };
                    tokio::spawn(
                        async move { listeners.serve_http(stream, false, peer, slot).await },
                    );
                }
                Err(error) => pause(&error).await,
            }
        }
    }

    async fn serve_tls(self: Arc<Self>, stream: TcpStream, address: SocketAddr, slot: Slot) {
        let _ = stream.set_nodelay(true);
        let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, SEND_TIMEOUT_MS);
        let accepted = tokio::select! {
            accepted = tokio::time::timeout(TLS_TIMEOUT, self.certificate.acceptor().accept(stream)) => accepted,
            () = slot.closed() => return,
        };
        let Ok(Ok(stream)) = accepted else { return };
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        self.serve_http(stream, is_http2, Peer::Tcp(address), slot).await;
    }

    async fn serve_http<S>(self: Arc<Self>, stream: S, is_http2: bool, peer: Peer, slot: Slot)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let slot = Arc::new(slot);
        let (router, requests) = (self.router.clone(), slot.clone());
        let service = hyper::service::service_fn(move |request: Request<Incoming>| {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(peer);
            request.extensions_mut().insert(Connection(requests.clone()));
            let busy = requests.busy();
            let router = router.clone();
            async move {
                let answer = match request.headers().len() {
                    0..=MAX_HEADERS => router.oneshot(request).await,
                    _ => Ok(too_many_headers()),
                };
                // Busy until the last byte of the body is taken or given up.
                answer.map(|answer| answer.map(|body| connections::BusyBody::new(body, busy)))
            }
        });
        let stream = TokioIo::new(stream);
        // The version is known from TLS: nothing waits for the first bytes to tell.
        if is_http2 {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .timer(TokioTimer::new())
                .max_concurrent_streams(MAX_HTTP2_STREAMS)
                .max_header_list_size(MAX_HEAD_BYTES as u32)
                .keep_alive_interval(Duration::from_secs(20))
                .keep_alive_timeout(Duration::from_secs(20));
            let connection = builder.serve_connection(stream, service);
            self.drive(connection, |connection| connection.graceful_shutdown(), &slot).await;
        } else {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .max_buf_size(MAX_HEAD_BYTES);
            // A websocket takes the stream over, and holds the slot.
            let connection = builder.serve_connection(stream, service).with_upgrades();
            self.drive(connection, |connection| connection.graceful_shutdown(), &slot).await;
        }
    }

    /// Serves one connection until it ends, has to make room, or the service stops.
    async fn drive<C: Future>(&self, connection: C, shut_down: impl Fn(Pin<&mut C>), slot: &Slot) {
        tokio::pin!(connection);
        let mut stop = self.stop.clone();
        let first_request = tokio::time::sleep(HEAD_TIMEOUT);
        tokio::pin!(first_request);
        let mut is_stopping = false;
        loop {
            tokio::select! {
                _ = &mut connection => return,
                () = slot.closed() => return,
                () = &mut first_request, if !slot.has_asked() => return,
                _ = stop.wait_for(|stop| *stop), if !is_stopping => {
                    is_stopping = true;
                    shut_down(connection.as_mut());
                }
                () = slot.asked(), if !slot.has_asked() => {}
            }
        }
    }

    /// Waits until all connections have ended, at most [`STOP_TIMEOUT`].
    pub(crate) async fn wait_for_end(&self) {
        let ended = async {
            while self.tcp.count() + self.unix.count() > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let _ = tokio::time::timeout(STOP_TIMEOUT, ended).await;
    }
}

fn inode(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|found| found.ino())
}

/// Removes the socket of a service that was killed, and nothing else.
///
/// # Errors
/// `Busy` if another process listens there; `InvalidInput` if it is not a socket.
fn remove_stale_socket(path: &Path) -> Result<()> {
    let found = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        found => found.context(|| format!("reading {}", path.display()))?,
    };
    if !found.file_type().is_socket() {
        let text = format!("--socket {}: there is a file, and it is not a socket", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text).advise("name another path"));
    }
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        let text = format!("another process listens on {}", path.display());
        return Err(Error::new(ErrorKind::Busy, text)
            .advise("stop the other coldrised, or give --socket another path"));
    }
    std::fs::remove_file(path).context(|| format!("removing {}", path.display()))
}

fn too_many_headers() -> Response {
    let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
    let text = format!("a request may have {MAX_HEADERS} headers");
    Problem::new(status, ErrorKind::InvalidInput, text).into_response()
}

/// The loopback address of the same family and port.
fn loopback(address: SocketAddr) -> SocketAddr {
    let ip = match address {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    SocketAddr::new(ip, address.port())
}

async fn pause(error: &std::io::Error) {
    tracing::warn!("accepting a connection: {error}");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// The certificate of the service, made if missing.
///
/// # Errors
/// Those of [`Certificate::open`].
pub(crate) fn certificate(service: &SharedService) -> Result<Arc<Certificate>> {
    Certificate::open(&service.options).map(Arc::new)
}
