//! Typing: text and key combinations become key strokes of the machine's keyboard.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use coldrise_block::Result;
use coldrise_qmp::Monitor;
use coldrise_runs::MachineSocket;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{PATIENCE, Running};
use crate::api::caller::Caller;
use crate::api::input::{Body, Names};
use crate::api::problem::{Answer, Problem, blocking};
use crate::invalid::invalid;
use crate::service::SharedService;

/// Maximum length of a text, in characters.
const MAX_TEXT: usize = 256;
/// Maximum number of keys that are pressed together.
const MAX_KEYS: usize = 8;
/// How long each key stays down, in milliseconds. Keyboards of machines hold few strokes.
const HOLD_MS: u64 = 15;

/// Keys without a character, by QEMU's names; and letters and digits.
const NAMED_KEYS: [&str; 42] = [
    "shift",
    "shift_r",
    "ctrl",
    "ctrl_r",
    "alt",
    "alt_r",
    "meta_l",
    "meta_r",
    "menu",
    "esc",
    "tab",
    "ret",
    "spc",
    "backspace",
    "caps_lock",
    "num_lock",
    "scroll_lock",
    "insert",
    "delete",
    "home",
    "end",
    "pgup",
    "pgdn",
    "up",
    "down",
    "left",
    "right",
    "print",
    "sysrq",
    "pause",
    "f1",
    "f2",
    "f3",
    "f4",
    "f5",
    "f6",
    "f7",
    "f8",
    "f9",
    "f10",
    "f11",
    "f12",
];
/// Other names that people use.
const OTHER_NAMES: [(&str, &str); 9] = [
    ("enter", "ret"),
    ("return", "ret"),
    ("escape", "esc"),
    ("space", "spc"),
    ("del", "delete"),
    ("pageup", "pgup"),
    ("pagedown", "pgdn"),
    ("meta", "meta_l"),
    ("super", "meta_l"),
];
/// Characters of a US keyboard other than letters and digits: without and with shift.
const SIGNS: [(char, char, &str); 11] = [
    ('-', '_', "minus"),
    ('=', '+', "equal"),
    ('[', '{', "bracket_left"),
    (']', '}', "bracket_right"),
    (';', ':', "semicolon"),
    ('\'', '"', "apostrophe"),
    ('`', '~', "grave_accent"),
    ('\\', '|', "backslash"),
    (',', '<', "comma"),
    ('.', '>', "dot"),
    ('/', '?', "slash"),
];
/// The characters of the digits with shift, from 0.
const SHIFTED_DIGITS: &str = ")!@#$%^&*(";

/// What to type: either `text` or `keys`.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Keys {
    /// Text, typed on a US keyboard. `\n` is Enter.
    #[schema(max_length = 256)]
    text: Option<String>,
    /// Keys pressed together, such as `["ctrl", "alt", "delete"]`.
    #[schema(max_items = 8)]
    keys: Option<Vec<String>>,
}

/// Keys that are pressed together.
type Stroke = Vec<String>;

impl Keys {
    fn strokes(&self) -> Result<Vec<Stroke>> {
        match (&self.text, &self.keys) {
            (Some(text), None) => of_text(text),
            (None, Some(keys)) if (1..=MAX_KEYS).contains(&keys.len()) => {
                Ok(vec![keys.iter().map(|key| named(key)).collect::<Result<_>>()?])
            }
            (None, Some(_)) => Err(invalid(format!("keys: give 1 to {MAX_KEYS}"))),
            _ => Err(invalid("give either text or keys")),
        }
    }
}

