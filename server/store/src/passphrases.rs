//! The passphrases of a repository. Each of them opens it and wraps the same master key in its own
//! slot.
//!
//! A change replaces the whole `repository.json` (synced, renamed, synced), so a crash leaves the
//! old or the new passphrases. A lock on a file of the repository serializes changes. Nothing else
//! is blocked, because an open repository already has its master key.
//!
//! Removing or changing a passphrase does not change the master key. A person with the passphrase
//! and a copy of the old `repository.json` can still read earlier and later copies of the
//! repository.

use std::path::Path;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use zeroize::Zeroizing;

use crate::aead::Key;
use crate::keys::{GuessCost, KeySlot};
use crate::repository_config::{MAX_KEY_SLOTS, RepositoryConfig, lock_repository};
use crate::{KeyLabel, Passphrase, PassphraseSource};

/// The name shown for the passphrase of `init`, which has no label.
pub const INITIAL_PASSPHRASE: &str = "initial";

/// The properties of one passphrase, without the passphrase itself.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PassphraseEntry {
    /// Its name; that of `init` has none.
    pub label: Option<KeyLabel>,
    /// When it was added, in milliseconds since 1970-01-01T00:00:00Z; unknown for that of `init`.
    pub added_at_ms: Option<u64>,
    /// Memory per guess, in KiB.
    pub memory_kib: u32,
    /// Passes over that memory.
    pub passes: u32,
    /// Threads.
    pub(crate) lanes: u32,
    /// True for the passphrase given now.
    pub is_given: bool,
}

/// Selects a passphrase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PassphraseSelector {
    /// The one with this name.
    Label(KeyLabel),
    /// The one without a name, made by `init`.
    Initial,
}

/// A new passphrase.
pub struct NewPassphrase<'a> {
    /// The passphrase.
    pub passphrase: &'a Passphrase,
    /// Its name.
    pub label: Option<KeyLabel>,
    /// Duration of one guess on this machine; opening the repository takes as long. Without it, a
    /// guess costs as much as for the replaced passphrase, or, for an added one, as much as for the
    /// costliest present passphrase.
    pub guess_time: Option<Duration>,
}

/// The passphrases of a repository, in the order in which they were added.
///
/// # Errors
/// `WrongPassphrase` if the given one opens nothing; as `Repository::open`.
pub fn passphrases(repository: &Path, given: &PassphraseSource) -> Result<Vec<PassphraseEntry>> {
    let config = RepositoryConfig::read(repository)?;
    let (_, opened) = open(&config, given)?;
    Ok(entries(&config, opened))
}

/// Adds a passphrase.
///
/// # Errors
/// `AlreadyExists` if the passphrase or its name exists already; `InvalidInput` if there are
/// already eight; as [`passphrases`].
pub fn add_passphrase(
    repository: &Path,
    given: &PassphraseSource,
    new: &NewPassphrase<'_>,
) -> Result<Vec<PassphraseEntry>> {
    change(repository, given, |config, master, opened| {
        if config.key_slots.len() >= MAX_KEY_SLOTS {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("there are {MAX_KEY_SLOTS} passphrases already: remove one first"),
            ));
        }
        check_new(config, new, None)?;
        // The passphrase that is cheapest to guess determines the protection of the data.
        let costs = config.key_slots.iter().map(|slot| slot.cost);
        let highest = costs.max_by_key(|cost| cost.work()).unwrap_or(GuessCost::DEFAULT);
        let slot = wrap(config, master, new, highest)?;
        config.key_slots.push(slot);
        Ok(opened)
    })
}

/// Replaces the given passphrase with a new one, in one step. Without a new name it keeps the old
/// one.
///
/// # Errors
/// `AlreadyExists`; as [`passphrases`].
pub fn replace_passphrase(
    repository: &Path,
    given: &PassphraseSource,
    new: &NewPassphrase<'_>,
) -> Result<Vec<PassphraseEntry>> {
    change(repository, given, |config, master, opened| {
        check_new(config, new, Some(opened))?;
        let label = new.label.clone().or_else(|| config.key_slots[opened].label.clone());
        let cost = config.key_slots[opened].cost;
        let slot = wrap(config, master, &NewPassphrase { label, ..*new }, cost)?;
        config.key_slots[opened] = slot;
        Ok(opened)
    })
}

