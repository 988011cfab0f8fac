//! Passes nfs-ganesha's messages on to stderr.

use std::io::{BufRead, BufReader};
use std::process::ChildStderr;
use std::thread::JoinHandle;

use coldrise_block::{Context, Result};

/// nfs-ganesha's messages about its normal operation.
const NO_NEWS: [&str; 4] = [":EVENT :", ":NULL :", ":INFO :", ":DEBUG :"];
/// Complaints without consequences here: NFSv4 works without rpcbind, and clients may leave
/// without notice.
const NOT_OURS: [&str; 9] = [
    "dbus",
    "DBUS",
    "gssd_",
    "krb5",
    "default realm",
    "RADOS",
    "Cannot register NFS V4",
    "svc_vc_wait",
    "svc_rqst_",
];

/// Passes its lines on until it ends.
pub(super) fn pass_on(messages: ChildStderr) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name("ganesha-log".to_owned());
    let lines = BufReader::new(messages).split(b'\n');
    thread
        .spawn(move || {
            for line in lines.map_while(std::result::Result::ok) {
                let line = String::from_utf8_lossy(&line);
                if is_ours(&line) {
                    eprintln!("ganesha: {}", line.trim_end());
                }
            }
        })
        .context(|| "starting the thread that reads nfs-ganesha's messages")
}

fn is_ours(line: &str) -> bool {
    let is_any_of = |words: &[&str]| words.iter().any(|word| line.contains(word));
    !line.trim().is_empty() && !is_any_of(&NO_NEWS) && !is_any_of(&NOT_OURS)
}
