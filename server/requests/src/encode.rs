//! A request as words of a command line, and as JSON.

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Args, Command};
use coldrise_block::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::{Map, Value};

/// The words of a command line: the command, options, then `--` and the other arguments. They are a list for
/// a process, never for a shell, and no value can become an option.
#[derive(Clone, Debug, Default)]
pub struct CommandLine {
    options: Vec<String>,
    others: Vec<String>,
}

impl CommandLine {
    /// The command alone, such as `serve nbd`.
    pub fn new(command: &str) -> CommandLine {
        let options = command.split(' ').map(str::to_owned).collect();
        CommandLine { options, others: Vec::new() }
    }

    /// Adds what a request says.
    #[must_use]
    pub fn with<R: Args + Serialize>(mut self, request: &R) -> CommandLine {
        let command = R::augment_args(Command::new("request"));
        let fields = fields(request).unwrap_or_default();
        // Groups of options, such as `rules`, are objects without an argument.
        let is_group =
            |name: &str| command.get_arguments().all(|argument| argument.get_id() != name);
        let groups = fields.iter().filter(|(name, _)| is_group(name));
        let groups: Vec<_> = groups.filter_map(|(_, value)| value.as_object()).collect();
        for argument in command.get_arguments() {
            let id = argument.get_id().as_str();
            let found = fields.get(id).or_else(|| groups.iter().find_map(|group| group.get(id)));
            match (argument.get_long(), argument.get_action(), found) {
                (_, _, None) => {}
                (Some(long), ArgAction::SetTrue, value) => {
                    self = self.flag(long, value == Some(&Value::Bool(true)));
                }
                (Some(long), _, Some(value)) => {
                    self = texts(value)
                        .into_iter()
                        .fold(self, |line, text| line.option(long, Some(text)));
                }
                (None, _, Some(value)) => self.others.extend(texts(value)),
            }
        }
        self
    }

    /// Adds an option.
    #[must_use]
    pub fn option(mut self, name: &str, value: Option<impl ToString>) -> CommandLine {
        self.options.extend(value.map(|value| format!("--{name}={}", value.to_string())));
        self
    }

    /// Adds an option without a value.
    #[must_use]
    pub fn flag(mut self, name: &str, is_set: bool) -> CommandLine {
        self.options.extend(is_set.then(|| format!("--{name}")));
        self
    }

    /// Adds a positional argument.
    #[must_use]
    pub fn argument(mut self, text: impl ToString) -> CommandLine {
        self.others.push(text.to_string());
        self
    }

    /// The words.
    pub fn words(self) -> Vec<String> {
        let separator = (!self.others.is_empty()).then(|| "--".to_owned());
        self.options.into_iter().chain(separator).chain(self.others).collect()
    }
}

/// The words on the command line for a value: none for `null`, several for a list.
fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::Null | Value::Bool(_) => Vec::new(),
        Value::String(text) => vec![text.clone()],
        // 5, not 5.0.
        Value::Number(number) => {
            let float = number.as_f64().filter(|_| number.is_f64());
            vec![float.map_or_else(|| number.to_string(), |float| float.to_string())]
        }
        Value::Array(values) => values.iter().flat_map(texts).collect(),
        Value::Object(pairs) => pairs
            .iter()
            .map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default()))
            .collect(),
    }
}

fn fields(request: &impl Serialize) -> Result<Map<String, Value>> {
    match serde_json::to_value(request) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(Error::new(ErrorKind::Internal, "a request that is not an object")),
        Err(error) => Err(Error::new(ErrorKind::InvalidInput, error.to_string())),
    }
}

/// The request of a parsed command line as JSON: what was given, without defaults. `command` has all
/// arguments.
///
/// # Errors
/// `InvalidInput` for an argument that the request does not have.
pub(crate) fn given<R: Args + Serialize>(command: &Command, found: &ArgMatches) -> Result<Value> {
    let known = R::augment_args(Command::new("request"));
    let is_known = |id: &str| known.get_arguments().any(|argument| argument.get_id() == id);
    let is_given = |id: &str| found.value_source(id) == Some(ValueSource::CommandLine);
    let kind = command.get_name();
    let mut own = command.get_arguments().map(|argument| argument.get_id().as_str());
    if let Some(id) = own.find(|id| is_given(id) && !is_known(id)) {
        return Err(refuse(&format!("coldrise {kind} --{}", id.replace('_', "-"))));
    }
    let request = R::from_arg_matches(found)
        .map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))?;
    let mut fields = fields(&request)?;
    fields.retain(|name, _| !is_known(name) || is_given(name));
    fields.insert("kind".to_owned(), kind.into());
    Ok(Value::Object(fields))
}

/// Checks a request as the parser of its command does.
///
/// # Errors
/// `InvalidInput`, with the parser's reason.
pub fn check<R: Args + Serialize>(request: &R) -> Result<()> {
    let command = R::augment_args(Command::new("request"));
    let words = CommandLine::new("request").with(request).words();
    command.try_get_matches_from(words).map(drop).map_err(|error| {
        let text = error.to_string();
        let reason = text.split("\n\n").next().unwrap_or_default();
        let reason: Vec<&str> = reason.trim_start_matches("error: ").split_whitespace().collect();
        Error::new(ErrorKind::InvalidInput, reason.join(" "))
    })
}

