//! `coldrise completion`: completion scripts for shells.

use clap::{Args, CommandFactory};
use clap_complete::Shell;
use coldrise_block::Result;
use serde::Serialize;

use crate::arguments::Arguments;
use crate::report::Report;

/// Print a shell's completion script.
///
/// For bash: coldrise completion bash > /etc/bash_completion.d/coldrise
#[derive(Debug, Args)]
pub(crate) struct CompletionArguments {
    /// The shell.
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

#[derive(Serialize)]
struct Completion {
    shell: String,
    script: String,
}

pub(crate) fn run(arguments: &CompletionArguments) -> Result<Report> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "coldrise", &mut script);
    let completion = Completion {
        shell: arguments.shell.to_string(),
        script: String::from_utf8_lossy(&script).into_owned(),
    };
    Ok(Report::answer(&completion, completion.script.clone()))
}
