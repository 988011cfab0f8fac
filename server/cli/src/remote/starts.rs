//! Command lines as requests to the service: POST /api/v1/runs.

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory};
use coldrise_block::{Error, ErrorKind, Result};
use serde_json::{json, Map, Value};

use super::refuse;
use crate::arguments::Arguments;
use crate::units::parse_size;

/// How an argument becomes a field.
#[derive(Clone, Copy)]
enum Form {
    Text,
    /// The only value of an argument that takes several on its host.
    Only,
    Number,
    /// A size with a unit, as a number of bytes.
    Size,
    Flag,
    /// All values of the argument.
    List,
    /// `NAME=VALUE` words as an object.
    Pairs,
    /// A field of the object `rules`.
    Rule,
    /// A rule that is a number.
    RuleCount,
}

/// Arguments of a command, by the ids that clap gives them, and the fields that they become.
type Fields = &'static [(&'static str, &'static str, Form)];

/// The commands that the service runs for others. An argument that is not listed is refused.
const COMMANDS: [(&str, Fields); 20] = [
    (
        "backup",
        &[
            ("machine", "machine", Form::Text),
            ("display_name", "display_name", Form::Text),
            ("disks", "disks", Form::Pairs),
            ("rate", "rate_bytes_per_second", Form::Size),
        ],
    ),
    ("check-boot", &[("address", "address", Form::Text), ("until", "until", Form::Text)]),
    ("verify", &[("address", "address", Form::Text), ("sample", "sample", Form::Number)]),
    ("publish", &[("address", "address", Form::Text), ("name", "session", Form::Text)]),
    ("seal", &[("session", "session", Form::Text)]),
    ("unpublish", &[("session", "session", Form::Text), ("discard", "discard", Form::Flag)]),
    (
        "restore",
        &[
            ("address", "address", Form::Text),
            ("target", "target", Form::Text),
            ("format", "format", Form::Text),
            ("force", "replace", Form::Flag),
        ],
    ),
    (
        "recover",
        &[
            ("address", "address", Form::Text),
            ("to", "to", Form::Text),
            ("host", "hosts", Form::List),
            ("connect", "connect", Form::Text),
            ("name", "name", Form::Text),
            ("new_uuid", "new_uuid", Form::Flag),
            ("network", "network", Form::Text),
            ("undo", "undo", Form::Flag),
            ("discard", "discard", Form::Flag),
            ("without_server", "without_server", Form::Flag),
        ],
    ),
    (
        "move",
        &[
            ("session", "address", Form::Text),
            ("targets", "targets", Form::List),
            ("to", "to", Form::Text),
            ("rate", "rate_bytes_per_second", Form::Size),
            ("force", "replace", Form::Flag),
        ],
    ),
    (
        "rollback",
        &[
            ("address", "address", Form::Text),
            ("disks", "disks", Form::Pairs),
            ("onto", "onto", Form::Text),
            ("since", "since", Form::Text),
            ("bitmap", "bitmap", Form::Text),
            ("dry_run", "dry_run", Form::Flag),
            ("no_safety_point", "no_safety_point", Form::Flag),
            ("verify", "verify", Form::Flag),
        ],
    ),
    (
        "attach",
        &[
            ("address", "address", Form::Text),
            ("to", "to", Form::Text),
            ("name", "name", Form::Text),
            ("device", "device", Form::Text),
        ],
    ),
    ("detach", &[("name", "name", Form::Text), ("from", "from", Form::Text)]),
    ("forget", &[("targets", "addresses", Form::List)]),
    ("protect", &[("points", "addresses", Form::List)]),
    ("unprotect", &[("points", "addresses", Form::List)]),
    ("quarantine", &[("points", "addresses", Form::List)]),
    ("release", &[("points", "addresses", Form::List)]),
    (
        "prune",
        &[
            ("machines", "machines", Form::List),
            ("keep_last", "keep_last", Form::RuleCount),
            ("keep_hourly", "keep_hourly", Form::RuleCount),
            ("keep_daily", "keep_daily", Form::RuleCount),
            ("keep_weekly", "keep_weekly", Form::RuleCount),
            ("keep_monthly", "keep_monthly", Form::RuleCount),
            ("keep_yearly", "keep_yearly", Form::RuleCount),
            ("keep_within", "keep_within", Form::Rule),
        ],
    ),
    ("gc", &[]),
    ("fold", &[("addresses", "address", Form::Only)]),
];

