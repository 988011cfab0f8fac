//! The passphrases of a repository: several may open it, each wraps the same
//! master key in a slot of its own.
//!
//! A change replaces `repository.json` whole (synced, renamed, synced), so a crash
//! leaves the old passphrases or the new ones. Changes exclude each other by a
//! lock on a file of the repository; nothing else is locked out, because what
//! is open has the master key already.
//!
//! To remove or change a passphrase does not change the master key: whoever had
//! the passphrase and a copy of the old `repository.json` can still read what
//! they have copied, and a copy made later.

use std::path::Path;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use zeroize::Zeroizing;

use crate::description::{lock_repository, Description, MAX_KEY_SLOTS};
use crate::keys::{GuessCost, Key, KeySlot};
use crate::{KeyLabel, Passphrase, PassphraseSource};

/// What the passphrase of `init` is called, which has no name.
pub const INITIAL_PASSPHRASE: &str = "initial";

/// One passphrase, without the passphrase.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PassphraseEntry {
    /// What it is called; that of `init` has no name.
    pub label: Option<KeyLabel>,
    /// When it was added, in milliseconds since 1970-01-01T00:00:00Z; unknown for
    /// that of `init`.
    pub added_at_ms: Option<u64>,
    /// Memory of a guess, in KiB.
    pub memory_kib: u32,
    /// Passes over that memory.
    pub passes: u32,
    /// Threads.
    pub lanes: u32,
    /// True for the one that was given now.
    pub is_given: bool,
}

/// Which passphrase is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PassphraseSelector {
    /// The one of that name.
    Label(KeyLabel),
    /// The one without a name, made by `init`.
    Initial,
}

/// A new passphrase.
pub struct NewPassphrase<'a> {
    /// The passphrase.
    pub passphrase: &'a Passphrase,
    /// What it is to be called.
    pub label: Option<KeyLabel>,
    /// How long a guess shall take on this machine. Opening the repository takes
    /// as long. Without it a guess costs as much as it did: at the passphrase that is
    /// replaced, or at the costliest one beside a passphrase that is added.
    pub guess_time: Option<Duration>,
}

/// The passphrases of a repository, in the order in which they were added.
///
/// # Errors
/// `WrongPassphrase` where the given one opens nothing; as of `Repository::open`.
pub fn passphrases(repository: &Path, given: &PassphraseSource) -> Result<Vec<PassphraseEntry>> {
    let description = Description::read(repository)?;
    let (_, opened) = open(&description, given)?;
    Ok(entries(&description, opened))
}

/// Adds a passphrase.
///
/// # Errors
/// `AlreadyExists` where the passphrase or its name is there already, `InvalidInput`
/// where there are eight; as of [`passphrases`].
pub fn add_passphrase(
    repository: &Path,
    given: &PassphraseSource,
    new: &NewPassphrase<'_>,
) -> Result<Vec<PassphraseEntry>> {
    change(repository, given, |description, master, opened| {
        if description.key_slots.len() >= MAX_KEY_SLOTS {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("there are {MAX_KEY_SLOTS} passphrases already: remove one first"),
            ));
        }
        check_new(description, new, None)?;
        // The cheapest to guess decides how well the data is kept.
        let costs = description.key_slots.iter().map(|slot| slot.cost);
        let highest = costs.max_by_key(|cost| cost.work()).unwrap_or(GuessCost::DEFAULT);
        let slot = wrap(description, master, new, highest)?;
        description.key_slots.push(slot);
        Ok(opened)
    })
}

/// Puts a new passphrase in the place of the given one, in one step. It keeps the
/// name of the old one where it gets none.
///
/// # Errors
/// `AlreadyExists`; as of [`passphrases`].
pub fn replace_passphrase(
    repository: &Path,
    given: &PassphraseSource,
    new: &NewPassphrase<'_>,
) -> Result<Vec<PassphraseEntry>> {
    change(repository, given, |description, master, opened| {
        check_new(description, new, Some(opened))?;
        let label = new.label.clone().or_else(|| description.key_slots[opened].label.clone());
        let cost = description.key_slots[opened].cost;
        let slot = wrap(description, master, &NewPassphrase { label, ..*new }, cost)?;
        description.key_slots[opened] = slot;
        Ok(opened)
    })
}

