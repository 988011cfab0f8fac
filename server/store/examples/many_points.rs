//! Gives a machine more restore points, for measurements of long lists:
//!
//!     cargo run --release -p coldrise-store --example many_points -- REPO MACHINE COUNT [MACHINES [changed]]
//!
//! Each copies the machine's newest point and is dated an hour before the last. With MACHINES, that many further
//! machines, `MACHINE-1` and so on, get COUNT copies each as well. With `changed`, one chunk of the first disk differs in
//! each. The repository must be unencrypted.

use std::path::Path;

use coldrise_store::{
    MachineName, OpenOptions, PassphraseSource, PointDocument, PointName, PointOrigin,
    RepositoryWriter, WriteOptions,
};

const HOUR_SECONDS: u64 = 3600;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (path, machine, count, machines, is_changed) = match arguments.as_slice() {
        [path, machine, count] => (*path, *machine, *count, "0", false),
        [path, machine, count, machines] => (*path, *machine, *count, *machines, false),
        [path, machine, count, machines, "changed"] => (*path, *machine, *count, *machines, true),
        _ => return Err("usage: many_points REPO MACHINE COUNT [MACHINES [changed]]".into()),
    };
    let machine = MachineName::parse(machine)?;
    let (count, machines): (u64, u64) = (count.parse()?, machines.parse()?);
    let path = Path::new(path);
    let writer = RepositoryWriter::open(path, &PassphraseSource::None, &OpenOptions::default())?;
    let newest = writer.repository().newest_points(&machine, 1)?;
    let newest = newest.first().ok_or("the machine has no point")?;
    let others = (1..=machines).map(|number| MachineName::parse(&format!("{machine}-{number}")));
    let all: Vec<_> = others.chain([Ok(machine.clone())]).collect::<Result<_, _>>()?;
    for (machine, back) in
        all.iter().flat_map(|machine| (1..=count).map(move |back| (machine, back)))
    {
        let mut point = newest.clone();
        point.machine = machine.clone();
        let seconds =
            newest.point.unix_seconds().checked_sub(HOUR_SECONDS * back).ok_or("too many")?;
        point.point = PointName::from_time(jiff::Timestamp::from_second(seconds.try_into()?)?)?;
        point.created_at_ms = 1000 * seconds;
        point.origin = PointOrigin::Backup { sources: Vec::new() };
        if is_changed {
            change(&writer, &mut point)?;
        }
        writer.put_point(&point)?;
    }
    Ok(())
}

/// Gives the first disk another chunk, which no other point has.
fn change(writer: &RepositoryWriter, point: &mut PointDocument) -> coldrise_block::Result<()> {
    let disk = &mut point.disks[0];
    let chunk = u64::from(writer.repository().chunk_size_bytes());
    let content = format!("{}/{}", point.machine, point.point).into_bytes();
    let offset = point.point.unix_seconds() / HOUR_SECONDS % (disk.size_bytes / chunk) * chunk;
    let mut sink =
        writer.disk_writer(Some(disk.root), disk.size_bytes, WriteOptions { threads: 1 })?;
    sink.write(offset, content.into_iter().cycle().take(chunk as usize).collect())?;
    disk.root = sink.finish()?.0;
    Ok(())
}
