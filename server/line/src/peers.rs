//! Who may do what at a listener: pinned keys, the open invitation, lines that are being joined, and
//! lines that there are.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use coldrise_block::{ErrorKind, Result};
use parking_lot::Mutex;

use crate::code::{MAX_WRONG_CODES, PairingCode, ProvenKeys, fill_random};
use crate::connected::Connections;
use crate::failure::{End, Failure};
use crate::frame::Class;
use crate::hello::{Refusal, SessionId};
use crate::identity::PeerKey;
use crate::stream::TlsStream;

/// Lines of one peer, with those that are being joined.
const MOST_LINES: usize = 8;
/// Connections that wait to be taken into their line.
const WAITING_CONNECTIONS: usize = 4;

/// A connection of a line, and its class.
pub(crate) type Joined = (Class, TlsStream);

/// See the module.
#[derive(Default)]
pub(crate) struct Peers(Mutex<State>);

#[derive(Default)]
struct State {
    pinned: HashSet<PeerKey>,
    invitation: Option<Invitation>,
    joining: HashMap<SessionId, (PeerKey, SyncSender<Joined>)>,
    lines: Vec<(PeerKey, Weak<Connections>)>,
}

struct Invitation {
    code: PairingCode,
    until: Instant,
    wrong_codes: u32,
}

/// The result of a proof of a code.
pub(crate) enum Proof {
    /// It was right. The code is used up, and proves the far side now.
    Right(PairingCode),
    Wrong,
    /// It was wrong, and the invitation is void.
    Spoiled,
}

impl Peers {
    /// Replaces the pinned keys. Cuts lines of those that are gone.
    pub(crate) fn set_pinned(&self, pinned: HashSet<PeerKey>) {
        let mut state = self.0.lock();
        state.pinned = pinned;
        let State { pinned, joining, lines, .. } = &mut *state;
        joining.retain(|_, (key, _)| pinned.contains(key));
        for (_, line) in lines.iter().filter(|(key, _)| !pinned.contains(key)) {
            if let Some(line) = line.upgrade() {
                line.end(End::Failed(Failure {
                    kind: ErrorKind::Forbidden,
                    text: "its link was removed".to_owned(),
                    advice: "add the link again at both sites if it is needed",
                }));
            }
        }
    }

    /// Whether TLS lets a key in: it is pinned, or may prove a code.
    pub(crate) fn admits(&self, key: &PeerKey) -> bool {
        let state = self.0.lock();
        state.pinned.contains(key) || state.invitation().is_some()
    }

    /// Opens an invitation, in place of the one that there is.
    pub(crate) fn invite(&self, code: PairingCode, valid: Duration) {
        let until = Instant::now() + valid;
        self.0.lock().invitation = Some(Invitation { code, until, wrong_codes: 0 });
    }

    /// Judges a proof of the open invitation's code.
    pub(crate) fn check_code(&self, keys: &ProvenKeys, proof: &[u8; 32]) -> Proof {
        let mut state = self.0.lock();
        if state.invitation().is_none() {
            state.invitation = None;
        }
        let Some(mut invitation) = state.invitation.take() else {
            return Proof::Wrong;
        };
        if invitation.code.is_near_proof(keys, proof) {
            return Proof::Right(invitation.code);
        }
        invitation.wrong_codes += 1;
        if invitation.wrong_codes >= MAX_WRONG_CODES {
            return Proof::Spoiled;
        }
        state.invitation = Some(invitation);
        Proof::Wrong
    }

    /// Begins a line. The other connections arrive at the receiver.
    ///
    /// # Errors
    /// `Internal` if the system has no random numbers. Inside: what to answer the peer.
    pub(crate) fn begin_line(
        &self,
        key: PeerKey,
    ) -> Result<std::result::Result<(SessionId, Receiver<Joined>), Refusal>> {
        let mut session = SessionId::default();
        fill_random(&mut session)?;
        let mut state = self.0.lock();
        if !state.pinned.contains(&key) {
            return Ok(Err(Refusal::UnknownKey));
        }
        state.lines.retain(|(_, line)| line.upgrade().is_some_and(|line| !line.has_ended()));
        let joining = state.joining.values().filter(|(of, _)| *of == key).count();
        if joining + state.lines.iter().filter(|(of, _)| *of == key).count() >= MOST_LINES {
            return Ok(Err(Refusal::TooManyLines));
        }
        let (sender, receiver) = sync_channel(WAITING_CONNECTIONS);
        state.joining.insert(session, (key, sender));
        Ok(Ok((session, receiver)))
    }

    /// Where a connection joins its line.
    ///
    /// # Errors
    /// The refusal to send: this peer has no such line.
    pub(crate) fn line_to_join(
        &self,
        key: PeerKey,
        session: &SessionId,
    ) -> std::result::Result<SyncSender<Joined>, Refusal> {
        match self.0.lock().joining.get(session) {
            Some((of, sender)) if *of == key => Ok(sender.clone()),
            _ => Err(Refusal::UnknownSession),
        }
    }

    /// Ends the time in which connections can join.
    pub(crate) fn end_joining(&self, session: &SessionId) {
        self.0.lock().joining.remove(session);
    }

    /// Notes a whole line. False if its key was removed meanwhile.
    pub(crate) fn note_line(&self, key: PeerKey, line: &Arc<Connections>) -> bool {
        let mut state = self.0.lock();
        state.lines.push((key, Arc::downgrade(line)));
        state.pinned.contains(&key)
    }
}

impl State {
    fn invitation(&self) -> Option<&Invitation> {
        self.invitation.as_ref().filter(|invitation| Instant::now() < invitation.until)
    }
}
