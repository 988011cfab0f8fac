//! A store of UEFI variables, as the firmware of EDK2 keeps it in flash (UEFI Platform Initialization, volume 3;
//! EDK2's VariableFormat.h). All numbers are little-endian.
//!
//! ```text
//!   firmware volume    40 "_FVH"   48 length of this header, u16
//!   store              0 GUID   16 length with this header, u32   20 0x5a formatted   21 0xfe healthy   28 variables
//!   variable           0 0x55aa   2 state   4 attributes, u32   36 length of the name, u32   40 of the data, u32
//!                      44 vendor GUID   60 name, UTF-16 with its end   data   to a multiple of 4
//!   free space         0xff
//! ```

use coldrise_block::{Error, ErrorKind, Result};

use super::loaders::Loader;
use super::partitions::{PartitionId, u16_at, u32_at};

/// The GUID of the store, as stored: AAF32C78-947B-439A-A180-2E144EC37792, authenticated variables.
const STORE: [u8; 16] = [
    0x78, 0x2c, 0xf3, 0xaa, 0x7b, 0x94, 0x9a, 0x43, 0xa1, 0x80, 0x2e, 0x14, 0x4e, 0xc3, 0x77, 0x92,
];
/// 8BE4DF61-93CA-11D2-AA0D-00E098032B8C, of the variables that the specification defines.
const GLOBAL: [u8; 16] = [
    0x61, 0xdf, 0xe4, 0x8b, 0xca, 0x93, 0xd2, 0x11, 0xaa, 0x0d, 0x00, 0xe0, 0x98, 0x03, 0x2b, 0x8c,
];
const STORE_HEADER_BYTES: usize = 28;
const HEADER_BYTES: usize = 60;
const START: u16 = 0x55aa;
/// States: a variable that counts; the bit that is cleared when it is deleted.
const ADDED: u8 = 0x3f;
const NOT_DELETED: u8 = 0xfd;
/// Non-volatile, for the boot services and the system.
const ATTRIBUTES: u32 = 7;

/// The variables of a new machine: `empty`, the content of the firmware's own file, with a boot entry for each loader before all
/// others.
///
/// # Errors
/// `Unsupported` if the file has another form, or no space.
pub(super) fn new_variables(empty: &[u8], loaders: &[Loader]) -> Result<Vec<u8>> {
    let mut store = Store::open(empty)?;
    let mut order = Vec::new();
    let mut number = 0_u16;
    for loader in loaders {
        while store.has(&entry_name(number)) {
            number = number.checked_add(1).ok_or_else(no_space)?;
        }
        store.append(&entry_name(number), &load_option(loader))?;
        order.extend_from_slice(&number.to_le_bytes());
    }
    if !loaders.is_empty() {
        order.extend(store.take("BootOrder").unwrap_or_default());
        store.append("BootOrder", &order)?;
    }
    Ok(store.bytes)
}

/// Whether Secure Boot is on: the variables have a platform key.
pub(super) fn have_keys(variables: &[u8]) -> bool {
    Store::open(variables).is_ok_and(|store| store.has("PK"))
}

fn entry_name(number: u16) -> String {
    format!("Boot{number:04X}")
}

fn no_space() -> Error {
    Error::new(ErrorKind::Unsupported, "the firmware's variables have no space for a boot entry")
}

struct Store {
    bytes: Vec<u8>,
    /// Where the free space begins and ends.
    free: usize,
    end: usize,
    variables: Vec<Variable>,
}

struct Variable {
    at: usize,
    name: Vec<u8>,
    data: std::ops::Range<usize>,
}