/// The error for what has to run beside the repository.
pub fn refuse(what: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("{what} is not possible over the network"))
        .advise("run it on the host of the repository, without --server")
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::json;

    use super::*;
    use crate::*;

    /// JSON becomes words, and the words mean the same JSON.
    fn check<R: Args + Serialize + DeserializeOwned>(sample: &Value, words: &[&str]) {
        let request: R = serde_json::from_value(sample.clone()).unwrap();
        let line = CommandLine::new("run").with(&request).words();
        assert_eq!(line[1..], *words);
        // Of the command's own options, one is named by requests.
        let from = clap::Arg::new("from").long("from");
        let command = R::augment_args(Command::new("run"));
        let has_from = command.get_arguments().any(|argument| argument.get_id() == "from");
        let command = if has_from { command } else { command.arg(from) };
        let found = command.clone().try_get_matches_from(line).unwrap();
        let mut read = given::<R>(&command, &found).unwrap();
        read.as_object_mut().unwrap().remove("kind");
        assert_eq!(read, *sample);
    }

    #[test]
    fn a_request_keeps_its_meaning_as_words() {
        let (address, disk) = ("web01/latest", "web01/latest/vda");
        check::<Recover>(
            &json!({"address": address, "to": "esxi:h1", "hosts": ["a", "b"], "new_uuid": true}),
            &["--to=esxi:h1", "--new-uuid", "--host=a", "--host=b", "--", address],
        );
        check::<Move>(
            &json!({"address": "live/x", "targets": ["/images"], "rate_bytes_per_second": 65536,
                    "replace": true}),
            &["--rate=65536", "--force", "--", "live/x", "/images"],
        );
        check::<Rollback>(
            &json!({"address": address, "disks": {"vda": "/dev/a", "vdb": "/dev/b=c"}}),
            &["--", address, "vda=/dev/a", "vdb=/dev/b=c"],
        );
        check::<Restore>(
            &json!({"address": disk, "target": "-x.img", "format": "raw"}),
            &["--format=raw", "--", disk, "-x.img"],
        );
        check::<CheckBoot>(
            &json!({"address": address, "until": "userspace", "check_port": 22, "on": "hv1"}),
            &["--until=userspace", "--check-port=22", "--on=hv1", "--", address],
        );
        check::<Backup>(
            &json!({"machine": "web01", "disks": {"vda": "raw:/a"}, "rate_bytes_per_second": 65536}),
            &["--rate=65536", "--", "web01", "vda=raw:/a"],
        );
        check::<Attach>(
            &json!({"address": disk, "to": "libvirt:db01", "name": "x", "device": "scsi"}),
            &["--to=libvirt:db01", "--as=x", "--device=scsi", "--", disk],
        );
        check::<Detach>(&json!({"name": "x", "from": "qmp:/q"}), &["--from=qmp:/q", "--", "x"]);
        check::<Publish>(
            &json!({"address": address, "session": "x"}),
            &["--name=x", "--", address],
        );
        check::<Seal>(&json!({"session": "x"}), &["--", "x"]);
        check::<Unpublish>(&json!({"session": "x", "discard": true}), &["--discard", "--", "x"]);
        let points = json!({"addresses": [address, "db01/latest~1"]});
        let words = ["--", address, "db01/latest~1"];
        check::<Forget>(&points, &words);
        check::<Protect>(&points, &words);
        check::<Quarantine>(&points, &words);
        check::<Release>(&points, &words);
        check::<Gc>(&json!({}), &[]);
        check::<Verify>(&json!({"sample": 5.0}), &["--sample=5"]);
        check::<Fold>(&json!({"address": address}), &["--", address]);
        check::<Prune>(
            &json!({"machines": ["web01"], "rules": {"keep_last": 3, "keep_within": "7d"}}),
            &["--keep-last=3", "--keep-within=7d", "--", "web01"],
        );
    }

    #[test]
    fn requests_that_their_command_refuses_are_refused() {
        let rollback = r#"{"address":"web01/latest","disks":{"vda":"/a"},"bitmap":"x"}"#;
        let rollback: Rollback = serde_json::from_str(rollback).unwrap();
        let prune: Prune = serde_json::from_str(r#"{"rules":{}}"#).unwrap();
        let fold: Fold = serde_json::from_str(r#"{"address":"web01"}"#).unwrap();
        for (refused, word) in [
            (super::check(&rollback), "--since"),
            (super::check(&prune), "--keep-last"),
            (super::check(&fold), "web01"),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.message().contains(word), "{}", error.message());
        }
        assert!(super::check(&Gc {}).is_ok());
    }

    #[test]
    fn an_option_that_the_request_does_not_have_is_refused() {
        let command =
            Verify::augment_args(Command::new("verify")).arg(clap::Arg::new("since").long("since"));
        let found = command.clone().try_get_matches_from(["verify", "--since=7d"]).unwrap();
        let error = given::<Verify>(&command, &found).unwrap_err();
        assert_eq!(error.message(), "coldrise verify --since is not possible over the network");
    }
}
