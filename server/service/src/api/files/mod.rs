//! Files of restore points, read by machines of our own ([`crate::files_machines`]).
//!
//! Operators and administrators only: names and contents are those of the protected machine. The first
//! listing of a point and each download are entries of the audit log. Keys of encrypted disks are never taken
//! here. A client that goes away ends what it has asked for.

mod disposition;
mod download;
mod entries;
mod listing;
mod sink;
mod versions;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_files::{AttachedDisks, Client, FileSystems, MAX_PATH_BYTES, shown};
use coldrise_session::{Catalog, check_offered};
use coldrise_store::{MachineName, PointDocument, PointSelector};
use parking_lot::Mutex;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::content::note_read;
use super::machines::selector;
use super::problem::{Answer, blocking};
use crate::access::{Identity, Permission};
use crate::files_machines::Conversation;
use crate::invalid::invalid;
use crate::service::{Service, SharedService};

/// Maximum number of requests at one time, of all callers and of one. Each takes a thread.
const MAX_REQUESTS: usize = 12;
const MAX_REQUESTS_OF_ONE: usize = 4;

/// The callers of the requests that are being answered.
static CALLERS: Mutex<Vec<String>> = Mutex::new(Vec::new());

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new()
        .routes(routes!(listing::file_systems))
        .routes(routes!(listing::list_files))
        .routes(routes!(listing::find_files))
        .routes(routes!(download::file_content))
        .routes(routes!(versions::file_versions))
}

/// One of the requests that may be answered at one time.
struct Turn(String);

impl Turn {
    /// # Errors
    /// `Busy` if there are too many.
    fn take(caller: &Identity) -> Result<Turn> {
        let mut callers = CALLERS.lock();
        let own = callers.iter().filter(|name| **name == caller.name).count();
        if callers.len() >= MAX_REQUESTS || own >= MAX_REQUESTS_OF_ONE {
            let text = "too many requests read files already; downloads count";
            return Err(Error::new(ErrorKind::Busy, text).advise("try again when one has ended"));
        }
        callers.push(caller.name.clone());
        Ok(Turn(caller.name.clone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut callers = CALLERS.lock();
        if let Some(place) = callers.iter().position(|name| *name == self.0) {
            callers.swap_remove(place);
        }
    }
}

/// Whether the client has gone. Dropping the answer sets it.
#[derive(Clone, Default)]
struct Gone(Arc<AtomicBool>);

impl Gone {
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// `Interrupted` if so.
    fn check(&self) -> Result<()> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Interrupted, "the client has gone")),
            false => Ok(()),
        }
    }
}

/// Sets it at the end of an answer.
struct Watched(Gone);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// The machine's name, for a caller that may read its files.
///
/// # Errors
/// `Forbidden` with words for people; `NotFound` if the caller does not see the machine.
fn readable(caller: &Identity, machine: &str) -> Result<MachineName> {
    caller.allow(Permission::ReadContent).map_err(|_| {
        let role = caller.role.word();
        let text = format!("{} has the role {role}, which may not read files", caller.name);
        Error::new(ErrorKind::Forbidden, text).advise("ask an administrator for the role operator")
    })?;
    caller.allow_machine(Permission::ReadContent, machine)?;
    machine.parse()
}

/// A point that may be read.
fn offered(
    service: &Service,
    machine: &MachineName,
    selector: &PointSelector,
) -> Result<PointDocument> {
    check_offered(Catalog::new(&service.inventory()?.repository()?).point(machine, selector)?)
}

/// A path in a file system: text, or bytes in hexadecimal digits.
fn path(text: Option<String>, hex: Option<String>) -> Result<Vec<u8>> {
    let path = match (text, hex) {
        (Some(_), Some(_)) => return Err(invalid("give path or path_hex")),
        (Some(text), None) => text.into_bytes(),
        (None, Some(hex)) => coldrise_block::hex::decode(&hex)
            .ok_or_else(|| invalid("path_hex: give two hexadecimal digits for each byte"))?,
        (None, None) => b"/".to_vec(),
    };
    if !path.starts_with(b"/") || path.contains(&0) || path.len() > MAX_PATH_BYTES {
        return Err(invalid(format!(
            "path: give an absolute path of at most {MAX_PATH_BYTES} bytes"
        )));
    }
    Ok(path)
}

/// Adds the path to an error about it.
fn about<T>(path: &[u8], done: Result<T>) -> Result<T> {
    done.map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::InvalidInput => error.context(shown(path)),
        _ => error,
    })
}

/// Talks with the machine of one point, on a thread for it.
async fn ask<T: Send + 'static>(
    service: SharedService,
    caller: Identity,
    (machine, point): (String, String),
    talk: impl FnOnce(&mut Client<'_>, &FileSystems, &str, &Gone) -> Result<T> + Send + 'static,
) -> Answer<T> {
    let (machine, selector) = (readable(&caller, &machine)?, selector(&point)?);
    let turn = Turn::take(&caller)?;
    let gone = Gone::default();
    let _watched = Watched(gone.clone());
    blocking(move || {
        let _turn = turn;
        let point = offered(&service, &machine, &selector)?;
        let address = format!("{}/{}", point.machine, point.point);
        note_read(&service, &caller, "list files", &address)?;
        in_point(&service, &caller, &point, &gone, |client, systems| {
            talk(client, systems, &address, &gone)
        })
    })
    .await
}

/// The conversation about one point.
///
/// # Errors
/// `Unsupported` instead of `ToolFailed` if the file system has crashed the machine, or taken it over.
fn in_point<T>(
    service: &Service,
    caller: &Identity,
    point: &PointDocument,
    gone: &Gone,
    talk: impl FnOnce(&mut Client<'_>, &FileSystems) -> Result<T>,
) -> Result<T> {
    let (machine, look_after) = (point.machine.as_str(), || gone.check());
    let addresses = [format!("{}/{}", point.machine, point.point)];
    let conversation =
        Conversation::begin(service, machine, &addresses, &caller.name, &look_after)?;
    let bytes = conversation.points.iter().map(|point| point.disk_bytes).sum();
    let done = conversation.talk(bytes, &look_after, |client, points| {
        let names = points.first().map(|point| point.disks.as_slice()).unwrap_or_default();
        let [address] = &addresses;
        let attached = AttachedDisks { address, names, is_all: true };
        let systems = FileSystems::read(client, &attached, b"")?;
        talk(client, &systems)
    });
    done.map_err(|error| match error.kind() {
        ErrorKind::ToolFailed => Error::new(ErrorKind::Unsupported, error.full_message()),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::path;

    #[test]
    fn paths_are_any_bytes() {
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(path(None, None).unwrap(), b"/");
        assert_eq!(path(text("/etc"), None).unwrap(), b"/etc");
        assert_eq!(path(None, text("2fff0a")).unwrap(), b"/\xff\n");
        for (path_text, hex) in
            [("etc", ""), ("/a\0b", ""), ("", "2f0"), ("", "2fgg"), ("", "2f+1")]
        {
            let part = |part: &str| (!part.is_empty()).then(|| part.to_owned());
            assert!(path(part(path_text), part(hex)).is_err(), "{path_text} {hex}");
        }
    }
}
