//! Guests whose file systems were frozen through virsh: none stays frozen if the one that froze it is gone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::virsh;

/// A freeze that was not ended by then is ended. The backup itself thaws after 10 s.
const LIMIT: Duration = Duration::from_secs(15);
/// For a thaw.
const PATIENCE: Duration = Duration::from_secs(10);

/// URI and domain.
type Guest = (String, String);

/// The frozen guests. They are thawed when this is dropped.
#[derive(Clone, Default)]
pub(crate) struct Freezes(Arc<Mutex<HashMap<Guest, Instant>>>);

impl Freezes {
    /// Looks at a command of virsh before it runs.
    pub(crate) fn before(&self, uri: &str, words: &[String]) {
        let [command, domain, ..] = words else { return };
        let guest = (uri.to_owned(), domain.clone());
        match command.as_str() {
            "domfsfreeze" => {
                let at = Instant::now();
                self.map().insert(guest.clone(), at);
                let freezes = Arc::downgrade(&self.0);
                std::thread::spawn(move || {
                    std::thread::sleep(LIMIT);
                    if let Some(map) = freezes.upgrade() {
                        Freezes(map).thaw_if(&guest, at);
                    }
                });
            }
            "domfsthaw" => drop(self.map().remove(&guest)),
            _ => {}
        }
    }

    /// Thaws the guest if it is still frozen since `at`.
    fn thaw_if(&self, guest: &Guest, at: Instant) {
        let is_frozen = {
            let mut map = self.map();
            let is_frozen = map.get(guest) == Some(&at);
            if is_frozen {
                map.remove(guest);
            }
            is_frozen
        };
        if is_frozen {
            thaw(guest);
        }
    }

    /// Thaws all.
    pub(crate) fn thaw_all(&self) {
        let guests: Vec<Guest> = self.map().drain().map(|(guest, _)| guest).collect();
        guests.iter().for_each(thaw);
    }

    fn map(&self) -> std::sync::MutexGuard<'_, HashMap<Guest, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn thaw((uri, domain): &Guest) {
    let words = ["domfsthaw".to_owned(), domain.clone()];
    if let Err(error) = virsh::run(uri, &words, None, PATIENCE) {
        tracing::warn!("the guest {domain} may be frozen: {}", error.full_message());
    }
}
