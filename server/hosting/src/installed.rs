//! The files that belong to this program, wherever it is installed.

use std::env::consts::ARCH;
use std::path::{Path, PathBuf};

/// Finds the library `file`: beside the program (as built), else in `folder` of the libraries of
/// the program's prefix, also where Debian has one folder per architecture.
pub(crate) fn library(folder: &str, file: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    beside(program.parent()?, folder, file)
}

fn beside(programs: &Path, folder: &str, file: &str) -> Option<PathBuf> {
    let libraries = programs.join("../lib");
    let places = [
        programs.to_owned(),
        libraries.join(folder),
        libraries.join(format!("{ARCH}-linux-gnu")).join(folder),
    ];
    places.into_iter().map(|place| place.join(file)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_in_each_place_the_nearest_first() {
        let prefix = tempfile::tempdir().unwrap();
        let programs = prefix.path().join("bin");
        std::fs::create_dir(&programs).unwrap();
        let found = || beside(&programs, "nbdkit/plugins", "plugin.so");
        assert_eq!(found(), None);
        let multiarch = format!("../lib/{ARCH}-linux-gnu/nbdkit/plugins");
        for place in [multiarch.as_str(), "../lib/nbdkit/plugins", "."] {
            std::fs::create_dir_all(programs.join(place)).unwrap();
            let path = programs.join(place).join("plugin.so");
            std::fs::write(&path, "").unwrap();
            let found = found().unwrap();
            assert_eq!(found.canonicalize().unwrap(), path.canonicalize().unwrap());
        }
    }
}
