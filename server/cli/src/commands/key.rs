//! `coldrise key`: manages the passphrases of the repository.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    INITIAL_PASSPHRASE as INITIAL, KeyLabel, NewPassphrase, Passphrase, PassphraseEntry,
    PassphraseSelector, PassphraseSource, add_passphrase, advise_room, passphrases,
    remove_passphrase, replace_passphrase,
};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::show_moment;

/// Add, list, change and remove the passphrases of the repository.
///
/// Up to eight passphrases can open a repository; each has a name. Running programs are not
/// affected. Changing or removing a passphrase does not change the encryption key of the data:
/// the old passphrase and an old copy of repository.json together still open it.
#[derive(Debug, Args)]
pub(crate) struct KeyArguments {
    #[command(subcommand)]
    action: KeyAction,
}

#[derive(Debug, Subcommand)]
enum KeyAction {
    /// Add a passphrase.
    Add {
        /// Name of the new passphrase.
        #[arg(value_name = "NAME", value_parser = parse_label)]
        name: KeyLabel,
        #[command(flatten)]
        new: NewArguments,
    },
    /// Replace the passphrase in use by a new one, in one step.
    Rotate {
        #[command(flatten)]
        new: NewArguments,
    },
    /// Remove a passphrase. The last one cannot be removed.
    Remove {
        /// Name of the passphrase; initial is the one from init.
        #[arg(value_name = "NAME", value_parser = parse_selector)]
        name: PassphraseSelector,
    },
    /// List the passphrases by name; * marks the one in use.
    List,
}

#[derive(Debug, Args)]
struct NewArguments {
    /// Read the new passphrase from this file; a trailing newline is ignored.
    #[arg(long, value_name = "FILE", required_unless_present = "new_passphrase_command")]
    new_passphrase_file: Option<PathBuf>,

    /// Run this shell command and read the new passphrase from its output.
    #[arg(long, value_name = "COMMAND", conflicts_with = "new_passphrase_file")]
    new_passphrase_command: Option<String>,

    /// Milliseconds that one guess takes on this machine. Opening the repository takes as long.
    /// Default: a rotated passphrase costs as much as the one it replaces, an added one as much
    /// as the costliest existing one.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(25..=10_000))]
    guess_ms: Option<u64>,
}

impl NewArguments {
    fn read(&self) -> Result<Passphrase> {
        let source = match (&self.new_passphrase_file, &self.new_passphrase_command) {
            (Some(file), _) => PassphraseSource::File(file.clone()),
            (None, Some(command)) => PassphraseSource::Command(command.clone()),
            (None, None) => PassphraseSource::None,
        };
        let missing = || Error::new(ErrorKind::InvalidInput, "there is no new passphrase");
        source.read()?.ok_or_else(missing)
    }

    fn guess_time(&self) -> Option<Duration> {
        self.guess_ms.map(Duration::from_millis)
    }
}

fn parse_label(text: &str) -> Result<KeyLabel> {
    if text == INITIAL {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "initial is the name of the passphrase of init: choose another one",
        ));
    }
    KeyLabel::parse(text)
}

fn parse_selector(text: &str) -> Result<PassphraseSelector> {
    match text {
        INITIAL => Ok(PassphraseSelector::Initial),
        _ => KeyLabel::parse(text).map(PassphraseSelector::Label),
    }
}

#[derive(Serialize)]
struct Passphrases {
    passphrases: Vec<PassphraseEntry>,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &KeyArguments) -> Result<Report> {
    let repository = invocation.repository_path()?;
    let given = invocation.passphrase()?;
    let (entries, done) = match &arguments.action {
        KeyAction::List => (passphrases(repository, &given)?, None),
        KeyAction::Add { name, new } => {
            let passphrase = new.read()?;
            let (label, guess_time) = (Some(name.clone()), new.guess_time());
            let new = NewPassphrase { passphrase: &passphrase, label, guess_time };
            let entries = add_passphrase(repository, &given, &new).map_err(advise_room)?;
            (entries, Some(format!("the passphrase {name} opens the repository from now on")))
        }
        KeyAction::Rotate { new } => {
            let passphrase = new.read()?;
            let (label, guess_time) = (None, new.guess_time());
            let new = NewPassphrase { passphrase: &passphrase, label, guess_time };
            let entries = replace_passphrase(repository, &given, &new).map_err(advise_room)?;
            (
                entries,
                Some("the new passphrase opens the repository; the old one no longer does".into()),
            )
        }
        KeyAction::Remove { name } => {
            let entries = remove_passphrase(repository, &given, name).map_err(advise_room)?;
            let name = match name {
                PassphraseSelector::Label(label) => label.as_str(),
                PassphraseSelector::Initial => INITIAL,
            };
            (entries, Some(format!("the passphrase {name} no longer opens the repository")))
        }
    };
    let listed = table(&entries);
    let object = Passphrases { passphrases: entries, elapsed_ms: invocation.elapsed_ms() };
    Ok(match done {
        Some(done) => Report::done(&object, done),
        None => Report::answer(&object, listed),
    })
}

fn table(entries: &[PassphraseEntry]) -> String {
    let mut text = format!("  {:<24}{:<22}{:>12}{:>8}\n", "NAME", "ADDED", "MEMORY", "PASSES");
    for entry in entries {
        let name = entry.label.as_ref().map_or(INITIAL, KeyLabel::as_str);
        let added = entry.added_at_ms.map_or("with the repository".to_owned(), show_moment);
        let mark = if entry.is_given { '*' } else { ' ' };
        let memory = format!("{} MiB", entry.memory_kib / 1024);
        text.push_str(&format!("{mark} {name:<24}{added:<22}{memory:>12}{:>8}\n", entry.passes));
    }
    text
}
