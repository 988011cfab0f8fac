//! A request as words of the command line, and as JSON.

use clap::{ArgAction, Args, Command};
use serde::Serialize;
use serde_json::{Map, Value};

/// The words of the command line for a request: options, then `--` and the other arguments. They are a list for
/// a process, never for a shell, and no value can become an option.
pub fn words<R: Args + Serialize>(request: &R) -> Vec<String> {
    let command = R::augment_args(Command::new("request"));
    let values = fields(serde_json::to_value(request).unwrap_or_default(), &command);
    let (mut options, mut others) = (Vec::new(), Vec::new());
    for argument in command.get_arguments() {
        let Some(value) = values.get(argument.get_id().as_str()) else { continue };
        match (argument.get_long(), argument.get_action()) {
            (Some(long), ArgAction::SetTrue) => {
                options.extend((*value == Value::Bool(true)).then(|| format!("--{long}")));
            }
            (Some(long), _) => {
                options.extend(texts(value).into_iter().map(|text| format!("--{long}={text}")));
            }
            (None, _) => others.extend(texts(value)),
        }
    }
    if !others.is_empty() {
        options.push("--".to_owned());
        options.append(&mut others);
    }
    options
}

/// A request as JSON, without the fields that say nothing.
pub fn to_json(request: &impl Serialize) -> Value {
    compact(serde_json::to_value(request).unwrap_or_default())
}

/// The fields of a request and of the groups in it, such as `rules`.
fn fields(value: Value, command: &Command) -> Map<String, Value> {
    let Value::Object(all) = value else { return Map::new() };
    let mut found = Map::new();
    for (name, value) in all {
        let is_argument = command.get_arguments().any(|argument| argument.get_id() == name.as_str());
        match value {
            Value::Object(group) if !is_argument => found.extend(group),
            value => drop(found.insert(name, value)),
        }
    }
    found
}

/// What stands on the command line for a value: none for `null`, several for a list.
fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::Null | Value::Bool(_) => Vec::new(),
        Value::String(text) => vec![text.clone()],
        Value::Number(number) => vec![number.to_string()],
        Value::Array(values) => values.iter().flat_map(texts).collect(),
        Value::Object(pairs) => {
            let pair = |(name, value): (&String, &Value)| match value {
                Value::String(text) => format!("{name}={text}"),
                value => format!("{name}={value}"),
            };
            pairs.iter().map(pair).collect()
        }
    }
}

fn compact(value: Value) -> Value {
    let Value::Object(fields) = value else { return value };
    let is_empty = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    Value::Object(fields.into_iter().filter(|(_, value)| !is_empty(value)).collect())
}