/// Removes a passphrase. The last one cannot be removed.
///
/// # Errors
/// `NotFound`, naming the existing ones; `InvalidInput` for the last one; as [`passphrases`].
pub fn remove_passphrase(
    repository: &Path,
    given: &PassphraseSource,
    selector: &PassphraseSelector,
) -> Result<Vec<PassphraseEntry>> {
    change(repository, given, |config, _, opened| {
        let label = match selector {
            PassphraseSelector::Label(label) => Some(label),
            PassphraseSelector::Initial => None,
        };
        let found = config.key_slots.iter().position(|slot| slot.label.as_ref() == label);
        let Some(found) = found else { return Err(not_found(config, label)) };
        if config.key_slots.len() == 1 {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "it is the only passphrase, and without one nothing can be read: add another first",
            ));
        }
        config.key_slots.remove(found);
        // An index past the end stands for no slot.
        Ok(match found.cmp(&opened) {
            std::cmp::Ordering::Less => opened - 1,
            std::cmp::Ordering::Equal => MAX_KEY_SLOTS,
            std::cmp::Ordering::Greater => opened,
        })
    })
}

/// Opens, changes and replaces `repository.json` under the lock.
fn change(
    repository: &Path,
    given: &PassphraseSource,
    edit: impl FnOnce(&mut RepositoryConfig, &Key, usize) -> Result<usize>,
) -> Result<Vec<PassphraseEntry>> {
    // Without a repository there is nothing to lock.
    RepositoryConfig::read(repository)?;
    let _lock = lock_repository(repository, "another process changes its passphrases")?;
    let mut config = RepositoryConfig::read(repository)?;
    let (master, opened) = open(&config, given)?;
    let opened = edit(&mut config, &master, opened)?;
    config.set_checksum()?;
    config.write_synced(repository)?;
    Ok(entries(&config, opened))
}

/// The master key, and the slot that the given passphrase opens.
fn open(config: &RepositoryConfig, given: &PassphraseSource) -> Result<(Zeroizing<Key>, usize)> {
    if !config.is_encrypted() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the repository is not encrypted, which was decided when it was made: it has no \
             passphrases",
        ));
    }
    config.master_and_slot(given.read()?.as_ref())
}

fn entries(config: &RepositoryConfig, opened: usize) -> Vec<PassphraseEntry> {
    let entry = |(number, slot): (usize, &KeySlot)| PassphraseEntry {
        label: slot.label.clone(),
        added_at_ms: slot.added_at_ms,
        memory_kib: slot.cost.memory_kib,
        passes: slot.cost.passes,
        lanes: slot.cost.lanes,
        is_given: number == opened,
    };
    config.key_slots.iter().enumerate().map(entry).collect()
}

/// Refuses a name that is taken and a passphrase that already opens the repository. The slot to be
/// replaced may keep both.
fn check_new(
    config: &RepositoryConfig,
    new: &NewPassphrase<'_>,
    replaced: Option<usize>,
) -> Result<()> {
    let others = config.key_slots.iter().enumerate();
    for (_, slot) in others.filter(|(number, _)| Some(*number) != replaced) {
        if slot.label.is_some() && slot.label == new.label {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                "another passphrase has that name: choose another one",
            ));
        }
        if slot.unwrap(new.passphrase, &config.bound())?.is_some() {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                "that passphrase opens the repository already",
            ));
        }
    }
    Ok(())
}

/// A slot for `new`, at `cost` if `new` asks for none.
fn wrap(
    config: &RepositoryConfig,
    master: &Key,
    new: &NewPassphrase<'_>,
    cost: GuessCost,
) -> Result<KeySlot> {
    let cost = match new.guess_time {
        None => cost,
        Some(time) => GuessCost::for_this_machine(time)?,
    };
    let now = u64::try_from(jiff::Timestamp::now().as_millisecond()).ok();
    KeySlot::wrap(master, new.passphrase, &config.bound(), cost, new.label.clone(), now)
}

fn not_found(config: &RepositoryConfig, label: Option<&KeyLabel>) -> Error {
    let names: Vec<&str> = config
        .key_slots
        .iter()
        .map(|slot| slot.label.as_ref().map_or(INITIAL_PASSPHRASE, KeyLabel::as_str))
        .collect();
    let wanted = label.map_or(INITIAL_PASSPHRASE, KeyLabel::as_str);
    Error::new(
        ErrorKind::NotFound,
        format!("there is no passphrase {wanted}, only {}", names.join(", ")),
    )
}

#[cfg(test)]
#[path = "passphrases_tests.rs"]
mod tests;
