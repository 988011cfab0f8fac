//! The problem of a volume group of LVM, or of an array.

use crate::fields::{Body, Fields, Malformed};
use crate::{MAX_DEVICES, MAX_TEXT_BYTES};

/// A volume group that lacks physical volumes, or that is there several times as an array may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its name.
    pub name: Vec<u8>,
    /// The UUIDs of its physical volumes that are on no disk.
    pub missing: Vec<String>,
    /// If it is there several times: the numbers of the devices with the physical volumes or members of each.
    /// A volume group is not activated then; of arrays the first is.
    pub copies: Vec<Vec<u64>>,
    /// The devices that this concerns.
    pub affected: Vec<Affected>,
}

/// A device that lacks something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affected {
    /// Its number.
    pub device: u64,
    /// Whether all of it can be read nevertheless, as of a mirror.
    pub is_whole: bool,
}

impl Group {
    pub(crate) fn write(&self, body: Body) -> Body {
        let body = body.bytes(&self.name);
        let body = list(body, &self.missing, |body, uuid| body.bytes(uuid.as_bytes()));
        let body = list(body, &self.copies, |body, copy| {
            list(body, copy, |body, device| body.number(*device))
        });
        list(body, &self.affected, |body, one| {
            body.number(one.device).number(u64::from(one.is_whole))
        })
    }

    pub(crate) fn read(fields: &mut Fields<'_>) -> Result<Group, Malformed> {
        Ok(Group {
            name: fields.bytes(MAX_TEXT_BYTES)?.to_vec(),
            missing: read_list(fields, |fields| fields.text(MAX_TEXT_BYTES))?,
            copies: read_list(fields, |fields| read_list(fields, Fields::number))?,
            affected: read_list(fields, |fields| {
                Ok(Affected { device: fields.number()?, is_whole: fields.number()? == 1 })
            })?,
        })
    }
}

/// The number of things, and each.
fn list<T>(body: Body, all: &[T], write: impl Fn(Body, &T) -> Body) -> Body {
    let all = all.get(..MAX_DEVICES).unwrap_or(all);
    all.iter().fold(body.number(all.len() as u64), write)
}

fn read_list<'a, T>(
    fields: &mut Fields<'a>,
    read: impl Fn(&mut Fields<'a>) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let count: usize = fields.small()?;
    if count > MAX_DEVICES {
        return Err(Malformed);
    }
    (0..count).map(|_| read(fields)).collect()
}
