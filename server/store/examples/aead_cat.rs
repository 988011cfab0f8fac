//! Reads files and runs them through AES-256-GCM, in pieces of one chunk: the minimum cost of
//! verifying them, or of backing them up. `aead_cat verify|none|zstd:1 THREADS CHUNK_BYTES FILE…`
//!
//! When verifying, the pieces do not authenticate, but the cipher detects that only after all of its
//! work. A backup hashes each chunk, compresses it with `zstd:1` and encrypts it; holes are skipped.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use rustix::fs::{SeekFrom, seek};
use zstd::bulk::Compressor;

const PIECE_BYTES: u64 = 1 << 20;

type Failed = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failed> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage = "usage: aead_cat verify|none|zstd:1 THREADS CHUNK_BYTES FILE…";
    let [what, threads, chunk_bytes, paths @ ..] = arguments.as_slice() else {
        return Err(usage.into());
    };
    if !["verify", "none", "zstd:1"].contains(&what.as_str()) {
        return Err(usage.into());
    }
    let (verifies, compresses) = (what == "verify", what == "zstd:1");
    let (threads, chunk_bytes): (usize, usize) = (threads.parse()?, chunk_bytes.parse()?);
    let mut files = Vec::new();
    for path in paths {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        files.push((file, length));
    }
    let pieces: u64 = files.iter().map(|(_, length)| length.div_ceil(PIECE_BYTES)).sum();
    let next = AtomicU64::new(0);
    let work = || -> Result<u64, Failed> {
        let key = UnboundKey::new(&AES_256_GCM, &[7; 32]).map_err(|_| "no AES-256-GCM")?;
        let key = LessSafeKey::new(key);
        let mut buffer = vec![0; PIECE_BYTES as usize];
        let mut plain = vec![0; chunk_bytes];
        let mut zstd = Compressor::new(1)?;
        let mut done = 0;
        loop {
            let mut piece = next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                return Ok(done);
            }
            for (file, length) in &files {
                let of_file = length.div_ceil(PIECE_BYTES);
                if piece >= of_file {
                    piece -= of_file;
                    continue;
                }
                let start = piece * PIECE_BYTES;
                let part = &mut buffer[..PIECE_BYTES.min(length - start) as usize];
                if seek(file, SeekFrom::Data(start)).unwrap_or(*length) >= start + PIECE_BYTES {
                    break;
                }
                file.read_exact_at(part, start)?;
                for chunk in part.chunks_mut(chunk_bytes) {
                    let nonce = Nonce::assume_unique_for_key([0; 12]);
                    if !verifies {
                        done += chunk.len() as u64;
                        std::hint::black_box(blake3::hash(chunk));
                        // As the store: what hardly shrinks is not compressed.
                        let room = &mut plain[..chunk.len() - chunk.len() / 32];
                        let compressed = compresses.then(|| zstd.compress_to_buffer(chunk, room));
                        let sealed = match compressed {
                            Some(Ok(length)) => &mut plain[..length],
                            _ => chunk,
                        };
                        if key.seal_in_place_separate_tag(nonce, Aad::empty(), sealed).is_err() {
                            return Err("AES-256-GCM refused to seal".into());
                        }
                        continue;
                    }
                    let plain = &mut plain[..chunk.len()];
                    let opened =
                        key.open_separate_gather(nonce, Aad::empty(), chunk, &[0; 16], plain);
                    done += chunk.len() as u64 + u64::from(opened.is_ok());
                }
                break;
            }
        }
    };
    let done = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_fold(0, |sum, worker| {
            worker.join().map_err(|_| "a thread panicked")?.map(|done| sum + done)
        })
    })?;
    println!("{done} bytes");
    Ok(())
}
