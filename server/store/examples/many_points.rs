//! Gives a machine more restore points, for measurements of long lists:
//!
//!     cargo run --release -p coldrise-store --example many_points -- REPO MACHINE COUNT
//!
//! Each copies the machine's newest point and is dated some seconds before it. The repository must
//! be unencrypted.

use std::path::Path;

use coldrise_store::{
    MachineName, OpenOptions, PassphraseSource, PointName, PointOrigin, RepositoryWriter,
};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, machine, count] = arguments.as_slice() else {
        return Err("usage: many_points REPO MACHINE COUNT".into());
    };
    let machine = MachineName::parse(machine)?;
    let count: u64 = count.parse()?;
    let path = Path::new(path);
    let writer = RepositoryWriter::open(path, &PassphraseSource::None, &OpenOptions::default())?;
    let newest = writer.repository().newest_points(&machine, 1)?;
    let newest = newest.first().ok_or("the machine has no point")?;
    for back in 1..=count {
        let mut point = newest.clone();
        let seconds = newest.point.unix_seconds().checked_sub(back).ok_or("too many")?;
        point.point = PointName::from_time(jiff::Timestamp::from_second(seconds.try_into()?)?)?;
        point.created_at_ms = 1000 * seconds;
        point.origin = PointOrigin::Backup { sources: Vec::new() };
        writer.put_point(&point)?;
    }
    Ok(())
}
