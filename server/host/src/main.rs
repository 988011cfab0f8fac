//! `coldrise-host`: what a backup server does on a hypervisor's host, started by SSH.
#![forbid(unsafe_code)]

use std::io::{stdin, stdout};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use coldrise_block::Context;
use coldrise_host::{bridge, serve};

const USAGE: &str = "coldrise-host is started on a hypervisor's host by a backup server, through SSH:\n  \
    coldrise-host serve             do its tasks: messages on standard input and output\n  \
    coldrise-host connect SOCKET    connect standard input and output to a Unix socket";

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let done = match words.iter().map(|word| word.to_str()).collect::<Vec<_>>()[..] {
        [Some("serve")] => {
            let input = stdin().as_fd().try_clone_to_owned().context(|| "standard input");
            input.and_then(|input| serve(input, stdout()))
        }
        [Some("connect"), Some(socket)] => bridge(Path::new(socket), stdin(), stdout()),
        [Some("--version")] => {
            println!("coldrise-host {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("coldrise-host: {}", error.full_message());
            ExitCode::FAILURE
        }
    }
}
