//! Lines on a screen or a serial port, and the stages that they prove.

use super::stages::BootStage;

/// Texts of firmware and boot loaders that have failed, anywhere in a line: nothing follows them.
/// Once the kernel lives, the same words may stand in a log.
const FAILED_STARTS: &[&str] = &[
    // SeaBIOS; UEFI.
    "No bootable device",
    "No bootable option or device was found",
    "UEFI Interactive Shell",
    // Boot records.
    "Missing operating system",
    "Operating System not found",
    "Error loading operating system",
    "Invalid partition table",
    "Non-System disk",
    "A disk read error occurred",
    "BOOTMGR is missing",
    "NTLDR is missing",
    "An operating system wasn't found",
    "grub rescue>",
];

/// Texts of systems that have failed.
const FAILED_SYSTEMS: &[&str] = &[
    "Kernel panic - not syncing",
    "VFS: Unable to mount root fs",
    "You are in emergency mode",
    "You are in rescue mode",
    "Entering emergency mode",
    "Give root password for maintenance",
    "*** STOP: 0x",
];

/// Their prompts, at the start of a line.
const FAILED_PROMPTS: &[&str] = &["(initramfs)", "dracut:/#"];
const FAILED_START_PROMPT: &str = "grub>";

const KERNEL: &[&str] = &["Linux version ", "Kernel panic", "FreeBSD is a registered trademark"];

const USERSPACE: &[&str] = &["systemd[1]", "[  OK  ]", "INIT: ", "Begin: "];

/// A character of a screen that is in no font.
pub(crate) const UNKNOWN: char = '\u{fffd}';

/// Whether the line proves that the boot has failed. `has_kernel`: the kernel lives.
pub(crate) fn is_failure(line: &str, has_kernel: bool) -> bool {
    let contains = |texts: &[&str]| texts.iter().any(|text| line.contains(text));
    let begins = |prompt: &str| line.trim_start().starts_with(prompt);
    contains(FAILED_SYSTEMS)
        || FAILED_PROMPTS.iter().any(|prompt| begins(prompt))
        || !has_kernel && (contains(FAILED_STARTS) || begins(FAILED_START_PROMPT))
}

/// The highest stage that the line proves.
pub(super) fn stage(line: &str) -> Option<BootStage> {
    let contains = |texts: &[&str]| texts.iter().any(|text| line.contains(text));
    if is_login(line) {
        Some(BootStage::Login)
    } else if contains(USERSPACE) {
        Some(BootStage::Userspace)
    } else if contains(KERNEL) || has_kernel_time(line) {
        Some(BootStage::Kernel)
    } else {
        None
    }
}

/// `web01 login: `, with or without a cursor. Before the word stand at most two more, as in `web01
/// console login:`, so that a line of a log is not a prompt.
fn is_login(line: &str) -> bool {
    let line = line.trim_end_matches([' ', '_', UNKNOWN]);
    let Some(before) = line.strip_suffix("login:") else { return false };
    let is_name = |word: &str| {
        word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
    };
    (before.is_empty() || before.ends_with(' '))
        && before.split_whitespace().count() <= 2
        && before.split_whitespace().all(is_name)
        && !before.trim_start().starts_with("Last")
}

/// `[    3.141592] `, as Linux begins its lines.
fn has_kernel_time(line: &str) -> bool {
    let inside = line.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let Some((seconds, fraction)) = inside.and_then(|(time, _)| time.split_once('.')) else {
        return false;
    };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    is_number(seconds.trim_start()) && fraction.len() == 6 && is_number(fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_recognized() {
        for line in [
            "No bootable device.",
            "[    1.2] Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)",
            "grub rescue> ",
            " (initramfs) _",
            "You are in emergency mode. After logging in, type \"journalctl -xb\"",
        ] {
            assert!(is_failure(line, false), "{line}");
        }
        for line in ["Welcome to GRUB!", "see initramfs-tools(7), (initramfs)", "a grub> prompt"] {
            assert!(!is_failure(line, false), "{line}");
        }
    }

    #[test]
    fn a_log_of_a_running_system_may_quote_its_boot_loader() {
        for (line, is_failure_later) in
            [("No bootable device.", false), ("grub> ", false), ("(initramfs) ", true)]
        {
            assert!(is_failure(line, false));
            assert_eq!(is_failure(line, true), is_failure_later, "{line}");
        }
    }

    #[test]
    fn boot_stages_are_recognized() {
        for (line, expected) in [
            ("web01 login: ", Some(BootStage::Login)),
            ("web01 login: \u{fffd}", Some(BootStage::Login)),
            ("Last login: ", None),
            ("Last login: Mon Nov 23 login:", None),
            ("Last failed login:", None),
            ("login:", Some(BootStage::Login)),
            ("sun1 console login:", Some(BootStage::Login)),
            ("audit: user=root acct login:", None),
            ("systemd-login:", None),
            ("[  OK  ] Started ssh.service", Some(BootStage::Userspace)),
            ("[    0.000000] Command line: ro", Some(BootStage::Kernel)),
            ("[12345.678901] x", Some(BootStage::Kernel)),
            ("[1.5] x", None),
            ("[]", None),
            ("Welcome to GRUB!", None),
        ] {
            assert_eq!(stage(line), expected, "{line}");
        }
    }
}