/// QEMU's name of a key.
fn named(key: &str) -> Result<String> {
    let key = OTHER_NAMES.iter().find(|(other, _)| *other == key).map_or(key, |(_, name)| name);
    let is_sign = || SIGNS.iter().any(|(_, _, name)| *name == key);
    let is_plain =
        || matches!(key.as_bytes(), [byte] if byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if NAMED_KEYS.contains(&key) || is_sign() || is_plain() {
        return Ok(key.to_owned());
    }
    let shown: String = key.chars().take(20).collect();
    Err(invalid(format!(
        "keys: there is no key {shown:?}; keys are such as a, 7, ctrl, f2, delete"
    )))
}

fn of_text(text: &str) -> Result<Vec<Stroke>> {
    let count = text.chars().count();
    if count == 0 || count > MAX_TEXT {
        return Err(invalid(format!("text: give 1 to {MAX_TEXT} characters")));
    }
    let typed = |(place, character)| {
        stroke(character).ok_or_else(|| {
            invalid(format!(
                "text: character {}, {character:?} (U+{:04X}), is not on a US keyboard",
                place + 1,
                u32::from(character)
            ))
        })
    };
    text.chars().enumerate().map(typed).collect()
}

/// The keys of a character.
fn stroke(character: char) -> Option<Stroke> {
    let plain = |key: &str| Some(vec![key.to_owned()]);
    let shifted = |key: &str| Some(vec!["shift".to_owned(), key.to_owned()]);
    match character {
        'a'..='z' | '0'..='9' => plain(&character.to_string()),
        'A'..='Z' => shifted(&character.to_ascii_lowercase().to_string()),
        ' ' => plain("spc"),
        '\n' => plain("ret"),
        '\t' => plain("tab"),
        other => {
            if let Some(digit) = SHIFTED_DIGITS.find(other) {
                return shifted(&digit.to_string());
            }
            let (lower, _, name) =
                SIGNS.iter().find(|(lower, upper, _)| other == *lower || other == *upper)?;
            match other == *lower {
                true => plain(name),
                false => shifted(name),
            }
        }
    }
}

fn press(monitor: &mut Monitor, stroke: &Stroke) -> Result<()> {
    let keys: Vec<Value> =
        stroke.iter().map(|key| json!({ "type": "qcode", "data": key })).collect();
    monitor.execute("send-key", json!({ "keys": keys, "hold-time": HOLD_MS }), PATIENCE)?;
    // QEMU presses and releases each key in turn; the machine takes a stroke before the next one.
    std::thread::sleep(Duration::from_millis(HOLD_MS * 2 * stroke.len() as u64 + HOLD_MS));
    Ok(())
}

/// Type on the keyboard of the machine on a session: text, or keys pressed together.
///
/// Answers when all is typed. The audit log does not record the text.
#[utoipa::path(post, path = "/sessions/{session}/keys", tag = "sessions", params(("session" = String, Path)),
    request_body = Keys,
    responses((status = 204), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
pub(super) async fn keys(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Names(session): Names<String>,
    Body(keys): Body<Keys>,
) -> Answer<StatusCode> {
    blocking(move || {
        let running = Running::find(&service, caller, &session)?;
        let strokes = keys.strokes()?;
        let mut monitor = running.monitor(&service, MachineSocket::Keys)?;
        strokes.iter().try_for_each(|stroke| press(&mut monitor, stroke))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::{Keys, of_text, stroke};

    #[test]
    fn every_printable_ascii_character_can_be_typed() {
        for byte in b' '..=b'~' {
            assert!(stroke(char::from(byte)).is_some(), "{:?}", char::from(byte));
        }
        assert_eq!(stroke('@').unwrap(), ["shift", "2"]);
        assert_eq!(stroke(')').unwrap(), ["shift", "0"]);
        assert_eq!(stroke('_').unwrap(), ["shift", "minus"]);
        assert_eq!(stroke('\n').unwrap(), ["ret"]);
    }

    #[test]
    fn characters_without_a_key_are_named_in_the_error() {
        let refused = of_text("pässword").unwrap_err().full_message();
        assert!(refused.contains("character 2, 'ä' (U+00E4)"), "{refused}");
        for text in ["\u{1b}", "\r", "\0", "", &"a".repeat(257)] {
            assert!(of_text(text).is_err(), "{text:?}");
        }
        assert_eq!(of_text(&"a".repeat(256)).unwrap().len(), 256);
    }

    #[test]
    fn keys_are_parsed_by_name() {
        let of = |keys: &[&str]| {
            let keys = keys.iter().map(|key| (*key).to_owned()).collect();
            Keys { text: None, keys: Some(keys) }.strokes()
        };
        assert_eq!(of(&["ctrl", "alt", "del"]).unwrap(), [["ctrl", "alt", "delete"]]);
        for keys in [&["A"][..], &["quit"], &[""], &[], &["a"; 9]] {
            assert!(of(keys).is_err(), "{keys:?}");
        }
        assert!(Keys { text: None, keys: None }.strokes().is_err());
        let both = Keys { text: Some("a".into()), keys: Some(vec!["a".into()]) };
        assert!(both.strokes().is_err());
    }
}
