//! `coldrise bucket`: a repository in an object store, to which `coldrise copy` copies.

mod clean_up;
mod init;
mod list;
mod restore;
mod verify;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::{Args, Subcommand};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_bucket::BucketRepository;
use coldrise_objects::Objects;
use coldrise_objects::Settings;
use coldrise_store::{ClockGuard, MachineName, PassphraseSource, PointDocument, PointSelector};

use crate::invocation::Invocation;
use crate::report::Report;
use coldrise_hosting::signals::cancel_flag;

/// How buckets are named.
const SCHEME: &str = "s3://";
/// How long a request that fails is tried again.
const PATIENCE: Duration = Duration::from_secs(120);

/// Keep copies in an object store (S3), without a Coldrise server there.
///
/// coldrise copy --to s3://BUCKET/PREFIX adds points, coldrise copy --from s3://BUCKET/PREFIX copies them back into a repository, and
/// coldrise bucket restore writes a disk without a repository. The key, the endpoint and the region come from the usual variables:
/// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and AWS_REGION. The bucket has its own passphrase.
#[derive(Debug, Args)]
pub(crate) struct BucketArguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Init(init::InitArguments),
    List(list::ListArguments),
    Restore(restore::RestoreArguments),
    Forget(clean_up::ForgetArguments),
    Prune(clean_up::PruneArguments),
    Verify(verify::VerifyArguments),
}

pub(crate) fn run(invocation: &Invocation, arguments: &BucketArguments) -> Result<Report> {
    let cancel = cancel_flag()?;
    match &arguments.action {
        Action::Init(arguments) => init::run(invocation, arguments, &cancel),
        Action::List(arguments) => list::run(invocation, arguments, &cancel),
        Action::Restore(arguments) => restore::run(invocation, arguments, &cancel),
        Action::Forget(arguments) => clean_up::forget(invocation, arguments, &cancel),
        Action::Prune(arguments) => clean_up::prune(invocation, arguments, &cancel),
        Action::Verify(arguments) => verify::run(invocation, arguments, &cancel),
    }
}

/// The URL of a bucket in one form, if `place` is one.
pub(crate) fn url_of(place: &Path) -> Option<String> {
    let rest = place.to_str()?.strip_prefix(SCHEME)?;
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let url = format!("{SCHEME}{bucket}/{}", prefix.trim_matches('/'));
    Some(url.trim_end_matches('/').to_owned())
}

/// The argument BUCKET.
fn parse_url(text: &str) -> Result<String> {
    url_of(Path::new(text)).ok_or_else(|| {
        let text = format!("{text} is not a bucket: write s3://BUCKET or s3://BUCKET/PREFIX");
        Error::new(ErrorKind::InvalidInput, text)
    })
}

/// The objects of a bucket.
pub(crate) fn objects(
    url: &str,
    patience: Duration,
    cancel: &Arc<AtomicBool>,
) -> Result<Arc<dyn Objects>> {
    let settings = Settings { patience, ..Settings::default() };
    coldrise_objects::open(url, &settings, Arc::clone(cancel))
}

/// The repository in a bucket.
pub(crate) fn open(
    url: &str,
    passphrase: &PassphraseSource,
    patience: Duration,
    cancel: &Arc<AtomicBool>,
) -> Result<Arc<BucketRepository>> {
    BucketRepository::open(objects(url, patience, cancel)?, passphrase)
}

/// The repository that a command names, with the passphrase that is given for repositories.
fn open_for(
    invocation: &Invocation,
    url: &str,
    cancel: &Arc<AtomicBool>,
) -> Result<Arc<BucketRepository>> {
    open(url, &invocation.passphrase()?, PATIENCE, cancel)
}

/// One point of a machine.
fn find(
    bucket: &BucketRepository,
    machine: &MachineName,
    selector: &PointSelector,
) -> Result<PointDocument> {
    let points = bucket.points(machine)?;
    let found = match selector {
        PointSelector::Exact(name) => points.iter().find(|point| point.point == *name),
        PointSelector::Latest(back) => {
            let clock_guard = ClockGuard::new(None);
            let mut counted =
                points.iter().rev().filter(|point| !clock_guard.is_passed_over(&point.point));
            counted.nth(*back as usize)
        }
    };
    found.cloned().ok_or_else(|| missing(bucket, machine, &points))
}

/// The report on points that cannot be read; empty without any.
pub(crate) fn tell_damaged(bucket: &BucketRepository) -> String {
    let damaged = bucket.damaged_points();
    if damaged.is_empty() {
        return String::new();
    }
    let mut text = String::new();
    for (name, why) in &damaged {
        text.push_str(&format!("\na point of {} cannot be read: {name}: {why}", bucket.place()));
    }
    text.push_str(
        "\nget these objects back if the bucket keeps versions of them; else coldrise bucket forget --damaged removes the points",
    );
    text
}

fn missing(bucket: &BucketRepository, machine: &MachineName, points: &[PointDocument]) -> Error {
    let names: Vec<_> = points.iter().map(|point| point.point.as_str()).collect();
    let text = match &names[..] {
        [] => format!("{}: there is no machine {machine}", bucket.place()),
        [.., last] => format!(
            "{}: {machine} has no such point; it has {}, the newest is {last}",
            bucket.place(),
            names.len(),
        ),
    };
    Error::new(ErrorKind::NotFound, text).advise("coldrise bucket list shows what is there")
}
