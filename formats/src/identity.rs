//! Ids that stay the same from one mount to the next.

/// The source of every id in an image. The same seed always gives the same
/// bytes. A session uses its own seed, so that a hypervisor never takes two
/// writable disks for the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// 32 bytes, unique per disk and point. They need not be secret, and the
    /// ids do not reveal them.
    pub seed: [u8; 32],
    /// Creation time of the point, in seconds since 1970; VHD stores it.
    pub created_unix_seconds: u64,
}

/// The id to derive: the context of the derivation. A context never changes.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    VhdUnique,
    VhdxFileWrite,
    VhdxDataWrite,
    VhdxPage83,
    VmdkContent,
    VmdkUuid,
}

impl Purpose {
    const fn context(self) -> &'static str {
        match self {
            Purpose::VhdUnique => "coldrise formats v1: VHD unique id",
            Purpose::VhdxFileWrite => "coldrise formats v1: VHDX file write GUID",
            Purpose::VhdxDataWrite => "coldrise formats v1: VHDX data write GUID",
            Purpose::VhdxPage83 => "coldrise formats v1: VHDX page 83 data",
            Purpose::VmdkContent => "coldrise formats v1: VMDK long content id",
            Purpose::VmdkUuid => "coldrise formats v1: VMDK disk uuid",
        }
    }
}

impl Identity {
    /// 16 bytes for one purpose.
    pub(crate) fn bytes(&self, purpose: Purpose) -> [u8; 16] {
        let key = blake3::derive_key(purpose.context(), &self.seed);
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&key[..16]);
        bytes
    }

    /// A UUID in printed order: version 8 (RFC 9562, derived by a custom
    /// algorithm) and the variant of RFC 4122.
    pub(crate) fn uuid(&self, purpose: Purpose) -> [u8; 16] {
        let mut uuid = self.bytes(purpose);
        uuid[6] = uuid[6] & 0x0f | 0x80;
        uuid[8] = uuid[8] & 0x3f | 0x80;
        uuid
    }

    /// The same UUID as a stored Microsoft GUID (MS-DTYP 2.3.4.2).
    pub(crate) fn guid(&self, purpose: Purpose) -> [u8; 16] {
        stored_guid(self.uuid(purpose))
    }
}

/// Converts a GUID's printed bytes to stored order: its first three fields are
/// little endian.
pub(crate) const fn stored_guid(printed: [u8; 16]) -> [u8; 16] {
    let [a, b, c, d, e, f, g, h, rest @ ..] = printed;
    let [i, j, k, l, m, n, o, p] = rest;
    [d, c, b, a, f, e, h, g, i, j, k, l, m, n, o, p]
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity { seed: [7; 32], created_unix_seconds: 0 };

    #[test]
    fn ids_are_stable_and_differ_by_purpose_and_seed() {
        let other = Identity { seed: [8; 32], ..IDENTITY };
        assert_eq!(IDENTITY.uuid(Purpose::VhdUnique), IDENTITY.uuid(Purpose::VhdUnique));
        assert_ne!(IDENTITY.uuid(Purpose::VhdUnique), IDENTITY.uuid(Purpose::VhdxPage83));
        assert_ne!(IDENTITY.uuid(Purpose::VhdUnique), other.uuid(Purpose::VhdUnique));
    }

    #[test]
    fn uuids_and_guids_say_version_and_variant() {
        for seed in 0..64 {
            let identity = Identity { seed: [seed; 32], ..IDENTITY };
            let uuid = identity.uuid(Purpose::VhdUnique);
            assert_eq!((uuid[6] >> 4, uuid[8] >> 6), (8, 2));
            let guid = identity.guid(Purpose::VhdUnique);
            assert_eq!((guid[7] >> 4, guid[8] >> 6), (8, 2));
        }
    }

    #[test]
    fn a_guid_is_stored_mixed_endian() {
        let printed = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        let stored = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
        assert_eq!(stored_guid(printed), stored);
    }
}