/// Removes a passphrase; never the last one.
///
/// # Errors
/// `NotFound`, naming those that are there; `InvalidInput` for the last one; as of
/// [`passphrases`].
pub fn remove_passphrase(
    repository: &Path,
    given: &PassphraseSource,
    selector: &PassphraseSelector,
) -> Result<Vec<PassphraseEntry>> {
    change(repository, given, |description, _, opened| {
        let label = match selector {
            PassphraseSelector::Label(label) => Some(label),
            PassphraseSelector::Initial => None,
        };
        let found = description.key_slots.iter().position(|slot| slot.label.as_ref() == label);
        let Some(found) = found else { return Err(not_found(description, label)) };
        if description.key_slots.len() == 1 {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "it is the only passphrase, and without one nothing can be read: add another first",
            ));
        }
        description.key_slots.remove(found);
        // An index behind the end is nobody's.
        Ok(match found.cmp(&opened) {
            std::cmp::Ordering::Less => opened - 1,
            std::cmp::Ordering::Equal => MAX_KEY_SLOTS,
            std::cmp::Ordering::Greater => opened,
        })
    })
}

/// Opens, changes and replaces the description, alone.
fn change(
    repository: &Path,
    given: &PassphraseSource,
    edit: impl FnOnce(&mut Description, &Key, usize) -> Result<usize>,
) -> Result<Vec<PassphraseEntry>> {
    // Without a repository there is nothing to lock.
    Description::read(repository)?;
    let _lock = lock_repository(repository, "another process changes its passphrases")?;
    let mut description = Description::read(repository)?;
    let (master, opened) = open(&description, given)?;
    let opened = edit(&mut description, &master, opened)?;
    description.set_checksum()?;
    description.write_synced(repository)?;
    Ok(entries(&description, opened))
}

/// The master key, and the slot that the given passphrase opens.
fn open(description: &Description, given: &PassphraseSource) -> Result<(Zeroizing<Key>, usize)> {
    if !description.is_encrypted() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the repository is not encrypted, which was decided when it was made: it has no \
             passphrases",
        ));
    }
    description.master_and_slot(given.read()?.as_ref())
}

fn entries(description: &Description, opened: usize) -> Vec<PassphraseEntry> {
    let entry = |(number, slot): (usize, &KeySlot)| PassphraseEntry {
        label: slot.label.clone(),
        added_at_ms: slot.added_at_ms,
        memory_kib: slot.cost.memory_kib,
        passes: slot.cost.passes,
        lanes: slot.cost.lanes,
        is_given: number == opened,
    };
    description.key_slots.iter().enumerate().map(entry).collect()
}

/// Refuses a name that is taken and a passphrase that opens the repository already.
/// The slot that is to be replaced may keep both.
fn check_new(
    description: &Description,
    new: &NewPassphrase<'_>,
    replaced: Option<usize>,
) -> Result<()> {
    let others = description.key_slots.iter().enumerate();
    for (_, slot) in others.filter(|(number, _)| Some(*number) != replaced) {
        if slot.label.is_some() && slot.label == new.label {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                "another passphrase has that name: choose another one",
            ));
        }
        if slot.unwrap(new.passphrase, &description.bound())?.is_some() {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                "that passphrase opens the repository already",
            ));
        }
    }
    Ok(())
}

/// A slot for `new`, at `cost` where it asks for none.
fn wrap(
    description: &Description,
    master: &Key,
    new: &NewPassphrase<'_>,
    cost: GuessCost,
) -> Result<KeySlot> {
    let cost = match new.guess_time {
        None => cost,
        Some(time) => GuessCost::for_this_machine(time)?,
    };
    let now = u64::try_from(jiff::Timestamp::now().as_millisecond()).ok();
    KeySlot::wrap(master, new.passphrase, &description.bound(), cost, new.label.clone(), now)
}

fn not_found(description: &Description, label: Option<&KeyLabel>) -> Error {
    let names: Vec<&str> = description
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
