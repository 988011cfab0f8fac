//! Which ciphers ssh offers first.
//!
//! OpenSSH prefers ChaCha20, which is the better choice for processors without instructions for AES. Others encrypt a
//! backup's data with AES-GCM in a third of the time. The user's own `Ciphers` in a configuration of ssh counts more.

use std::process::{Command, Stdio};

/// OpenSSH's names of AES-GCM.
const AES_GCM: [&str; 2] = ["aes128-gcm@openssh.com", "aes256-gcm@openssh.com"];

/// The value of ssh's option `Ciphers` for a connection: all that it would offer, AES-GCM first. `None`: as ssh chooses. The two
/// commands end with the words for the destination; the second one ignores all configurations.
pub(crate) fn preferred(configured: Command, plain: Command) -> Option<String> {
    if !has_aes() {
        return None;
    }
    let start = |mut command: Command| {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()
    };
    // At the same time.
    let started = [start(configured), start(plain)];
    let [configured, plain] = started.map(|child| {
        let output = child?.wait_with_output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        text.lines().find_map(|line| line.strip_prefix("ciphers ")).map(str::to_owned)
    });
    gcm_first(&configured?, &plain?)
}

fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has_aes =
        std::is_x86_feature_detected!("aes") && std::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    let has_aes = std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let has_aes = false;
    has_aes
}

/// `None` if a configuration has chosen, or AES-GCM is not known.
fn gcm_first(configured: &str, plain: &str) -> Option<String> {
    if configured != plain {
        return None;
    }
    let (gcm, others): (Vec<&str>, Vec<&str>) =
        plain.split(',').partition(|name| AES_GCM.contains(name));
    (!gcm.is_empty()).then(|| [gcm, others].concat().join(","))
}

#[cfg(test)]
mod tests {
    use super::gcm_first;

    #[test]
    fn only_the_order_of_the_default_changes() {
        let plain = "chacha20-poly1305@openssh.com,aes128-ctr,aes128-gcm@openssh.com";
        let wanted = "aes128-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr";
        assert_eq!(gcm_first(plain, plain).as_deref(), Some(wanted));
        assert_eq!(gcm_first("chacha20-poly1305@openssh.com", plain), None);
        assert_eq!(gcm_first("aes128-ctr", "aes128-ctr"), None);
    }
}