impl Store {
    fn open(bytes: &[u8]) -> Result<Store> {
        let unknown = || {
            let text = "the firmware's file of empty variables has an unknown form";
            Error::new(ErrorKind::Unsupported, text)
        };
        let bytes = bytes.to_vec();
        let start = usize::from(u16_at(&bytes, 48));
        let size = usize::try_from(u32_at(&bytes, start + 16)).unwrap_or(usize::MAX);
        let end = start.checked_add(size).filter(|end| *end <= bytes.len()).ok_or_else(unknown)?;
        let is_store = bytes.get(40..44) == Some(b"_FVH")
            && bytes.get(start..start + 16) == Some(&STORE)
            && bytes.get(start + 20..start + 22) == Some(&[0x5a, 0xfe]);
        if !is_store {
            return Err(unknown());
        }
        let mut store =
            Store { bytes, free: start + STORE_HEADER_BYTES, end, variables: Vec::new() };
        while store.free + HEADER_BYTES <= end && u16_at(&store.bytes, store.free) == START {
            let at = store.free;
            let length =
                |offset| usize::try_from(u32_at(&store.bytes, at + offset)).unwrap_or(usize::MAX);
            let name_at = at + HEADER_BYTES;
            let data_at =
                name_at.checked_add(length(36)).filter(|at| *at <= end).ok_or_else(unknown)?;
            let data_end =
                data_at.checked_add(length(40)).filter(|at| *at <= end).ok_or_else(unknown)?;
            let is_global = store.bytes.get(at + 44..at + HEADER_BYTES) == Some(&GLOBAL);
            if store.bytes.get(at + 2) == Some(&ADDED) && is_global {
                let name = store.bytes.get(name_at..data_at).unwrap_or_default().to_vec();
                store.variables.push(Variable { at, name, data: data_at..data_end });
            }
            store.free = data_end.next_multiple_of(4);
        }
        Ok(store)
    }

    fn has(&self, name: &str) -> bool {
        let name = utf16(name);
        self.variables.iter().any(|variable| variable.name == name)
    }

    /// Deletes a variable and returns its data.
    fn take(&mut self, name: &str) -> Option<Vec<u8>> {
        let name = utf16(name);
        let at = self.variables.iter().position(|variable| variable.name == name)?;
        let variable = self.variables.swap_remove(at);
        *self.bytes.get_mut(variable.at + 2)? &= NOT_DELETED;
        self.bytes.get(variable.data).map(<[u8]>::to_vec)
    }

    fn append(&mut self, name: &str, data: &[u8]) -> Result<()> {
        let name = utf16(name);
        let mut stored = Vec::with_capacity(HEADER_BYTES + name.len() + data.len());
        stored.extend_from_slice(&START.to_le_bytes());
        stored.extend_from_slice(&[ADDED, 0]);
        stored.extend_from_slice(&ATTRIBUTES.to_le_bytes());
        // Count, time and key of authentication: none.
        stored.extend_from_slice(&[0; 28]);
        stored.extend_from_slice(&length_of(&name).to_le_bytes());
        stored.extend_from_slice(&length_of(data).to_le_bytes());
        stored.extend_from_slice(&GLOBAL);
        stored.extend_from_slice(&name);
        stored.extend_from_slice(data);
        let after = (self.free + stored.len()).next_multiple_of(4);
        let place = self.bytes.get_mut(self.free..self.free + stored.len());
        match place.filter(|_| after <= self.end) {
            Some(place) => place.copy_from_slice(&stored),
            None => return Err(no_space()),
        }
        let data_at = self.free + HEADER_BYTES + name.len();
        self.variables.push(Variable { at: self.free, name, data: data_at..data_at + data.len() });
        self.free = after;
        Ok(())
    }
}

/// An EFI_LOAD_OPTION: the partition, and the loader's path on it.
fn load_option(loader: &Loader) -> Vec<u8> {
    let partition = &loader.partition;
    let mut signature = [0_u8; 16];
    let (format, signature_kind) = match partition.id {
        PartitionId::Gpt(id) => {
            signature = id;
            (2, 2)
        }
        PartitionId::Mbr(id) => {
            let (first, _) = signature.split_at_mut(4);
            first.copy_from_slice(&id.to_le_bytes());
            (1, 1)
        }
    };
    let mut place = vec![4, 1, 42, 0];
    place.extend_from_slice(&partition.number.to_le_bytes());
    place.extend_from_slice(&partition.start_block.to_le_bytes());
    place.extend_from_slice(&partition.blocks.to_le_bytes());
    place.extend_from_slice(&signature);
    place.extend_from_slice(&[format, signature_kind]);
    let path = utf16(&loader.path);
    place.extend_from_slice(&[4, 4]);
    place.extend_from_slice(&u16::try_from(path.len() + 4).unwrap_or(u16::MAX).to_le_bytes());
    place.extend_from_slice(&path);
    place.extend_from_slice(&[0x7f, 0xff, 4, 0]);

    let mut option = 1_u32.to_le_bytes().to_vec();
    option.extend_from_slice(&u16::try_from(place.len()).unwrap_or(u16::MAX).to_le_bytes());
    option.extend_from_slice(&utf16(&loader.path));
    option.extend_from_slice(&place);
    option
}

/// With its end.
fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes).collect()
}

/// Of names and boot entries: some hundred bytes.
fn length_of(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}
