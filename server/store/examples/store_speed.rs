//! Measures the store's own numbers:
//!
//!     cargo run --release -p coldrise-store --example store_speed -- [CHUNKS] [DIR]
//!
//! With a repository of CHUNKS chunks (default 1,000,000): time to open, time to look up and to
//! read a cached and an uncached chunk, time of a small incremental backup, number of database
//! files.

use std::time::{Duration, Instant};

use coldrise_block::Result;
use coldrise_store::{
    Compression, InitOptions, MapRoot, OpenOptions, Passphrase, PassphraseSource, Repository,
    RepositoryWriter, WriteOptions, diff,
};

const CHUNK: usize = 16 << 10;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let chunks: u64 = arguments.first().map_or(Ok(1_000_000), |text| text.parse())?;
    let directory: std::path::PathBuf =
        arguments.get(1).map_or_else(std::env::temp_dir, Into::into);
    let path = directory.join(format!("store-speed-{}", std::process::id()));
    let measured = measure(&path, chunks);
    std::fs::remove_dir_all(&path)?;
    Ok(measured?)
}

/// A unique chunk that compresses to little, so that a million of them take little space.
fn fill(chunk: &mut [u8], seed: u64) {
    chunk.fill(seed as u8);
    chunk[..8].copy_from_slice(&seed.to_le_bytes());
}

fn measure(path: &std::path::Path, chunks: u64) -> Result<()> {
    let passphrase = Passphrase::new(b"measuring".to_vec())?;
    let source = PassphraseSource::Command("echo measuring".to_owned());
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::Zstd(3),
        passphrase: Some(&passphrase),
    };
    Repository::init(path, &options)?;
    let size = chunks * CHUNK as u64;
    let writer = RepositoryWriter::open(path, &source, &OpenOptions::default())?;
    let started = Instant::now();
    let root = write_disk(&writer, None, size, 1, 0..chunks)?;
    println!("backup of {chunks} chunks: {:.2} s", started.elapsed().as_secs_f64());
    let mut roots = vec![root];
    let started = Instant::now();
    for round in 0..50 {
        let first = round * 1000 % (chunks - 100);
        roots.push(write_disk(
            &writer,
            roots.last().copied(),
            size,
            round + 2,
            first..first + 100,
        )?);
    }
    println!(
        "50 incrementals of 100 chunks: {:.1} ms each",
        started.elapsed().as_millis() as f64 / 50.0
    );
    drop(writer);

    for round in 0..3 {
        let started = Instant::now();
        let writer = RepositoryWriter::open(path, &source, &OpenOptions::default())?;
        println!("open for writing {round}: {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
        drop(writer);
    }
    let files = std::fs::read_dir(path.join("db")).map_or(0, |entries| entries.count());
    println!("files in db: {files}");
    warm(&path.join("db"));
    for round in 0..3 {
        let started = Instant::now();
        let repository = Repository::open(path, &source, &OpenOptions::default())?;
        println!("open for reading {round}: {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
        let disk = repository.disk(root, size);
        let mut block = [0; 4096];
        let started = Instant::now();
        disk.read_at(&mut block, size / 2)?;
        println!("first read: {:.0} us", started.elapsed().as_secs_f64() * 1e6);
    }

    let repository = Repository::open(path, &source, &OpenOptions { cache_bytes: 256 << 20 })?;
    let old = repository.disk(roots[0], size);
    let new = repository.disk(roots[50], size);
    let started = Instant::now();
    let mut ranges = 0;
    diff(&old, &new, |_| {
        ranges += 1;
        Ok(())
    })?;
    println!("diff: {ranges} ranges, {:.2} ms", started.elapsed().as_secs_f64() * 1e3);

    let hot_bytes = size.min(128 << 20);
    let mut block = [0; 4096];
    for offset in (0..hot_bytes).step_by(CHUNK) {
        old.read_at(&mut block, offset)?;
    }
    report("cached 4 KiB read, one place", || old.read_at(&mut block, 8192));
    let mut state = 1u64;
    let mut next = |within: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 20) % (within / 4096) * 4096
    };
    report("cached 4 KiB read, random", || old.read_at(&mut block, next(hot_bytes)));
    let cold = Repository::open(path, &source, &OpenOptions { cache_bytes: 0 })?;
    let disk = cold.disk(root, size);
    report("uncached 4 KiB read, random", || disk.read_at(&mut block, next(size)));
    report("extents of 1 GiB", || disk.extents(0, size.min(1 << 30), 1000).map(|_| ()));
    Ok(())
}

fn write_disk(
    writer: &RepositoryWriter,
    base: Option<MapRoot>,
    size: u64,
    round: u64,
    chunks: std::ops::Range<u64>,
) -> Result<MapRoot> {
    let mut disk = writer.disk_writer(base, size, WriteOptions { threads: 2 })?;
    let mut index = chunks.start;
    while index < chunks.end {
        let count = (chunks.end - index).min(64);
        let mut buffer = disk.buffer();
        buffer.resize(count as usize * CHUNK, 0);
        for (position, chunk) in buffer.chunks_mut(CHUNK).enumerate() {
            fill(chunk, round << 40 | (index + position as u64 + 1));
        }
        disk.write(index * CHUNK as u64, buffer)?;
        index += count;
    }
    Ok(disk.finish()?.0)
}

fn report(what: &str, mut operation: impl FnMut() -> Result<()>) {
    let started = Instant::now();
    let mut count = 0u64;
    while started.elapsed() < Duration::from_millis(300) {
        for _ in 0..100 {
            if let Err(error) = operation() {
                println!("{what}: {}", error.full_message());
                return;
            }
        }
        count += 100;
    }
    println!("{what}: {:.3} us", started.elapsed().as_secs_f64() * 1e6 / count as f64);
}

/// Reads every file once: RocksDB drops ingested files from the page cache, and this must not
/// measure the drive.
fn warm(path: &std::path::Path) {
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if let Ok(mut file) = std::fs::File::open(entry.path()) {
            // A directory cannot be read, and this is not necessary.
            let _ = std::io::copy(&mut file, &mut std::io::sink());
        }
    }
}
