//! `coldrise serve replica`: takes copies from other sites.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{Arrival, Line, LineOptions, Listener, PairingCode, PeerKey, TcpLine};
use coldrise_replica::{receive_copies, Invitation, Link, Links};
use coldrise_session::{Openers, SharedWriter};
use coldrise_store::{OpenOptions, PassphraseSource, Repository};
use serde_json::json;

use crate::invocation::{open_for_writing, Invocation};
use crate::report::{print_line, Report};
use crate::signals::cancel_flag;
use crate::units::now_ms;

/// The default address.
const DEFAULT_REPLICA_ADDRESS: &str = "127.0.0.1:8481";
/// Interval of looking for new and removed links.
const INTERVAL: Duration = Duration::from_secs(1);

/// Take copies from other sites into this repository, until Ctrl-C.
///
/// Only paired sites get in: see coldrise link. Everything is encrypted (TLS 1.3). Sites add restore points; they can
/// neither remove nor change any. Backups and other copies can run at the same time.
#[derive(Debug, Args)]
pub(super) struct ReplicaArguments {
    /// IP address and port to listen on.
    #[arg(long, value_name = "ADDR:PORT", default_value = DEFAULT_REPLICA_ADDRESS)]
    listen: String,
}

/// What all lines share.
struct Server<'a> {
    links: Links,
    listener: Listener,
    repository: &'a Arc<Repository>,
    passphrase: PassphraseSource,
    cancel: &'a AtomicBool,
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
        std::thread::scope(|scope| {
            while !cancel.load(Ordering::Relaxed) {
                if let Err(error) = self.look_at_links() {
                    // Nobody gets in whose link cannot be read.
                    self.known.clear();
                    self.listener.set_peers([]);
                    tracing::error!("no site gets in: {}", error.full_message());
                }
                match self.listener.accept(INTERVAL) {
                    Ok(Arrival::Nothing) => {}
                    Ok(Arrival::CodeSpoiled) => self.spoiled()?,
                    Ok(Arrival::Pairing(pairing)) => self.pair(pairing)?,
                    Ok(Arrival::Line { peer, line }) => {
                        if let Some(link) = self.link_of(peer) {
                            let passphrase = &passphrase;
                            scope.spawn(move || {
                                receive(&line, &link, repository, passphrase, cancel)
                            });
                        }
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
        // Only those that send.
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

    fn link_of(&self, peer: PeerKey) -> Option<Link> {
        self.known.iter().find(|link| link.peer().is_ok_and(|key| key == peer)).cloned()
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
            paired_at_ms: now_ms(),
        };
        let added = self.links.withdraw(&link.name).and_then(|()| self.links.add(&link));
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

/// Serves one line to its end.
fn receive(
    line: &TcpLine,
    link: &Link,
    repository: &Arc<Repository>,
    passphrase: &PassphraseSource,
    cancel: &AtomicBool,
) {
    let path = repository.path();
    let reader = || Repository::open(path, passphrase, &OpenOptions { cache_bytes: 0 });
    let openers = Openers { writer: &|| open_for_writing(path, passphrase), reader: &reader };
    let received = SharedWriter::join(path, openers, cancel)
        .and_then(|far| receive_copies(line, &far, &link.prefix, cancel));
    line.close();
    if let Err(error) = received {
        if error.kind() != ErrorKind::Interrupted {
            let error: Error = error;
            tracing::warn!("site {}: {}", link.name, error.full_message());
        }
    }
}
