//! `coldrise bucket init`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::Result;
use coldrise_bucket::BucketRepository;
use serde::Serialize;

use super::{PATIENCE, objects, parse_url};
use crate::commands::init::{NewRepository, secrecy};
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::show_size;

/// Create a repository in a bucket.
///
/// The bucket must exist; with a prefix it can contain other objects, too. As with coldrise init, keep a copy of the passphrase elsewhere:
/// nothing can be read without it.
#[derive(Debug, Args)]
pub(crate) struct InitArguments {
    /// The bucket, and the prefix of its objects' names: s3://BUCKET/PREFIX.
    #[arg(value_name = "BUCKET", value_parser = parse_url)]
    bucket: String,

    #[command(flatten)]
    new: NewRepository,
}

#[derive(Serialize)]
struct Made {
    bucket: String,
    id: String,
    chunk_size_bytes: u32,
    compression: String,
    is_encrypted: bool,
    elapsed_ms: u64,
}

pub(super) fn run(
    invocation: &Invocation,
    arguments: &InitArguments,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    let objects = objects(&arguments.bucket, PATIENCE, cancel)?;
    arguments.new.make(invocation, |options, guess_time| {
        BucketRepository::init(&objects, options, guess_time)
    })?;
    let bucket = BucketRepository::open(objects, &invocation.passphrase()?)?;
    let made = Made {
        bucket: arguments.bucket.clone(),
        id: bucket.id().to_string(),
        chunk_size_bytes: bucket.chunk_size_bytes(),
        compression: bucket.compression().to_string(),
        is_encrypted: bucket.is_encrypted(),
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text = format!(
        "made a repository in {}\n  chunks of {}, compression {}\n  {}",
        made.bucket,
        show_size(u64::from(made.chunk_size_bytes)),
        made.compression,
        secrecy(made.is_encrypted),
    );
    Ok(Report::done(&made, text))
}
