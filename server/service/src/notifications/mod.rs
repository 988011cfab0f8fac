//! Notifications: alarms, messages, targets.
//!
//! ```text
//!  runs, inventory, jobs, drive ─▶ conditions ─▶ alarms ─┬─▶ event stream
//!                                                        └─▶ messages × targets = outbox ─▶ mail, webhook
//! ```
//!
//! An alarm and its messages are one transaction, and a row of the outbox goes only after the
//! target took the message. So a crash loses none; it can repeat one. Receivers tell repetitions by the id.
//!
//! The evaluation runs after events, and once a minute. Each target has its own thread while it sends: a
//! slow one delays no other.

mod alarms;
mod bounded_relay;
mod condition;
mod copy_conditions;
mod delivery;
mod ended_runs;
mod evaluation;
mod found_damage;
mod host;
mod host_conditions;
mod job_conditions;
mod lag_conditions;
mod mail;
mod message;
mod outbox;
mod secret_file;
mod service_folder;
pub(crate) mod settings;
mod space;
pub(crate) mod targets;
mod webhook;

use std::collections::HashMap;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::Notify;

pub(crate) use alarms::{Alarm, all_alarms, no_alarm};
pub(crate) use condition::{Severity, Topic};
pub(crate) use delivery::{deliver, send_test};
pub(crate) use evaluation::evaluate;
pub(crate) use secret_file::check_name as check_secret_name;
pub(crate) use space::Drive;

/// State that the parts of this module share.
#[derive(Default)]
pub(crate) struct Messenger {
    /// Notified when the outbox has something new.
    outbox: Notify,
    figures: Mutex<Figures>,
    /// The alarm of a full drive under the service's folder: the database has no room for it.
    unstored: Mutex<Option<Alarm>>,
    /// Since when the repository is away; `None` while it is there.
    away_since: Mutex<Option<Instant>>,
    /// What was found of machines that jobs follow, by the keys of their alarms.
    followed: Mutex<HashMap<String, lag_conditions::Looked>>,
}

/// The state at the last evaluation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) running: usize,
    pub(crate) warn: usize,
    pub(crate) fail: usize,
}

impl Messenger {
    /// The state at the last evaluation.
    pub(crate) fn figures(&self) -> Figures {
        self.figures.lock().clone()
    }

    /// Whether the database has no room: logins and changes fail.
    pub(crate) fn is_folder_full(&self) -> bool {
        self.unstored.lock().is_some()
    }

    /// Looks at the outbox soon.
    pub(crate) fn wake(&self) {
        self.outbox.notify_one();
    }
}
