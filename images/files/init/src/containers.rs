//! Encrypted containers, which cryptsetup opens: LUKS and BitLocker.

use std::io::{Error, Result};
use std::process::Command;

use crate::block::{Block, node_of};
use crate::command::{last_line, output};
use crate::signature::Content;
use crate::{bitlocker, modules};

/// The names of open containers begin so.
pub(crate) const OPEN: &str = "open-";
/// Modules for the ciphers. Which of them are needed depends on the container.
const CIPHERS: [&str; 8] =
    ["xts", "aesni-intel", "essiv", "cbc", "ecb", "dm-zero", "algif_skcipher", "algif_hash"];

/// As cryptsetup says it.
const WRONG_KEY: &str = "No key available with this passphrase.";

/// Opens the containers that the key opens or that need none, and replaces each with its content.
pub(crate) fn unlock(blocks: &mut [Block], key: &[u8]) -> bool {
    let mut is_any = false;
    for block in blocks {
        let opened = match block.content {
            Content::Luks if key.is_empty() => Err("give its passphrase with --key-file".into()),
            Content::Luks => open(block, "luks", key).map_err(|error| error.to_string()),
            Content::BitLocker => open_bitlocker(block, key),
            _ => continue,
        };
        match opened {
            Ok(node) => {
                let (disk, partition) = (block.disk, block.partition);
                *block = Block::read(&node, disk, partition, block.volume.clone());
                is_any = true;
            }
            Err(why) => block.note = format!("encrypted: {why}"),
        }
    }
    is_any
}

fn open_bitlocker(block: &Block, key: &[u8]) -> std::result::Result<String, String> {
    // Damaged metadata: cryptsetup says what is wrong with it.
    if let Ok(Some(clear_key)) = bitlocker::clear_key(&block.path()) {
        return open(block, "bitlk", &clear_key).map_err(|error| error.to_string());
    }
    if key.is_empty() {
        return Err("give its recovery key or password with --key-file".to_owned());
    }
    let recovery_keys = bitlocker::recovery_keys(key);
    if let Some(group) = recovery_keys.iter().find_map(|key| bitlocker::mistyped_group(key)) {
        return Err(format!("group {group} of the recovery key is mistyped"));
    }
    let mut last = Err(WRONG_KEY.to_owned());
    let mut keys: Vec<&[u8]> = recovery_keys.iter().map(|key| key.as_bytes()).collect();
    if keys.is_empty() {
        keys.push(key);
    }
    for key in keys {
        last = open(block, "bitlk", key).map_err(|error| error.to_string());
        if last.is_ok() {
            break;
        }
    }
    last
}

/// The kernel's name of the device with a container's content.
fn open(block: &Block, kind: &str, key: &[u8]) -> Result<String> {
    modules::load("dm-crypt")?;
    for module in CIPHERS {
        let _ = modules::load(module);
    }
    let name = format!("{OPEN}{}", block.node);
    let mut command = Command::new("/bin/cryptsetup");
    command.args(["open", "--type", kind, "--key-file", "-", "--disable-external-tokens"]);
    command.arg(block.path()).arg(&name);
    let done = output(command, key)?;
    if !done.status.success() {
        // It does not say each time that the key is wrong.
        let is_silent = done.stderr.is_empty();
        return Err(if is_silent { Error::other(WRONG_KEY) } else { last_line(&done) });
    }
    node_of(&name).ok_or_else(|| Error::other("its content did not appear"))
}
