//! Writes the documents of a run.

use std::io::Write;
use std::path::Path;

use coldrise_block::{Context, Result, create_private, rename_over, temporary_path};
use serde_json::json;

use crate::documents::{Failure, Outcome, Plan};
use crate::folder::{MAX_PLAN_BYTES, MAX_RESULT_BYTES};
use crate::log::MAX_TEXT_BYTES;
use crate::redact;

/// Writes plan.json.
pub(crate) fn write_plan(path: &Path, plan: &Plan) -> std::io::Result<()> {
    let mut text = json!(plan).to_string();
    if text.len() as u64 > MAX_PLAN_BYTES {
        let arguments = vec!["(too long)".to_owned()];
        text = json!(Plan { arguments, ..plan.clone() }).to_string();
    }
    create_private(&path.join("plan.json"))?.write_all(text.as_bytes())
}

/// Writes result.json, whole or not at all for readers. It is not synced: if a power cut takes its
/// content or its name, the run is lost, which is safe. With its id it is never another run's.
pub(crate) fn write_result(folder: &Path, mut outcome: Outcome) -> Result<()> {
    if let Some(Failure { message, .. }) = &mut outcome.error {
        *message = cut(redact(message));
    }
    let mut text = redact(&json!(outcome).to_string());
    if text.len() as u64 > MAX_RESULT_BYTES {
        outcome.counts = None;
        text = redact(&json!(outcome).to_string());
    }
    let path = folder.join("result.json");
    let temporary = temporary_path(&path);
    let written = create_private(&temporary)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| rename_over(&temporary, &path));
    written.context(|| format!("writing {}", path.display())).inspect_err(|_| {
        // On a full drive the file's space is needed.
        let _ = std::fs::remove_file(&temporary);
    })
}

/// The text, at most [`MAX_TEXT_BYTES`] of it.
pub(crate) fn cut(mut text: String) -> String {
    let end = (0..=MAX_TEXT_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}
