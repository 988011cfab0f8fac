//! Open files that are handed to QEMU through its monitor's socket.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Sends the beginning of `bytes` together with `file`. Returns the number of bytes sent.
pub(crate) fn send(
    stream: &UnixStream,
    bytes: &[u8],
    file: BorrowedFd<'_>,
) -> std::io::Result<usize> {
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    message.push(SendAncillaryMessage::ScmRights(&files));
    Ok(sendmsg(stream, &[IoSlice::new(bytes)], &mut message, SendFlags::NOSIGNAL)?)
}
