//! Measures how long a writer and a reader take to open an unencrypted repository: median and
//! minimum of eleven runs, in milliseconds.

use std::time::Instant;

use coldrise_store::{OpenOptions, PassphraseSource, Repository, RepositoryWriter};

const ROUNDS: usize = 11;

fn main() {
    let path = std::env::args_os().nth(1).expect("the repository's path");
    let (path, none) = (std::path::Path::new(&path), PassphraseSource::None);
    let options = OpenOptions { cache_bytes: 0 };
    show("writer", || drop(RepositoryWriter::open(path, &none, &options).expect("a writer opens")));
    show("reader", || drop(Repository::open(path, &none, &options).expect("a reader opens")));
}

fn show(what: &str, open: impl Fn()) {
    let time = |_| {
        let start = Instant::now();
        open();
        start.elapsed().as_secs_f64() * 1000.0
    };
    let mut times: Vec<f64> = (0..ROUNDS).map(time).collect();
    times.sort_by(f64::total_cmp);
    println!("{what}: median {:.1} ms, least {:.1} ms", times[ROUNDS / 2], times[0]);
}
