//! The ports of nfs-ganesha, which other servers may have.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};

use super::configuration::NfsOptions;
use super::{check_not_asked_to_end, rpc};
use crate::caller::Caller;
use crate::signals::ChildSignals;

/// How long the server of a killed command may take to end: it flushes and closes its sessions.
const PATIENCE: Duration = Duration::from_secs(20);
const INTERVAL: Duration = Duration::from_millis(50);

/// Waits for the server of a killed command. Nothing shows whose the server on the port is.
///
/// # Errors
/// `Busy` if it does not end in time.
pub(super) fn wait(
    caller: &Caller,
    options: &NfsOptions,
    signals: &mut ChildSignals,
) -> Result<()> {
    let mut asked = None;
    loop {
        let error = match check(options) {
            Err(error) if error.kind() == ErrorKind::Busy => error,
            checked => return checked,
        };
        let asked = asked.get_or_insert_with(|| {
            let (text, patience) = (error.full_message(), PATIENCE.as_secs());
            caller.remark(&format!("{text}; waiting up to {patience} s for its end"));
            Instant::now()
        });
        if asked.elapsed() > PATIENCE {
            return Err(error);
        }
        check_not_asked_to_end(signals)?;
        std::thread::sleep(INTERVAL);
    }
}

/// nfs-ganesha would replace another server's registration.
pub(super) fn check(options: &NfsOptions) -> Result<()> {
    let mount = SocketAddr::new(options.listen.ip(), options.mount_port);
    let mut addresses = vec![options.listen];
    if options.serves_v3 {
        addresses.push(mount);
    }
    for address in addresses {
        if rpc::is_listening(address) {
            let what = format!("another server listens on {address}");
            return Err(Error::new(ErrorKind::Busy, what));
        }
    }
    if !options.serves_v3 {
        return Ok(());
    }
    match rpc::registered_port(rpc::NFS_PROGRAM, 3) {
        Some(port) if rpc::answers(([127, 0, 0, 1], port).into(), rpc::NFS_PROGRAM, 3) => {
            Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "an NFS server on port {port} is registered for this machine, and there can \
                     be one for NFSv3"
                ),
            ))
        }
        _ => Ok(()),
    }
}
