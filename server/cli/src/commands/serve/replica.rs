//! `coldrise serve replica`: takes copies from other sites, and gives them copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{Arrival, Line, LineOptions, Listener, PairingCode, PeerKey, TcpLine};
use coldrise_replica::{
    Invitation, Link, Links, LiveReceivers, LiveTerms, Opening, Right, serve_fetch,
};
use coldrise_session::{RepositoryAccess, SharedWriter};
use coldrise_store::{OpenOptions, PassphraseSource, Repository};
use serde_json::json;

use crate::invocation::{Invocation, READING_CACHE_BYTES};
use crate::report::{Report, print_line};
use crate::units::now_ms;
use coldrise_hosting::signals::cancel_flag;

/// The default address.
const DEFAULT_REPLICA_ADDRESS: &str = "127.0.0.1:8481";
/// Interval of looking for new and removed links.
const INTERVAL: Duration = Duration::from_secs(1);

/// Receive copies from other sites, and let them fetch copies, until Ctrl-C.
///
/// Only paired sites can connect: see coldrise link. Everything is encrypted (TLS 1.3). A link may either add restore points
/// and the time marks of sessions, or read the points of some machines; it can never remove or change any. Backups and other copies can run at the same time.
#[derive(Debug, Args)]
pub(super) struct ReplicaArguments {
    /// IP address and port to listen on.
    #[arg(long, value_name = "ADDR:PORT", default_value = DEFAULT_REPLICA_ADDRESS)]
    listen: String,
}

/// State that all lines share.
struct Server<'a> {
    links: Links,
    listener: Listener,
    repository: &'a Arc<Repository>,
    passphrase: PassphraseSource,
    live: LiveReceivers,
    cancel: &'a Arc<AtomicBool>,
    known: Vec<Link>,
    invitation: Option<Invitation>,
}

pub(super) fn run(invocation: &Invocation, arguments: &ReplicaArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    let repository = invocation.open()?;
    let links = Links::of(&repository);
    let listener = Listener::bind(&arguments.listen, &links.identity()?, LineOptions::default())?;
    let address = listener.local_address();
    let mut server = Server {
        links,
        listener,
        repository: &repository,
        passphrase: invocation.passphrase()?,
        live: LiveReceivers::default(),
        cancel: &cancel,
        known: Vec::new(),
        invitation: None,
    };
    server.look_at_links()?;
    match invocation.is_json() {
        true => {
            print_line(&json!({ "event": "ready", "address": address.to_string() }).to_string())
        }
        false => print_line(&format!("ready: {address} (Ctrl-C ends it)")),
    }
    server.serve()?;
    let object = json!({ "address": address.to_string(), "elapsed_ms": invocation.elapsed_ms() });
    Ok(Report::done(&object, "ended"))
}

impl Server<'_> {
    fn serve(&mut self) -> Result<()> {
        let (repository, cancel) = (self.repository, self.cancel);
        let passphrase = self.passphrase.clone();
        let live = std::mem::take(&mut self.live);
        std::thread::scope(|scope| {
            while !cancel.load(Ordering::Relaxed) {
                if let Err(error) = self.look_at_links() {
                    // Links that cannot be read get no access.
                    self.known.clear();
                    self.listener.set_peers([]);
                    tracing::error!("no site can connect: {}", error.full_message());
                }
                match self.listener.accept(INTERVAL) {
                    Ok(Arrival::Nothing) => {}
                    Ok(Arrival::CodeSpoiled) => self.spoiled()?,
                    Ok(Arrival::Pairing(pairing)) => self.pair(pairing)?,
                    Ok(Arrival::Line { peer, line }) => {
                        let links = self.links_of(peer);
                        let line = Arc::new(line);
                        let (passphrase, live) = (&passphrase, &live);
                        let site = Site { line, links, repository, live, cancel };
                        scope.spawn(move || site.serve(passphrase));
                    }
                    Err(error) => {
                        tracing::warn!("{}", error.full_message());
                        std::thread::sleep(INTERVAL);
                    }
                }
            }
            self.listener.close();
            Ok(())
        })
    }

    fn look_at_links(&mut self) -> Result<()> {
        // Only those that dial.
        let all = self.links.all()?.into_iter().filter(|link| link.address.is_none());
        let all: Vec<Link> = all.collect();
        if all != self.known {
            self.listener.set_peers(all.iter().map(Link::peer).collect::<Result<Vec<_>>>()?);
            self.known = all;
        }
        let now_ms = now_ms();
        let newest = self.links.invitations(now_ms)?.into_iter().max_by_key(|one| one.until_ms);
        let code =
            |invitation: &Option<Invitation>| invitation.as_ref().map(|one| one.code.clone());
        if code(&newest) != code(&self.invitation) {
            if let Some(invitation) = &newest {
                let valid = Duration::from_millis(invitation.until_ms.saturating_sub(now_ms));
                self.listener.invite(invitation.code.parse::<PairingCode>()?, valid);
            }
            self.invitation = newest;
        }
        Ok(())
    }

    fn links_of(&self, peer: PeerKey) -> Vec<Link> {
        let is_of = |link: &&Link| link.peer().is_ok_and(|key| key == peer);
        self.known.iter().filter(is_of).cloned().collect()
    }

    fn spoiled(&mut self) -> Result<()> {
        tracing::warn!("too many wrong codes: invite again with coldrise link invite");
        match self.invitation.take() {
            Some(invitation) => self.links.withdraw(&invitation.name),
            None => Ok(()),
        }
    }

    /// Keeps the key of a site that knew the code, and tells it.
    fn pair(&mut self, pairing: Box<coldrise_line::Pairing>) -> Result<()> {
        let Some(invitation) = self.invitation.take() else { return Ok(()) };
        let link = Link {
            name: invitation.name.clone(),
            key: pairing.key().to_string(),
            address: None,
            prefix: invitation.prefix,
            may: invitation.may,
            paired_at_ms: now_ms(),
        };
        let added = self.links.withdraw(&link.name).and_then(|()| self.replace(&link));
        if let Err(error) = added {
            // Dropping it refuses the other side.
            tracing::error!("pairing with {} failed: {}", link.name, error.full_message());
            return Ok(());
        }
        self.look_at_links()?;
        if let Err(error) = pairing.accept() {
            tracing::warn!("{}", error.full_message());
        }
        tracing::info!("paired with {}", link.name);
        Ok(())
    }
}