/// The request for a command line.
///
/// # Errors
/// `InvalidInput` for a command or an option that the service does not run for others.
pub(super) fn request(matches: &ArgMatches) -> Result<Value> {
    let Some((name, arguments)) = matches.subcommand() else { return Err(refuse("this")) };
    let Some((_, fields)) = COMMANDS.iter().find(|(known, _)| *known == name) else {
        return Err(refuse(&format!("coldrise {name}")));
    };
    let mut request = Map::from_iter([("kind".to_owned(), json!(name))]);
    let mut rules = Map::new();
    let all = Arguments::command();
    // The command's own arguments: options of every command concern this program.
    let own = all.find_subcommand(name).into_iter().flat_map(clap::Command::get_arguments);
    for id in own.map(|argument| argument.get_id().as_str()) {
        if arguments.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let Some((_, field, form)) = fields.iter().find(|(known, _, _)| *known == id) else {
            return Err(refuse(&format!("coldrise {name} --{}", id.replace('_', "-"))));
        };
        let words: Vec<String> = arguments
            .get_raw(id)
            .into_iter()
            .flatten()
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        let first = words.first().cloned().unwrap_or_default();
        let number = || first.parse::<u64>().map(Value::from).map_err(|_| not_a_number(id, &first));
        let (target, value) = match form {
            Form::Only if words.len() > 1 => {
                return Err(refuse(&format!("coldrise {name} with several addresses")));
            }
            Form::Text | Form::Only => (&mut request, json!(first)),
            Form::Number => (&mut request, number()?),
            Form::Size => (&mut request, json!(parse_size(&first)?)),
            Form::Flag => (&mut request, json!(arguments.get_flag(id))),
            Form::List => (&mut request, json!(words)),
            Form::Pairs => (&mut request, pairs(&words)?),
            Form::Rule => (&mut rules, json!(first)),
            Form::RuleCount => (&mut rules, number()?),
        };
        target.insert((*field).to_owned(), value);
    }
    if name == "prune" {
        request.insert("rules".to_owned(), Value::Object(rules));
    }
    Ok(Value::Object(request))
}

fn pairs(words: &[String]) -> Result<Value> {
    let mut pairs = Map::new();
    for word in words {
        let (name, value) = word.split_once('=').ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, format!("{word:?} is not DISK=[FORMAT:]SOURCE"))
        })?;
        pairs.insert(name.to_owned(), json!(value));
    }
    Ok(Value::Object(pairs))
}

fn not_a_number(id: &str, text: &str) -> Error {
    let text = format!("--{}: {text:?} is not a whole number", id.replace('_', "-"));
    Error::new(ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use super::{request, COMMANDS};
    use crate::arguments::Arguments;
    use clap::CommandFactory;
    use serde_json::json;

    fn of(line: &str) -> coldrise_block::Result<serde_json::Value> {
        let words = std::iter::once("coldrise").chain(line.split(' '));
        request(&Arguments::command().try_get_matches_from(words).unwrap())
    }

    #[test]
    fn a_command_line_becomes_a_request() {
        assert_eq!(
            of("backup web01 vda=raw:/dev/vg/web01").unwrap(),
            json!({"kind": "backup", "machine": "web01", "disks": {"vda": "raw:/dev/vg/web01"}})
        );
        assert_eq!(
            of("backup web01 vda=raw:/dev/vg/web01 --rate 1.5M").unwrap()["rate_bytes_per_second"],
            json!(3 << 19)
        );
        assert_eq!(
            of("unpublish trial --discard").unwrap(),
            json!({"kind": "unpublish", "session": "trial", "discard": true})
        );
        assert_eq!(
            of("prune web01 db01 --keep-last 3 --keep-within 7d").unwrap(),
            json!({"kind": "prune", "machines": ["web01", "db01"],
                "rules": {"keep_last": 3, "keep_within": "7d"}})
        );
        assert_eq!(
            of("--server https://x forget web01/latest").unwrap(),
            json!({"kind": "forget", "addresses": ["web01/latest"]})
        );
        assert_eq!(of("gc").unwrap(), json!({"kind": "gc"}));
        assert_eq!(
            of("recover web01/latest --to libvirt --new-uuid").unwrap(),
            json!({"kind": "recover", "address": "web01/latest", "to": "libvirt", "new_uuid": true})
        );
        assert_eq!(
            of("recover web01/latest --to vcenter:vc01 --host esx1 --host esx2").unwrap(),
            json!({"kind": "recover", "address": "web01/latest", "to": "vcenter:vc01",
                "hosts": ["esx1", "esx2"]})
        );
        assert_eq!(
            of("move live/web01-1 vda=/images/a.qcow2 --rate 200M").unwrap(),
            json!({"kind": "move", "address": "live/web01-1", "targets": ["vda=/images/a.qcow2"],
                "rate_bytes_per_second": 200 << 20})
        );
        assert_eq!(
            of("rollback web01/latest vda=/dev/vg0/web01 --dry-run").unwrap(),
            json!({"kind": "rollback", "address": "web01/latest", "dry_run": true,
                "disks": {"vda": "/dev/vg0/web01"}})
        );
    }

    #[test]
    fn what_the_service_does_not_run_is_refused() {
        for line in ["doctor", "repair", "init", "gc --dry-run", "serve nbd", "key list"] {
            let error = of(line).unwrap_err();
            assert!(error.message().contains("not possible over the network"), "{line}: {error}");
        }
    }

    #[test]
    fn every_listed_argument_exists() {
        let all = Arguments::command();
        for (name, fields) in COMMANDS {
            let command = all.find_subcommand(name).unwrap();
            for (id, _, _) in fields {
                assert!(command.get_arguments().any(|a| a.get_id() == id), "{name} {id}");
            }
        }
    }
}
