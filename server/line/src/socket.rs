//! Options of a connection's socket. The C library is called here and nowhere else in this crate:
//! rustix lacks both options.
#![allow(unsafe_code)]

use std::mem::{MaybeUninit, size_of};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use coldrise_block::{Context, Result};
use rustix::net::sockopt;

/// The limit of unsent bytes in the kernel: small, so that an urgent frame does not
/// wait for much, and pacing holds.
const UNSENT_BYTES: libc::c_int = 128 << 10;

/// Prepares a socket. Its connection fails when the peer has not confirmed bytes for `silence`.
///
/// # Errors
/// Errors of the operating system.
pub(crate) fn prepare(socket: &TcpStream, silence: Duration) -> Result<()> {
    // Refused where an administrator allows others only: statistics say which is used.
    let _ = sockopt::set_tcp_congestion(socket, "bbr");
    sockopt::set_tcp_user_timeout(socket, silence.as_millis() as u32)
        .map_err(std::io::Error::from)
        .context(|| "setting an option of a socket")?;
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the pointer leads to a C int of that length, which the kernel only reads.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            std::ptr::from_ref(&UNSENT_BYTES).cast(),
            length,
        )
    };
    match answer {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()).context(|| "setting an option of a socket"),
    }
}

/// The congestion control in use; empty if the kernel does not say.
pub(crate) fn congestion_control(socket: &TcpStream) -> String {
    sockopt::tcp_congestion(socket).unwrap_or_default()
}

/// Bulk connections that make use of a line: BBR keeps its rate when packets are lost, of others
/// several together do. Two, because one is one processor's encryption and one send buffer.
pub(crate) fn useful_connections(socket: &TcpStream) -> usize {
    match congestion_control(socket).as_str() {
        "bbr" => 2,
        _ => 8,
    }
}

/// The smoothed round-trip time.
pub(crate) fn round_trip(socket: &TcpStream) -> Option<Duration> {
    let mut answer = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to the zeroed struct, of which all bit
    // patterns are valid: it has integers only.
    let (refused, info) = unsafe {
        let refused = libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            answer.as_mut_ptr().cast(),
            &raw mut length,
        );
        (refused, answer.assume_init())
    };
    let micros = u64::from(info.tcpi_rtt);
    (refused == 0 && micros > 0).then(|| Duration::from_micros(micros))
}