impl Server<'_> {
    /// Adds a link in place of the older one of the same site and kind, whose rights would come back if
    /// the new one was removed.
    fn replace(&self, link: &Link) -> Result<()> {
        let is_fetch = |link: &Link| matches!(link.may, Right::Fetch { .. });
        for older in self.links.all()? {
            let is_same = older.address.is_none()
                && older.key == link.key
                && is_fetch(&older) == is_fetch(link);
            if is_same {
                self.links.remove(&older.name)?;
                tracing::warn!(
                    "link {} is of the same site: {} replaces it",
                    older.name,
                    link.name
                );
            }
        }
        self.links.add(link)
    }
}

/// A site that has dialled.
struct Site<'a> {
    line: Arc<TcpLine>,
    links: Vec<Link>,
    repository: &'a Arc<Repository>,
    live: &'a LiveReceivers,
    cancel: &'a Arc<AtomicBool>,
}

impl Site<'_> {
    /// Serves its line to the end.
    fn serve(&self, passphrase: &PassphraseSource) {
        let served = self.open(passphrase);
        self.line.close();
        let Err(error) = served else { return };
        if error.kind() != ErrorKind::Interrupted {
            let names: Vec<&str> = self.links.iter().map(|link| link.name.as_str()).collect();
            tracing::warn!("site {}: {}", names.join(", "), error.full_message());
        }
    }

    fn open(&self, passphrase: &PassphraseSource) -> Result<()> {
        let line = &*self.line;
        let Some(opening) = Opening::of(line, self.cancel)? else { return Ok(()) };
        let is_fetch = matches!(opening, Opening::Fetch(_));
        let is_right = |link: &&Link| matches!(link.may, Right::Fetch { .. }) == is_fetch;
        // Of several, as an older program left them, the newest counts.
        let link = self.links.iter().filter(is_right).max_by_key(|link| link.paired_at_ms);
        let Some(link) = link else {
            let error = no_right(is_fetch);
            opening.refuse(line, &error)?;
            return Err(error);
        };
        let path = self.repository.path();
        let refuse = |error: Error| match opening.refuse(line, &error) {
            Ok(()) => error,
            Err(lost) => lost,
        };
        match &opening {
            Opening::Copies(greeting) => {
                let access = RepositoryAccess::new(path, passphrase.clone());
                let far = SharedWriter::join(&access, self.cancel).map_err(refuse)?;
                greeting.receive(line, &far, &link.prefix, self.cancel)
            }
            Opening::Live(opening) => {
                let is_valid = || is_there(self.repository, link);
                let terms =
                    LiveTerms { link: &link.name, prefix: &link.prefix, is_valid: &is_valid };
                self.live.receive(line, self.repository, opening, &terms, self.cancel)
            }
            Opening::Fetch(request) => {
                // With the points of this moment.
                let options = OpenOptions { cache_bytes: READING_CACHE_BYTES };
                let source = Repository::open(path, passphrase, &options).map_err(refuse)?;
                let line = Arc::clone(&self.line) as Arc<dyn Line>;
                serve_fetch(line, &source, request, link.may.machines(), None, self.cancel)
            }
        }
    }
}

/// Whether a link has not been removed. If that cannot be read, it has not.
fn is_there(repository: &Arc<Repository>, link: &Link) -> bool {
    let found = Links::of(repository).find(&link.name);
    found.map_or_else(|error| error.kind() != ErrorKind::NotFound, |found| found == *link)
}

fn no_right(is_fetch: bool) -> Error {
    let (text, word) = match is_fetch {
        true => ("the link may not fetch restore points from there", "fetch"),
        false => ("the link may not send restore points there", "send"),
    };
    Error::new(ErrorKind::Forbidden, text)
        .advise(format!("pair again, after coldrise link invite --may {word} there"))
}
