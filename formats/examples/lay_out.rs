//! Writes a raw disk as an image: `lay_out FORMAT RAWFILE FOLDER [SECTOR_BYTES]`.
//!
//! The image's files get the names they have in the served tree, after RAWFILE's
//! name without its extension. Holes of RAWFILE are what a compact format leaves
//! out, and stay holes in the others. Prints one line of JSON per file: its
//! name, size and segments.

use std::error::Error;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;

use coldrise_formats::{
    Access, DiskShape, Format, GRAIN_SIZE_BYTES, GrainCompressor, Identity, Layout, Names,
    Presentation, SectorSize, Source, StreamVmdk,
};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

type Outcome<T> = Result<T, Box<dyn Error>>;

const PIECE_BYTES: u64 = 1 << 20;
const HOLE_BYTES: usize = 4096;
const LEVEL: u32 = 6;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lay_out: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [format, raw, folder, sector @ ..] = arguments.as_slice() else {
        return Err("usage: lay_out FORMAT RAWFILE FOLDER [SECTOR_BYTES]".into());
    };
    let format: Format = format.parse()?;
    let (raw, folder) = (Path::new(raw), Path::new(folder));
    let source = File::open(raw)?;
    let identity = Identity { seed: [42; 32], created_unix_seconds: 1_800_000_000 };
    let mut disk = DiskShape::new(source.metadata()?.len(), identity);
    if sector.first().is_some_and(|bytes| bytes == "4096") {
        disk.sector_size = SectorSize::B4096;
    }
    let name = raw.file_stem().and_then(|stem| stem.to_str()).ok_or("a name that is not UTF-8")?;
    let names = Names::in_tree(format, name)?;
    let data = folder.join(names.companion());
    let names = names.with_reference(data.to_str().ok_or("a folder that is not UTF-8")?)?;

    if format.access() == Access::Streamed {
        return stream(&source, &names, &disk, &folder.join(names.image()));
    }
    let stored = stored(&source)?;
    for file in Presentation::new(&names, &disk, stored.iter().cloned())?.into_files() {
        write_file(&source, &stored, &file.layout, &folder.join(&file.name))?;
        print_file(&file.name, &file.layout);
    }
    Ok(())
}

/// The ranges of a file that are not holes.
fn stored(file: &File) -> Outcome<Vec<Range<u64>>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    loop {
        match seek(file, SeekFrom::Data(at)) {
            Ok(start) => {
                at = seek(file, SeekFrom::Hole(start))?;
                ranges.push(start..at);
            }
            Err(Errno::NXIO) => return Ok(ranges),
            Err(error) => return Err(error.into()),
        }
    }
}

fn write_file(source: &File, stored: &[Range<u64>], layout: &Layout, path: &Path) -> Outcome<()> {
    let target = File::create(path)?;
    target.set_len(layout.size_bytes())?;
    let mut buffer = vec![0; PIECE_BYTES as usize];
    for segment in layout.segments(0..layout.size_bytes()) {
        let within = 0..segment.length_bytes;
        match segment.source {
            Source::Zero => {}
            Source::Metadata => for_each_piece(within, |piece| {
                let part = &mut buffer[..(piece.end - piece.start) as usize];
                let at = segment.offset_bytes + piece.start;
                layout.read_metadata(at, part);
                write_sparse(&target, part, at)
            })?,
            Source::Disk { offset_bytes } => {
                let disk = offset_bytes..offset_bytes + segment.length_bytes;
                let first = stored.partition_point(|range| range.end <= disk.start);
                for range in stored[first..].iter().take_while(|range| range.start < disk.end) {
                    let shared = range.start.max(disk.start)..range.end.min(disk.end);
                    for_each_piece(shared, |piece| {
                        let part = &mut buffer[..(piece.end - piece.start) as usize];
                        source.read_exact_at(part, piece.start)?;
                        let at = segment.offset_bytes + piece.start - disk.start;
                        write_sparse(&target, part, at)
                    })?;
                }
            }
        }
    }
    Ok(())
}

fn for_each_piece(
    range: Range<u64>,
    mut act: impl FnMut(Range<u64>) -> Outcome<()>,
) -> Outcome<()> {
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min(at + PIECE_BYTES);
        act(at..end)?;
        at = end;
    }
    Ok(())
}

/// Writes what is not zeroes: the file is new, so it has zeroes already.
fn write_sparse(target: &File, bytes: &[u8], offset_bytes: u64) -> Outcome<()> {
    for (index, block) in bytes.chunks(HOLE_BYTES).enumerate() {
        if block.iter().any(|byte| *byte != 0) {
            target.write_all_at(block, offset_bytes + (index * HOLE_BYTES) as u64)?;
        }
    }
    Ok(())
}

fn stream(source: &File, names: &Names, disk: &DiskShape, path: &Path) -> Outcome<()> {
    let target = File::create(path)?;
    let mut written = 0;
    let mut out = Vec::new();
    let mut compressor = GrainCompressor::new(LEVEL);
    let mut stream = StreamVmdk::start(names, disk, &mut out)?;
    let mut buffer = vec![0; GRAIN_SIZE_BYTES as usize];
    let mut next = 0;
    for range in stored(source)? {
        let first = (range.start / GRAIN_SIZE_BYTES).max(next);
        next = range.end.div_ceil(GRAIN_SIZE_BYTES);
        for grain in first..next {
            let start = grain * GRAIN_SIZE_BYTES;
            let length = GRAIN_SIZE_BYTES.min(disk.size_bytes - start) as usize;
            source.read_exact_at(&mut buffer[..length], start)?;
            if let Some(compressed) = compressor.compress(grain, &buffer[..length])? {
                stream.append(&compressed, &mut out)?;
            }
            if out.len() as u64 >= PIECE_BYTES {
                target.write_all_at(&out, written)?;
                written += out.len() as u64;
                out.clear();
            }
        }
    }
    stream.finish(&mut out);
    target.write_all_at(&out, written)?;
    let size = written + out.len() as u64;
    println!(r#"{{"name":"{}","size_bytes":{size},"segments":[]}}"#, names.image());
    Ok(())
}

/// Names have neither quotation marks nor control characters.
fn print_file(name: &str, layout: &Layout) {
    let segments: Vec<_> = layout
        .segments(0..layout.size_bytes())
        .map(|segment| {
            let (source, disk) = match segment.source {
                Source::Disk { offset_bytes } => ("disk", offset_bytes),
                Source::Metadata => ("metadata", 0),
                Source::Zero => ("zero", 0),
            };
            format!(
                r#"{{"offset_bytes":{},"length_bytes":{},"source":"{source}","disk_offset_bytes":{disk},"writes":"{:?}"}}"#,
                segment.offset_bytes, segment.length_bytes, segment.writes
            )
        })
        .collect();
    println!(
        r#"{{"name":"{name}","size_bytes":{},"growth_limit_bytes":{},"segments":[{}]}}"#,
        layout.size_bytes(),
        layout.growth_limit_bytes(),
        segments.join(",")
    );
}
