//! `coldrise man`: writes the man pages, for builds and packages.

use std::path::PathBuf;

use clap::{Args, CommandFactory};
use coldrise_block::{Context, Result};
use serde_json::json;

use crate::arguments::Arguments;
use crate::report::Report;

/// Write the man pages into a directory.
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct ManArguments {
    /// The directory; it is created if it is missing.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

pub(crate) fn run(arguments: &ManArguments) -> Result<Report> {
    let directory = &arguments.directory;
    let what = || format!("writing the man pages to {}", directory.display());
    std::fs::create_dir_all(directory).context(what)?;
    clap_mangen::generate_to(Arguments::command(), directory).context(what)?;
    let object = json!({ "directory": directory.display().to_string() });
    Ok(Report::done(&object, format!("wrote the man pages to {}", directory.display())))
}
