//! The kernel's modules, which lie in one folder with the list of what each needs.

use std::fs::File;
use std::io::{Error, Result};

use rustix::io::Errno;
use rustix::system::{delete_module, finit_module};

/// Lines `NAME: NEEDED...`, in the order in which they are loaded.
const LIST: &str = "/modules/list";

/// Loads a module and what it needs. A module that is not in the list is part of the kernel, or the
/// next step says what is missing.
pub(crate) fn load(name: &str) -> Result<()> {
    let list = std::fs::read_to_string(LIST)?;
    let line = list.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    for module in line.unwrap_or_default().split_whitespace().chain(line.map(|_| name)) {
        let file = File::open(format!("/modules/{module}.ko"))?;
        match finit_module(&file, c"", 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => {
                let text = format!("loading the kernel's module {module}: {error}");
                return Err(Error::other(text));
            }
        }
    }
    Ok(())
}

/// Takes a module out of the kernel, if it is there.
pub(crate) fn unload(name: &std::ffi::CStr) -> Result<()> {
    match delete_module(name, 0) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
