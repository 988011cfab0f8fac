//! Objects from the command line, for tests/test_object_store.py:
//!
//!     objects [--patience SECONDS] URL put NAME FILE
//!     objects [--patience SECONDS] URL get NAME MOST_BYTES
//!     objects [--patience SECONDS] URL range NAME OFFSET LENGTH
//!     objects [--patience SECONDS] URL list PREFIX
//!     objects [--patience SECONDS] URL delete NAME
//!     objects [--patience SECONDS] URL fill PREFIX COUNT
//!
//! Objects go to the standard output, lists there as lines of name, bytes and ms. `fill` puts this many
//! objects from eight threads. An error goes to the standard error, with its kind and its exit code.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_objects::Objects;
use coldrise_objects::{Settings, open};

const THREADS: usize = 8;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {}", error.kind().word(), error.full_message());
            ExitCode::from(if error.kind() == ErrorKind::Interrupted { 130 } else { 1 })
        }
    }
}

fn run() -> Result<()> {
    let cancel = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGINT, cancel.clone())
        .context(|| "watching for SIGINT")?;
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut settings = Settings::default();
    if arguments.first().is_some_and(|word| word == "--patience") {
        settings.patience = Duration::from_secs_f64(number(arguments.get(1))?);
        arguments.drain(..2);
    }
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [url, command, name, ref more @ ..] = words[..] else {
        return Err(Error::new(ErrorKind::InvalidInput, "see the top of the source"));
    };
    let objects = open(url, &settings, cancel)?;
    let read = |path: &&str| std::fs::read(path).context(|| format!("reading {path}"));
    match (command, more) {
        ("put", [path]) => objects.put(name, read(path)?),
        ("get", [most]) => print(&objects.get(name, number(Some(most))?)?),
        ("range", [at, length]) => {
            print(&objects.get_range(name, number(Some(at))?, number(Some(length))?)?)
        }
        ("list", []) => list(&*objects, name),
        ("delete", []) => objects.delete(name),
        ("fill", [count]) => fill(&*objects, name, number(Some(count))?),
        _ => Err(Error::new(ErrorKind::InvalidInput, "see the top of the source")),
    }
}

fn number<T: std::str::FromStr>(text: Option<impl AsRef<str>>) -> Result<T> {
    let number = text.and_then(|text| text.as_ref().parse().ok());
    number.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "a number is missing"))
}

fn print(content: &[u8]) -> Result<()> {
    std::io::stdout().write_all(content).context(|| "writing the object")
}

fn list(objects: &dyn Objects, prefix: &str) -> Result<()> {
    let lines = objects
        .list(prefix)?
        .into_iter()
        .map(|object| format!("{} {} {}\n", object.name, object.size_bytes, object.modified_ms));
    print(lines.collect::<String>().as_bytes())
}

fn fill(objects: &dyn Objects, prefix: &str, count: u64) -> Result<()> {
    let next = AtomicU64::new(0);
    let work = || loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= count {
            return Ok(());
        }
        objects.put(&format!("{prefix}{number:06}"), number.to_string().into_bytes())?;
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().map_err(|_| Error::new(ErrorKind::Internal, "a thread failed"))?
        })
    })
}
