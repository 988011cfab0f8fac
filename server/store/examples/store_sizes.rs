//! Prints the cost and the gain of chunk sizes and compressions for one input file:
//!
//!     cargo run --release -p coldrise-store --example store_sizes -- FILE [THREADS] [DIR]
//!
//! Every combination gets a new encrypted repository in DIR (by default the system's directory for
//! temporary files). The input is read into memory first; the store is in the page cache when it is
//! read.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::Result;
use coldrise_store::{
    Compression, InitOptions, OpenOptions, Passphrase, PassphraseSource, Repository,
    RepositoryWriter, WriteOptions,
};

const CHUNK_SIZES: [u32; 7] =
    [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10];
const COMPRESSIONS: [Compression; 5] = [
    Compression::None,
    Compression::Lz4,
    Compression::Zstd(1),
    Compression::Zstd(3),
    Compression::Zstd(9),
];

struct Row {
    stored_bytes: u64,
    database_bytes: u64,
    store: Duration,
    store_cpu: Duration,
    restore: Duration,
    restore_cpu: Duration,
    random_reads_per_second: f64,
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let file =
        arguments.first().ok_or("usage: store_sizes FILE [THREADS] [DIR] [CHUNK] [COMPRESSION]")?;
    let threads = arguments.get(1).map_or(Ok(2), |text| text.parse())?;
    let directory = arguments.get(2).map_or_else(std::env::temp_dir, Into::into);
    let only_size: Option<u32> = arguments.get(3).map(|text| text.parse()).transpose()?;
    let only_compression = arguments.get(4).map(|text| Compression::parse(text)).transpose()?;
    let content = std::fs::read(file)?;
    println!("input {} bytes, {threads} threads", content.len());
    println!(
        "| chunk | compression | space | database | store MB/s | CPU s/GB | restore MB/s | CPU s/GB \
         | cold 4K reads/s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for chunk_size in CHUNK_SIZES.into_iter().filter(|size| only_size.is_none_or(|o| o == *size)) {
        for compression in
            COMPRESSIONS.into_iter().filter(|c| only_compression.is_none_or(|o| o == *c))
        {
            let path = directory.join(format!("store-sizes-{}", std::process::id()));
            let row = measure(&path, chunk_size, compression, &content, threads);
            std::fs::remove_dir_all(&path)?;
            let row = row?;
            let megabytes = content.len() as f64 / 1e6;
            println!(
                "| {}K | {compression} | {:.3} | {:.3} | {:.0} | {:.2} | {:.0} | {:.2} | {:.0} |",
                chunk_size >> 10,
                row.stored_bytes as f64 / content.len() as f64,
                row.database_bytes as f64 / content.len() as f64,
                megabytes / row.store.as_secs_f64(),
                row.store_cpu.as_secs_f64() / megabytes * 1e3,
                megabytes / row.restore.as_secs_f64(),
                row.restore_cpu.as_secs_f64() / megabytes * 1e3,
                row.random_reads_per_second,
            );
        }
    }
    Ok(())
}

fn measure(
    path: &Path,
    chunk_size_bytes: u32,
    compression: Compression,
    content: &[u8],
    threads: usize,
) -> Result<Row> {
    let passphrase = Passphrase::new(b"measuring".to_vec())?;
    let source = PassphraseSource::Command("echo measuring".to_owned());
    let options = InitOptions { chunk_size_bytes, compression, passphrase: Some(&passphrase) };
    Repository::init(path, &options)?;

    let writer = RepositoryWriter::open(path, &source, &OpenOptions { cache_bytes: 0 })?;
    let (started, cpu) = (Instant::now(), cpu_time());
    let mut disk = writer.disk_writer(None, content.len() as u64, WriteOptions { threads })?;
    let mut offset = 0;
    for piece in content.chunks(1 << 20) {
        let mut buffer = disk.buffer();
        buffer.extend_from_slice(piece);
        disk.write(offset, buffer)?;
        offset += piece.len() as u64;
    }
    let (root, counts) = disk.finish()?;
    let (store, store_cpu) = (started.elapsed(), cpu_time() - cpu);
    drop(writer);
    warm(&path.join("db"));

    let repository = Repository::open(path, &source, &OpenOptions { cache_bytes: 0 })?;
    let disk = repository.disk(root, content.len() as u64);
    let (started, cpu) = (Instant::now(), cpu_time());
    let next = AtomicU64::new(0);
    const PIECE: u64 = 1 << 20;
    let same = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut buffer = vec![0; PIECE as usize];
                loop {
                    let offset = next.fetch_add(PIECE, Ordering::Relaxed);
                    if offset >= content.len() as u64 {
                        return;
                    }
                    let end = (offset + PIECE).min(content.len() as u64);
                    let part = &mut buffer[..(end - offset) as usize];
                    if disk.read_at(part, offset).is_err() {
                        same.store(false, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let (restore, restore_cpu) = (started.elapsed(), cpu_time() - cpu);

    let mut state = 0x1234_5678_9abc_def1u64;
    let mut block = [0; 4096];
    let blocks = content.len() as u64 / 4096;
    let started = Instant::now();
    let mut reads = 0u64;
    while started.elapsed() < Duration::from_millis(500) {
        for _ in 0..64 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let offset = (state % blocks) * 4096;
            disk.read_at(&mut block, offset)?;
            let wanted = &content[offset as usize..offset as usize + 4096];
            same.fetch_and(block == *wanted, Ordering::Relaxed);
            reads += 1;
        }
    }
    assert!(same.load(Ordering::Relaxed), "what was read is not what was stored");
    Ok(Row {
        stored_bytes: counts.stored_bytes,
        database_bytes: directory_bytes(&path.join("db")),
        store,
        store_cpu,
        restore,
        restore_cpu,
        random_reads_per_second: reads as f64 / started.elapsed().as_secs_f64(),
    })
}

/// Processor time of all threads of this process so far.
fn cpu_time() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime)
        .try_into()
        .unwrap_or_default()
}

fn directory_bytes(path: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(path) else { return 0 };
    entries.flatten().filter_map(|e| e.metadata().ok()).map(|m| m.len()).sum()
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
